"""`moeedge lab trace`: the contents of a routing trace, and traces from other tools."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge.cli.common import emit
from moeedge.cli.options import Output, flatten
from moeedge.errors import InputError
from moeedge.lab.cli import trace_options  # noqa: F401  # has the table of these options
from moeedge.records import filled
from moeedge.units import format_bytes, visible

if TYPE_CHECKING:
    from rich.console import Console

    from moeedge.trace.format import Trace

trace = typer.Typer(
    name="trace",
    help="Look into routing traces (the experts that every token used), and import them from other tools.",
    no_args_is_help=True,
    add_completion=False,
)
TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="A trace of moeedge (.npz), a csv file with pos,layer,id0,... or route_trace v1, or an array of ids by "
        "token, layer and slot (.npz or .npy).",
        show_default=False,
    ),
]
OutFile = Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.", show_default=False)]
ModelName = Annotated[str | None, typer.Option("--model", help="Name of the model. Default: the file's.")]


@trace.command("info")
@flatten
def info(trace: TraceFile, n_experts: int | None = None, output: Output = Output.TEXT) -> None:
    """Show what a trace holds: model, tokens, steps, drafts and how many of them were accepted."""
    summary = summarize_trace(_read(trace, n_experts))
    emit(output, lambda found: json.dumps(found.as_dict(), ensure_ascii=False), print_trace_summary, summary)


@trace.command("import")
@flatten
def import_(
    trace: TraceFile,
    out: OutFile,
    n_experts: int | None = None,
    model: ModelName = None,
    expert_bytes: int | None = None,
) -> None:
    """Read a trace of another tool and write it as moeedge's (.npz), which every command takes."""
    from moeedge.ui.console import check_output, say, stderr_console

    if out.suffix.lower() != ".npz":
        raise InputError(f"{out} does not end in .npz, the format that import writes.", "Choose another path.")
    recorded = _read(trace, n_experts)
    meta = recorded.meta
    if expert_bytes is not None:
        meta = replace(meta, parameters=meta.parameters | {"expert_bytes": expert_bytes})
    if model is not None:
        meta = replace(meta, model=model)
    check_output(out)
    if out.exists() and out.samefile(trace):
        raise InputError(f"{out} is the trace that is read.", "Choose another path.")
    replace(recorded, meta=meta).save(out)
    say(stderr_console(), f"{recorded.n_tokens:,} tokens written to {out}.")


def _read(path: Path, n_experts: int | None) -> Trace:
    from moeedge.lab.traces.importers import read_trace

    return read_trace(path, n_experts)


@dataclass(frozen=True)
class TraceSummary:
    """Counts over an entire trace; None where the trace does not say."""

    model: str
    architecture: str
    source: str
    n_layers: int
    expert_layers: int  # layers with recorded experts
    n_experts: int
    n_expert_used: int
    tokens: int  # rows
    prefill_tokens: int
    text_tokens: int  # accepted ones of decode and verification steps
    draft_tokens: int  # rows of the draft phase
    rejected_tokens: int
    sequences: int  # that have rows
    steps: int  # decode and verification calls
    gamma: int | None  # the longest draft; None without verifications
    acceptance_rate: float | None  # accepted over drafted tokens; None without drafts
    acceptance_chance: float | None  # of a draft, after all before it were accepted; None without drafts
    tokens_per_step: float | None  # text per step
    has_weights: bool
    has_tokens: bool  # vocabulary ids
    has_hidden_states: bool  # of the draft
    not_recorded: float  # share of (token, layer) pairs of the expert layers without experts
    expert_bytes: int | None  # mean of the expert layers
    overlap: float | None  # share of a token's experts that the next token of its text uses too

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the key that trace files have for k."""
        return {"n_experts_used" if name == "n_expert_used" else name: value for name, value in asdict(self).items()}


def summarize_trace(trace: Trace) -> TraceSummary:
    import numpy as np

    from moeedge.analysis.routing_curves import empirical_overlap
    from moeedge.native.abi import Phase
    from moeedge.trace.steps import draft_stats, recorded_steps

    meta, layers = trace.meta, trace.expert_layers()
    steps = recorded_steps(trace)
    drafts = draft_stats(trace)
    rows = trace.text_rows()
    n_text = int(rows.size)
    expert_bytes = trace.expert_bytes()
    is_recorded = (trace.ids[:, layers] != trace.sentinel).any(axis=2)
    overlaps = [empirical_overlap(trace.layer_ids(at)[rows], meta.n_experts, trace.sequence[rows]) for at in layers]
    known = [overlap for overlap in overlaps if overlap is not None]
    return filled(
        TraceSummary,
        meta,
        expert_layers=len(layers),
        tokens=trace.n_tokens,
        prefill_tokens=int(np.count_nonzero(trace.phase == Phase.PREFILL)),
        text_tokens=n_text,
        draft_tokens=int(np.count_nonzero(trace.phase == Phase.DRAFT)),
        rejected_tokens=int(steps.n_tokens.sum()) - n_text,
        sequences=int(np.unique(trace.sequence).size),
        steps=len(steps),
        gamma=None if drafts is None else drafts.gamma,
        acceptance_rate=None if drafts is None else drafts.acceptance_rate,
        acceptance_chance=None if drafts is None else drafts.acceptance_chance,
        tokens_per_step=n_text / len(steps) if len(steps) else None,
        has_weights=trace.weights is not None and bool(np.isfinite(trace.weights).any()),
        has_tokens=bool((trace.token >= 0).any()),
        has_hidden_states=trace.hidden_states is not None and bool(np.isfinite(trace.hidden_states).any()),
        not_recorded=float(1.0 - is_recorded.mean()) if is_recorded.size else 0.0,
        expert_bytes=None if expert_bytes is None or not layers else round(float(expert_bytes[layers].mean())),
        overlap=float(np.mean(known)) if known else None,
    )


def print_trace_summary(summary: TraceSummary, console: Console) -> None:
    """Labels and values; what the trace does not know is left out."""
    from moeedge.ui.console import show_figures
    from moeedge.ui.figures import known_figures

    s, size = summary, summary.expert_bytes
    known_size = "" if size is None else f"{size / 2**20:.2f} MiB" if size >= 2**20 else format_bytes(size)
    tokens = {
        "prefill": s.prefill_tokens,
        "decoded text": s.text_tokens,
        "rejected drafts": s.rejected_tokens,
        "drafting": s.draft_tokens,
    }
    drafts = (
        f"up to {s.gamma} tokens, acceptance rate {s.acceptance_rate:.3f}, chance of one after accepted ones "
        f"{s.acceptance_chance:.3f}"
        if s.gamma is not None
        else ""
    )
    states = "the draft's hidden states"
    extras = {"weights": s.has_weights, "vocabulary ids": s.has_tokens, states: s.has_hidden_states}
    recorded = "" if s.expert_layers == s.n_layers else f", {s.expert_layers} with recorded experts"
    texts = {
        "model": visible(s.model) + (f" ({visible(s.architecture)})" if s.architecture else ""),
        "source": visible(s.source),
        "layers": f"{s.n_layers}{recorded}",
        "experts": f"{s.n_experts} per layer, {s.n_expert_used} per token",
        "expert size": known_size,
        "texts": f"{s.sequences:,}",
        "tokens": f"{s.tokens:,}: " + ", ".join(f"{n:,} {kind}" for kind, n in tokens.items() if n),
        "steps": f"{s.steps:,}" + ("" if s.tokens_per_step is None else f", {s.tokens_per_step:.2f} tokens each"),
        "drafts": drafts,
        "overlap": "" if s.overlap is None else f"{s.overlap:.3f} of adjacent tokens' experts",
        "not recorded": f"{100 * s.not_recorded:.1f} % of tokens and layers" if s.not_recorded else "",
        "also holds": ", ".join(name for name, is_present in extras.items() if is_present),
    }
    show_figures(console, known_figures(texts))
