"""The table of `moeedge ablate`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moeedge.bench.ablation import AblationRow

_COLUMNS = ("cutoff", "ms/token", "speed", "hits", "waits", "moves", "right", "draft", "verify", "equal")


def print_ablation(rows: Sequence[AblationRow], console: Console) -> None:
    """One line per variant, what each column means, and what each variant is."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold")
    table.add_column("variant")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.variant,
            str(row.cutoff_layer),
            f"{row.tpot_s * 1e3:.2f}",
            f"{row.speedup:.2f}x",
            _share(row.hit_rate_pairs),
            f"{row.loaded_per_step:.1f}",
            f"{row.uploads_per_step:.1f}",
            _share(row.foretold_right),
            f"{row.draft_s * 1e3:.1f}",
            f"{row.verify_s * 1e3:.1f}",
            f"{row.equal}/{row.answers}",
        )
    console.print(table)
    console.print(
        "Per step: waits: experts that a layer had to wait for; moves: experts moved; draft, verify: ms. "
        "hits: pairs on the device; right: foretold experts that were used; equal: answers that are stock llama.cpp's."
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
