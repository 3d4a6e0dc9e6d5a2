"""What `moeedge trace` prints: one table of figures, or one JSON object."""

from __future__ import annotations

from rich.console import Console

from moeedge.trace.summary import TraceSummary
from moeedge.ui.console import show_figures, visible
from moeedge.ui.figures import Figure

_MIB = 1024 * 1024


def print_summary(summary: TraceSummary, console: Console) -> None:
    """Labels and values in two columns; what the trace does not tell is left out."""
    show_figures(console, list(_figures(summary)))


def _figures(one: TraceSummary) -> list[Figure]:
    architecture = f" ({visible(one.architecture)})" if one.architecture else ""
    layers = str(one.n_layers)
    if one.expert_layers != one.n_layers:
        layers += f", {one.expert_layers} with recorded experts"
    lines: list[tuple[str, str | None]] = [
        ("model", visible(one.model) + architecture),
        ("source", visible(one.source) or None),
        ("layers", layers),
        ("experts", f"{one.n_experts} per layer, {one.n_expert_used} per token"),
        ("expert size", None if one.expert_bytes is None else f"{one.expert_bytes / _MIB:.2f} MiB"),
        ("texts", f"{one.sequences:,}"),
        ("tokens", _tokens(one)),
        ("steps", _steps(one)),
        ("drafts", None if one.gamma is None else f"up to {one.gamma} tokens, acceptance {_share(one.acceptance)}"),
        ("overlap", None if one.overlap is None else f"{one.overlap:.3f} of adjacent tokens' experts"),
        ("not recorded", f"{100 * one.not_recorded:.1f} % of tokens and layers" if one.not_recorded else None),
        ("also holds", ", ".join(_also(one)) or None),
    ]
    return [Figure(label, value) for label, value in lines if value is not None]


def _tokens(one: TraceSummary) -> str:
    parts = [
        (one.prefill_tokens, "prefill"),
        (one.text_tokens, "decoded text"),
        (one.rejected_tokens, "rejected drafts"),
    ]
    parts.append((one.draft_tokens, "drafting"))
    return f"{one.tokens:,}: " + ", ".join(f"{n:,} {what}" for n, what in parts if n)


def _also(one: TraceSummary) -> list[str]:
    kinds = (
        (one.has_weights, "weights"),
        (one.has_tokens, "vocabulary ids"),
        (one.has_hidden_states, "the draft's states"),
    )
    return [what for there, what in kinds if there]


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _steps(one: TraceSummary) -> str:
    return f"{one.steps:,}" + ("" if one.tokens_per_step is None else f", {one.tokens_per_step:.2f} tokens each")
