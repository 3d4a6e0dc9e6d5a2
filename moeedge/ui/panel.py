"""The panel under a streaming answer."""

from __future__ import annotations

from rich.box import ROUNDED
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moeedge.ui.figures import Figure

_CELL_COLUMNS = 24  # label, space and value of one figure
_GAP = 2


def render_panel(figures: list[Figure], *, columns: int, hint: str = "Ctrl-C stops") -> Panel:
    """The figures in as many columns as fit into a panel of `columns` characters, read row by row."""
    inner = columns - 4  # border and padding
    across = max(1, min(len(figures), (inner + _GAP) // (_CELL_COLUMNS + _GAP)))
    table = Table.grid(padding=(0, _GAP, 0, 0), expand=True)
    for _ in range(across):
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for start in range(0, len(figures), across):
        row = figures[start : start + across]
        table.add_row(
            *(Text.assemble((f"{item.label} " if item.label else "", "dim"), (item.value, "bold")) for item in row)
        )
    return Panel(
        table, box=ROUNDED, width=columns, border_style="dim", title_align="left", subtitle=hint, subtitle_align="right"
    )
