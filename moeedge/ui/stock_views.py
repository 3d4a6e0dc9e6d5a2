"""Speed over the fastest stock mode, as a table of `moeedge bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeedge.bench.best_stock import ALL, MEAN
from moeedge.ui.tables import NONE, Column, narrow_markdown, text_column

if TYPE_CHECKING:
    from moeedge.bench.best_stock import StockRatio
    from moeedge.bench.records import BenchRow


def best_stock_markdown(rows: Sequence[BenchRow]) -> str:
    """A line per mode with our backend, and one per category of the prompts; "" where stock had one mode only."""
    lanes = [row for row in rows if row.best_stock]
    if not lanes:
        return ""
    parts = [{part.category: part for part in row.best_stock} for row in lanes]
    table = [
        (_name(category), parts[0][category].fastest or NONE, *(_with_interval(own.get(category)) for own in parts))
        for category in (*(name for name in parts[0] if name != ALL), ALL)
    ]
    columns = [text_column("prompts", 0), text_column("fastest stock mode", 1)]
    columns += [Column(row.label, index, str) for index, row in enumerate(lanes, start=2)]
    title = "Decoding speed over the fastest stock mode of each category, in hindsight, with 95 % intervals:"
    return "\n".join(["", title, "", narrow_markdown(columns, table, n_keys=2)])


def _name(category: str) -> str:
    return {ALL: "all together", MEAN: "mean of categories"}.get(category, category)


def _with_interval(part: StockRatio | None) -> str:
    if part is None:
        return NONE
    interval = "" if part.low is None or part.high is None else f" ({part.low:.3f} to {part.high:.3f})"
    return f"{part.ratio:.3f}{interval}"
