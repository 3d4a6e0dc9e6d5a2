"""A streaming answer on a terminal: rows, written once, above a repainted region of uncertain text and a panel."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.box import ROUNDED
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

from moeedge.ui.chat.settings import Look
from moeedge.ui.chat.stream import TAB, MarkdownLines, PlainLines, Segment, StyledLine, ThinkingSplitter, wrap_rows
from moeedge.ui.figures import FigureRow
from moeedge.units import visible

REPAINT_S = 0.1  # between repaints of the text
PANEL_S = 0.3  # between repaints of the figures, which cost several times as much
SETTLE_S = 0.5  # without a region after the width has changed: tmux tells a program late, and more may come
TEXT_ROWS = 5  # least rows of the window that the panel leaves to the text
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ERASE_LINE, _ERASE_BELOW = "\x1b[2K", "\x1b[J"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DIM = Style(dim=True)
_CELL_COLUMNS = 24  # label, blank and value of one figure
_NARROW_CELL_COLUMNS = 17
_NARROW = 60  # panels below this many columns
_GAP = "  "
_FRAME_ROWS = 2

Row = list[tuple[FigureRow, int]]  # figures and how many cells each takes


@dataclass(eq=False)
class LiveView:
    """Full rows scroll away above; a thread repaints the rest of the text and the panel below it.

    The decoding thread only appends to a queue, so that a blocked terminal never delays it. The region is written in
    one piece: Rich's live display takes several times as long, and the model needs the processor.
    figures: those of the panel. stopping: whether the engine finishes its last step.
    """

    console: Console
    figures: Callable[[], list[FigureRow]]
    stopping: Callable[[], bool] = lambda: False
    look: Look = field(default_factory=Look)
    thinking: ThinkingSplitter = field(default_factory=lambda: ThinkingSplitter(None))

    def __post_init__(self) -> None:
        self._pieces: deque[str] = deque()  # from the decoding thread to the painter; append and popleft are atomic
        self._is_thought = False  # what the growing line is
        self._stylers = {False: MarkdownLines() if self.look.markdown else PlainLines(), True: PlainLines(_DIM)}
        self._line = ""  # the growing line
        self._n_shown = 0  # characters of it, as it is shown, that are in rows above the region
        self._region: list[int] = []  # cells of the region's lines on the screen; the cursor is below them
        self._panel = ""  # with its control sequences
        self._panel_at_s = 0.0
        self._columns = 0
        self._resized_s = -SETTLE_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._paint_until_stopped, name="moeedge-painter", daemon=True)

    def __enter__(self) -> LiveView:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(OSError):  # the terminal may be gone
            rows = self._take_rows(is_last=True)
            if self._line:
                rows += self._end_line(self._line)
            self._write(rows, "", ending=_SHOW_CURSOR)

    def write(self, piece: str) -> None:
        self._pieces.append(piece)

    def _paint_until_stopped(self) -> None:
        with suppress(OSError):
            self._paint()
            while not self._stop.wait(REPAINT_S):
                self._paint()

    def _paint(self) -> None:
        now_s = time.monotonic()
        columns = self.console.width
        if columns != self._columns:
            if self._columns:
                self._resized_s = now_s
            self._columns, self._panel_at_s = columns, 0.0
        if now_s - self._resized_s < SETTLE_S:
            self._write([], "")
            return
        if self.look.stats != "off" and now_s - self._panel_at_s >= PANEL_S:
            self._panel_at_s = now_s
            hint = "stopping" if self.stopping() else "Ctrl-C stops"
            # half of the rows: where the terminal becomes narrower, each may become two, and none can scroll away
            height = min(self.console.height - TEXT_ROWS, (self.console.height - 1) // 2 - 1)
            with self.console.capture() as capture:
                self.console.print(render_panel(self.figures(), columns=columns, rows=height, hint=hint))
            self._panel = capture.get()
        rows = self._take_rows()
        growing: list[str] = []  # text that is not certain, or the line about thinking
        if self.thinking.is_thinking and self.thinking.line:
            growing = [self._painted([(self.thinking.line, _DIM)])]
        elif self._line:
            growing = self._rows_of(self._stylers[self._is_thought].show(self._line.expandtabs(TAB)))
        self._write(rows, "".join(f"{row}\n" for row in growing) + self._panel)

    # text

    def _take_rows(self, *, is_last: bool = False) -> list[str]:
        """Rows that cannot change any more with the pieces since the last call, with their control sequences."""
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        parts = list(self.thinking.feed("".join(pieces), is_last=is_last))
        rows: list[str] = []
        if news := self.thinking.news(is_last=is_last):
            told = wrap_rows(f"{news} (/set show_thinking on)", self.console.width)
            rows = [*(self._painted([(row.rstrip(), _DIM)]) for row in told), ""]
        for part in parts:
            rows += self._add(part.text, is_thought=part.is_thinking)
        return rows

    def _add(self, text: str, *, is_thought: bool) -> list[str]:
        """Appends to the growing line; the rows that are certain then."""
        rows = []
        if is_thought != self._is_thought and self._line:
            rows += self._end_line(self._line)
            self._line = ""
        self._is_thought = is_thought
        *lines, self._line = (self._line + visible(text)).split("\n")
        for line in lines:
            rows += self._end_line(line)
        shown = self._stylers[self._is_thought].show(self._line.expandtabs(TAB))
        certain = wrap_rows(shown.text[self._n_shown : shown.n_certain], self.console.width)[:-1]
        rows += self._rows_of(shown, certain)
        self._n_shown += sum(map(len, certain))
        return rows

    def _end_line(self, line: str) -> list[str]:
        rows = self._rows_of(self._stylers[self._is_thought].end(line.expandtabs(TAB)))
        self._n_shown = 0
        return rows

    def _rows_of(self, line: StyledLine, texts: list[str] | None = None) -> list[str]:
        """The line from `n_shown` on in rows with their styles; texts: those that are shown, None: all."""
        painted, at = [], self._n_shown
        for text in wrap_rows(line.text[at:], self.console.width) if texts is None else texts:
            painted.append(self._painted(_slice(line.segments, at, at + len(text.rstrip()))))
            at += len(text)
        return painted

    def _painted(self, segments: list[Segment]) -> str:
        colours = None if self.console.color_system is None else ColorSystem.STANDARD
        return "".join(style.render(text, color_system=colours) for text, style in segments)

    # region

    def _write(self, rows: list[str], region: str, *, ending: str = "") -> None:
        cuts = os.environ.get("XTERM_VERSION") or os.environ.get("STY")  # xterm cuts long rows, and GNU screen
        n_above = sum(1 if cuts else max(1, -(-length // self.console.width)) for length in self._region)
        above = f"\x1b[{min(n_above, self.console.height - 1)}A" if n_above else ""
        lines = region.split("\n")[:-1]
        stay = "".join(f"{_ERASE_LINE}{row}\n" for row in rows)
        # rows of the region are cut where the window is narrower by now: then each takes one row, whatever comes
        cut = f"{_NO_WRAP}{''.join(f'{_ERASE_LINE}{line}{chr(10)}' for line in lines)}{_WRAP}" if lines else ""
        # erased row by row: tmux keeps what is erased below the window's first row in its history
        self.console.file.write(f"{_HIDE_CURSOR}{above}\r{stay}{cut}{_ERASE_BELOW}{ending}")
        self.console.file.flush()
        self._region = [cell_len(_COLOURS.sub("", line)) for line in lines]


def _slice(segments: list[Segment], start: int, end: int) -> list[Segment]:
    parts, at = [], 0
    for text, style in segments:
        parts.append((text[max(start - at, 0) : max(end - at, 0)], style))
        at += len(text)
    return parts


def render_panel(figures: Sequence[FigureRow], *, columns: int, rows: int, hint: str) -> Panel:
    """A panel of `columns` characters with the figures in cells, row by row.

    A figure that is too long for its cell takes several, a drawn one a row. Where there are more than `rows` rows, the
    last figures of the highest rank are left out. A Rich table would take three times as long while the model decodes.
    """
    inner = columns - 4  # border and padding
    least = _CELL_COLUMNS if columns >= _NARROW else _NARROW_CELL_COLUMNS
    across = max(1, (inner + len(_GAP)) // (least + len(_GAP)))
    cell = (inner + len(_GAP)) // across - len(_GAP)
    shown = list(figures)
    lines = _lay_out(shown, across, cell)
    while len(lines) > max(rows - _FRAME_ROWS, 1) and len(shown) > 1:
        shown.remove(max(reversed(shown), key=lambda figure: figure.rank))
        lines = _lay_out(shown, across, cell)
    body = Text(no_wrap=True, overflow="ellipsis", end="")
    for index, line in enumerate(lines):
        body.append("\n" if index else "")
        for figure, span in line:
            label = f"{figure.label} " if figure.label else ""
            value = figure.value if figure.draw is None else figure.draw(inner - len(label))
            width = 0 if figure is line[-1][0] else span * (cell + len(_GAP)) - len(label)
            body.append(label, "dim").append(value.ljust(width), "bold")
    return Panel(body, box=ROUNDED, width=columns, border_style="dim", subtitle=hint, subtitle_align="right")


def _lay_out(figures: Sequence[FigureRow], across: int, cell: int) -> list[Row]:
    lines: list[Row] = []
    room = 0
    for figure in figures:
        length = len(figure.label) + 1 + len(figure.value)
        span = across if figure.draw else min(-(-(length + len(_GAP)) // (cell + len(_GAP))), across)
        if span > room:
            lines.append([])
            room = across
        lines[-1].append((figure, span))
        room = 0 if figure.draw else room - span
    return lines
