"""The table of `moeedge validate formulas`: figures that papers print, and the same computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.ui.tables import Column, markdown, print_table, text_column

if TYPE_CHECKING:
    from moeedge.analysis.published import Reproduced


def _cell(value: float | bool, digits: int) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.{digits}f}"


_COLUMNS = (
    text_column("source", "source"),
    text_column("figure", "figure"),
    Column("published", lambda row: _cell(row.published, row.digits)),
    Column("computed", lambda row: _cell(row.computed, row.digits + 1)),
    text_column("", lambda row: "" if row.agrees else "differs"),
)


def print_formulas(rows: Sequence[Reproduced], console: Console) -> None:
    """The rows, and how many agree as far as they are printed."""
    print_table(console, _COLUMNS, rows)
    console.print(f"\n{sum(row.agrees for row in rows)} of {len(rows)} agree as far as they are printed.")


def formulas_markdown(rows: Sequence[Reproduced]) -> str:
    """The same table in Markdown."""
    return markdown(_COLUMNS, rows)
