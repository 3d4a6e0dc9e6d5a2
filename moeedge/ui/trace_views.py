"""The results of `moeedge trace info`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeedge.ui.console import show_figures, visible
from moeedge.ui.figures import Figure
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.trace.summary import TraceSummary

_MIB = 2**20


def print_trace_summary(summary: TraceSummary, console: Console) -> None:
    """Labels and values; what the trace does not know is left out."""
    figures = (Figure(label, text) for label, text_of in _SUMMARY if (text := text_of(summary)))
    show_figures(console, list(figures))


def _layers(summary: TraceSummary) -> str:
    if summary.expert_layers == summary.n_layers:
        return str(summary.n_layers)
    return f"{summary.n_layers}, {summary.expert_layers} with recorded experts"


def _tokens(summary: TraceSummary) -> str:
    parts = (
        (summary.prefill_tokens, "prefill"),
        (summary.text_tokens, "decoded text"),
        (summary.rejected_tokens, "rejected drafts"),
        (summary.draft_tokens, "drafting"),
    )
    return f"{summary.tokens:,}: " + ", ".join(f"{n:,} {kind}" for n, kind in parts if n)


def _steps(summary: TraceSummary) -> str:
    per_step = "" if summary.tokens_per_step is None else f", {summary.tokens_per_step:.2f} tokens each"
    return f"{summary.steps:,}{per_step}"


def _drafts(summary: TraceSummary) -> str | None:
    if summary.gamma is None:
        return None
    return (
        f"up to {summary.gamma} tokens, acceptance rate {summary.acceptance_rate:.3f}, chance of one after accepted "
        f"ones {summary.acceptance_chance:.3f}"
    )


def _expert_size(n_bytes: float) -> str:
    return f"{n_bytes / _MIB:.2f} MiB" if n_bytes >= _MIB else format_bytes(round(n_bytes))


def _extras(summary: TraceSummary) -> str:
    kinds = (
        (summary.has_weights, "weights"),
        (summary.has_tokens, "vocabulary ids"),
        (summary.has_hidden_states, "the draft's hidden states"),
    )
    return ", ".join(name for present, name in kinds if present)


_SUMMARY: tuple[tuple[str, Callable[[Any], str | None]], ...] = (
    ("model", lambda s: visible(s.model) + (f" ({visible(s.architecture)})" if s.architecture else "")),
    ("source", lambda s: visible(s.source)),
    ("layers", _layers),
    ("experts", lambda s: f"{s.n_experts} per layer, {s.n_expert_used} per token"),
    ("expert size", lambda s: None if s.expert_bytes is None else _expert_size(s.expert_bytes)),
    ("texts", lambda s: f"{s.sequences:,}"),
    ("tokens", _tokens),
    ("steps", _steps),
    ("drafts", _drafts),
    ("overlap", lambda s: None if s.overlap is None else f"{s.overlap:.3f} of adjacent tokens' experts"),
    ("not recorded", lambda s: f"{100 * s.not_recorded:.1f} % of tokens and layers" if s.not_recorded else None),
    ("also holds", _extras),
)
