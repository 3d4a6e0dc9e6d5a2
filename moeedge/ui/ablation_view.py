"""The table of `moeedge ablate`, and what its counts say about the order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moeedge.bench.ablation import AblationRow

_MS, _MB = 1e3, 1e-6
_COLUMNS = ("cutoff", "ms/token", "speed", "hits", "waits", "ahead", "MB", "sends", "stops", "right", "equal")


def print_ablation(rows: Sequence[AblationRow], console: Console) -> None:
    """One line per variant, what each column means, and what changes from each variant to the next."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold")
    table.add_column("variant")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.variant,
            str(row.cutoff_layer),
            f"{row.tpot_s * _MS:.2f}",
            f"{row.speedup:.2f}x",
            _share(row.hit_rate),
            f"{row.loaded_per_step + row.late_per_step:.1f}",
            f"{row.ahead_per_step:.1f}",
            f"{row.bytes_per_step * _MB:.1f}",
            f"{row.transfers_per_step:.1f}",
            f"{row.draft_stops_per_step:.1f}",
            _share(row.foretold_right),
            f"{row.equal}/{row.answers}",
        )
    console.print(table)
    console.print(
        "hits: experts that were there when their layer came; right: foretold ones that were used; equal: answers that "
        "are stock llama.cpp's. Per step: waits: experts that a layer waited for; ahead: experts brought before that; "
        "MB: of both, in so many sends; stops: draft layers that waited."
    )
    for before, after in itertools.pairwise(rows):
        console.print(difference(before, after), highlight=False)


def difference(before: AblationRow, after: AblationRow) -> str:
    """Where a variant gains and loses time per step against the one before it, and the counts behind that."""
    name = "cutoff {0.cutoff_layer}" if before.variant == after.variant else "{0.variant}"
    return (
        f"{name.format(after)} after {name.format(before)}, ms per step: "
        f"draft {(after.draft_s - before.draft_s) * _MS:+.1f} ("
        f"{_change(before, after, 'planned_s', _MS)} in {after.plans_per_step:.1f} plans, "
        f"{_change(before, after, 'draft_waited_s', _MS)} in {after.draft_stops_per_step:.1f} stops); "
        f"verify {(after.verify_s - before.verify_s) * _MS:+.1f} ("
        f"{_change(before, after, 'waited_s', _MS)} for {_change(before, after, 'loaded_per_step')} experts loaded and "
        f"{_change(before, after, 'late_per_step')} under way, {_change(before, after, 'transfers_per_step')} sends)."
    )


def _change(before: AblationRow, after: AblationRow, name: str, scale: float = 1.0) -> str:
    return f"{(getattr(after, name) - getattr(before, name)) * scale:+.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
