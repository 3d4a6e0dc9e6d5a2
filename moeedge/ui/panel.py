"""The panel under a streaming answer."""

from __future__ import annotations

from rich.box import ROUNDED
from rich.panel import Panel
from rich.text import Text

from moeedge.ui.figures import Figure

_CELL_COLUMNS = 24  # label, blank and value of one figure
_GAP = "  "


def render_panel(figures: list[Figure], *, columns: int, hint: str) -> Panel:
    """The figures in as many columns as fit into a panel of `columns` characters, read row by row.

    Laid out by hand: a Rich table takes three times as long, and this is drawn while the model decodes.
    """
    inner = columns - 4  # border and padding
    across = max(1, min(len(figures), (inner + len(_GAP)) // (_CELL_COLUMNS + len(_GAP))))
    cell = (inner + len(_GAP)) // across - len(_GAP)
    body = Text(no_wrap=True, overflow="ellipsis", end="")
    for index, item in enumerate(figures):
        if index:
            body.append(_GAP if index % across else "\n")
        label = f"{item.label} " if item.label else ""
        body.append(label, "dim")
        body.append(item.value.ljust(cell - len(label)) if (index + 1) % across else item.value, "bold")
    return Panel(body, box=ROUNDED, width=columns, border_style="dim", subtitle=hint, subtitle_align="right")
