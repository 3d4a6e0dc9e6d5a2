"""Tables of `moeedge lab trace info`, `ablate`, `widen` and `validate formulas`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.lab.widen.shape import SIZE_NAMES
from moeedge.ui.console import say, show_figures, stderr_console, visible
from moeedge.ui.figures import Figure
from moeedge.ui.tables import Column, json_text, markdown, print_table, text_column
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.lab.analysis.published import Reproduced
    from moeedge.lab.experiments.ablation import AblationRow
    from moeedge.lab.traces.summary import TraceSummary
    from moeedge.lab.widen.layout import WidePlan

_MS, _MB, _MIB = 1e3, 1e-6, 2**20


def print_trace_summary(summary: TraceSummary, console: Console) -> None:
    """Labels and values; what the trace does not know is left out."""
    s, size = summary, summary.expert_bytes
    known_size = "" if size is None else f"{size / _MIB:.2f} MiB" if size >= _MIB else format_bytes(size)
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
    extras = {
        "weights": s.has_weights,
        "vocabulary ids": s.has_tokens,
        "the draft's hidden states": s.has_hidden_states,
    }
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
    show_figures(console, [Figure(label, text) for label, text in texts.items() if text])


_ABLATION_COLUMNS = (
    text_column("variant", "variant"),
    Column("cutoff", "cutoff_layer"),
    Column("ms/token", "tpot_s", ".2f", _MS),
    Column("speed", lambda row: f"{row.speedup:.2f}x"),
    Column("expert hits", "hit_rate_experts", ".0%"),
    Column("waits", lambda row: row.loaded_per_step + row.late_per_step, ".1f"),
    Column("ahead", "ahead_per_step", ".1f"),
    Column("MB", "bytes_per_step", ".1f", _MB),
    Column("sends", "transfers_per_step", ".1f"),
    Column("stops", "draft_stops_per_step", ".1f"),
    Column("right", "predicted_right", ".0%"),
    Column("equal", lambda row: f"{row.equal}/{row.answers}"),
)


def print_ablation(rows: Sequence[AblationRow], console: Console) -> None:
    """One line per variant, and the meaning of the columns."""
    print_table(console, _ABLATION_COLUMNS, rows)
    console.print(
        "expert hits: experts that were resident when their layer started; right: predicted experts that were used; "
        "equal: answers equal to stock llama.cpp's. Per step: waits: experts that a layer waited for; ahead: experts "
        "moved before their layer; MB: bytes of both, in so many sends; stops: draft layers that waited."
    )


def print_widened(plan: WidePlan, out: Path | None, console: Console) -> None:
    """The table on `console`, notes on standard error; out: the written file, None for a dry run."""
    err = stderr_console()
    for note in plan.notes:
        say(err, note)
    before, after = dataclasses.asdict(plan.source_shape), dataclasses.asdict(plan.shape)
    rows = [(label, f"{before[name]:,}", f"{after[name]:,}") for name, label in SIZE_NAMES.items() if before[name]]
    rows.append(("feed-forward types", ", ".join(plan.source_types), ", ".join(plan.types)))
    if plan.expert_bytes:
        rows.append(("bytes of experts", format_bytes(plan.source_expert_bytes), format_bytes(plan.expert_bytes)))
    rows.append(("file", format_bytes(plan.source.stat().st_size), format_bytes(_file_bytes(plan, out))))
    print_table(console, [text_column("", 0), Column("source", 1), Column("widened", 2)], rows)
    console.print(visible(f"{out} is written." if out else "No file is written (--dry-run)."), soft_wrap=True)


def widened_json(plan: WidePlan, out: Path | None) -> str:
    """One JSON object; sizes in bytes."""
    record = {
        "source": str(plan.source),
        "out": None if out is None else str(out),
        "bytes": _file_bytes(plan, out),
        "expert_bytes": plan.expert_bytes,
        "types": plan.types,
        "source_shape": dataclasses.asdict(plan.source_shape),
        "shape": dataclasses.asdict(plan.shape),
        "notes": plan.notes,
    }
    return json_text(record, indent=None)


def _file_bytes(plan: WidePlan, out: Path | None) -> int:
    """Size of the written file; before that, of its tensors."""
    return plan.data_bytes if out is None else out.stat().st_size


def _cell(value: float | bool, digits: int) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.{digits}f}"


_FORMULA_COLUMNS = (
    text_column("source", "source"),
    text_column("figure", "figure"),
    Column("published", lambda row: _cell(row.published, row.digits)),
    Column("computed", lambda row: _cell(row.computed, row.digits + 1)),
    text_column("", lambda row: "" if row.agrees else "differs"),
)


def print_formulas(rows: Sequence[Reproduced], console: Console) -> None:
    """The rows, and how many agree as far as they are printed."""
    print_table(console, _FORMULA_COLUMNS, rows)
    console.print(f"\n{sum(row.agrees for row in rows)} of {len(rows)} agree as far as they are printed.")


def formulas_markdown(rows: Sequence[Reproduced]) -> str:
    """The same table in Markdown."""
    return markdown(_FORMULA_COLUMNS, rows)
