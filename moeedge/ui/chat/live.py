"""The view of a streaming answer on a terminal that can be repainted: rows above a live panel.

A region at the end of the screen is repainted: the text that is not certain yet, and the panel. Rows above it are
written once.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.style import Style

from moeedge.ui.chat.answer_figures import live_figures
from moeedge.ui.chat.markdown import LineStyler, MarkdownLines, PlainLines, Segment, StyledLine
from moeedge.ui.chat.panel import render_panel
from moeedge.ui.chat.settings import Look
from moeedge.ui.chat.stream import TAB, wrap_rows
from moeedge.ui.chat.thinking import FoldedThinking, ThinkingSplitter
from moeedge.ui.console import visible

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo, GenerationStats
    from moeedge.scheduler.stats import PlacementStats

REPAINT_S = 0.1  # between repaints of the text
PANEL_S = 0.3  # between repaints of the figures, which cost several times as much
SETTLE_S = 0.5  # without a region after the width has changed: tmux tells a program late, and more may come
TEXT_ROWS = 5  # least rows of the window that the panel leaves to the text
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ERASE_LINE, _ERASE_BELOW = "\x1b[2K", "\x1b[J"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DIM = Style(dim=True)


def reflows() -> bool:
    """Whether the terminal breaks long rows anew when its width changes; xterm cuts them, and GNU screen."""
    return not (os.environ.get("XTERM_VERSION") or os.environ.get("STY"))


def rows_taken(lengths: list[int], columns: int, *, reflow: bool) -> int:
    """Rows that lines of so many cells take in a window of `columns`, whatever its width was when they were written."""
    return sum(max(1, -(-length // columns)) if reflow else 1 for length in lengths)


class LiveView:
    """Full rows scroll away above; a thread repaints the rest of the text and the panel below it.

    The decoding thread only appends to a queue. The painter reads it at most ten times a second and renders the
    figures three times a second, so that a blocked terminal never delays decoding. The region is written in one piece:
    Rich's live display takes several times as long, and the model needs the processor.
    """

    def __init__(
        self,
        console: Console,
        info: EngineInfo,
        stats: Callable[[], GenerationStats],
        stopping: Callable[[], bool] = lambda: False,
        cache: Callable[[], PlacementStats | None] = lambda: None,
        progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
        look: Look | None = None,
        thinking: FoldedThinking | ThinkingSplitter | None = None,
    ) -> None:
        self._console = console
        self._stopping = stopping  # whether the answer was asked to stop and the engine finishes its step
        self._info = info
        self._stats = stats
        self._cache = cache
        self._progress = progress  # tokens of the prompt read so far, and all that are to be read
        self._look = look or Look()
        self._thinking = thinking if thinking is not None else ThinkingSplitter(None)
        self._pieces: deque[str] = deque()  # from the decoding thread to the painter; append and popleft are atomic
        self._styler: LineStyler = MarkdownLines() if self._look.markdown else PlainLines()
        self._thought_styler = PlainLines(_DIM)
        self._is_thought = False  # what the growing line is
        self._line = ""  # the growing line
        self._n_shown = 0  # characters of it, as it is shown, that are in rows above the region
        self._region: list[int] = []  # cells of the region's lines on the screen; the cursor is below them
        self._panel = ""  # with its control sequences
        self._panel_at_s = 0.0
        self._columns = 0
        self._resized_s = -SETTLE_S
        self._started_s = time.monotonic()
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
        """Append `piece`."""
        self._pieces.append(piece)

    def _paint_until_stopped(self) -> None:
        with suppress(OSError):
            self._paint()
            while not self._stop.wait(REPAINT_S):
                self._paint()

    def _paint(self) -> None:
        now_s = time.monotonic()
        columns = self._console.width
        if columns != self._columns:
            if self._columns:
                self._resized_s = now_s
            self._columns, self._panel_at_s = columns, 0.0
        if now_s - self._resized_s < SETTLE_S:
            self._write([], "")
            return
        if self._look.stats != "off" and now_s - self._panel_at_s >= PANEL_S:
            self._panel_at_s = now_s
            with self._console.capture() as capture:
                self._console.print(self._render_panel(columns, now_s))
            self._panel = capture.get()
        rows = self._take_rows()
        growing = self._growing_rows()
        self._write(rows, "".join(f"{row}\n" for row in growing) + self._panel)

    # text

    def _take_rows(self, *, is_last: bool = False) -> list[str]:
        """Rows that cannot change any more with the pieces since the last call, with their control sequences."""
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        piece = "".join(pieces)
        rows: list[str] = []
        if isinstance(self._thinking, FoldedThinking):
            answer = self._thinking.feed(piece, is_last=is_last)
            if news := self._thinking.news(is_last=is_last):
                told = wrap_rows(f"{news} (/set show_thinking on)", self._console.width)
                rows = [*(self._painted([(row.rstrip(), _DIM)]) for row in told), ""]
            return rows + self._add(answer, is_thought=False)
        for part in self._thinking.feed(piece, is_last=is_last):
            rows += self._add(part.text, is_thought=part.is_thinking)
        return rows

    def _add(self, text: str, *, is_thought: bool) -> list[str]:
        """Appends to the growing line; the rows that are certain then."""
        if not text:
            return []
        rows = []
        if is_thought != self._is_thought and self._line:
            rows += self._end_line(self._line)
            self._line = ""
        self._is_thought = is_thought
        *lines, self._line = (self._line + visible(text)).split("\n")
        for line in lines:
            rows += self._end_line(line)
        shown = self._current_styler.show(self._line.expandtabs(TAB))
        certain = wrap_rows(shown.text[self._n_shown : shown.n_certain], self._console.width)[:-1]
        return rows + self._cut(shown, certain)

    @property
    def _current_styler(self) -> LineStyler:
        return self._thought_styler if self._is_thought else self._styler

    def _end_line(self, line: str) -> list[str]:
        """The rest of a line as rows."""
        shown = self._current_styler.end(line.expandtabs(TAB))
        rows = self._cut(shown, wrap_rows(shown.text[self._n_shown :], self._console.width))
        self._n_shown = 0
        return rows

    def _cut(self, line: StyledLine, rows: list[str]) -> list[str]:
        """These rows of the line with their styles, from `n_shown` on, which they move."""
        painted = []
        for row in rows:
            painted.append(self._painted(_slice(line.segments, self._n_shown, self._n_shown + len(row.rstrip()))))
            self._n_shown += len(row)
        return painted

    def _growing_rows(self) -> list[str]:
        """The text in the region: what is not certain, or the line about thinking."""
        if isinstance(self._thinking, FoldedThinking) and self._thinking.is_thinking and self._thinking.line:
            return [self._painted([(self._thinking.line, _DIM)])]
        if not self._line:
            return []
        shown = self._current_styler.show(self._line.expandtabs(TAB))
        before = self._n_shown
        rows = self._cut(shown, wrap_rows(shown.text[before:], self._console.width))
        self._n_shown = before
        return rows

    def _painted(self, segments: list[Segment]) -> str:
        """Text with the control sequences of its styles."""
        colours = None if self._console.color_system is None else ColorSystem.STANDARD
        return "".join(style.render(text, color_system=colours) for text, style in segments)

    # region

    def _write(self, rows: list[str], region: str, *, ending: str = "") -> None:
        """Replace the region on the screen by permanent rows and a new region."""
        n_above = rows_taken(self._region, self._console.width, reflow=reflows())
        above = f"\x1b[{min(n_above, self._console.height - 1)}A" if n_above else ""
        lines = region.split("\n")[:-1]
        stay = "".join(f"{_ERASE_LINE}{row}\n" for row in rows)
        # rows of the region are cut where the window is narrower by now: then each takes one row, whatever comes
        cut = f"{_NO_WRAP}{''.join(f'{_ERASE_LINE}{line}{chr(10)}' for line in lines)}{_WRAP}" if lines else ""
        # erased row by row: tmux keeps what is erased below the window's first row in its history
        self._console.file.write(f"{_HIDE_CURSOR}{above}\r{stay}{cut}{_ERASE_BELOW}{ending}")
        self._console.file.flush()
        self._region = [cell_len(_COLOURS.sub("", line)) for line in lines]

    def _render_panel(self, columns: int, now_s: float) -> RenderableType:
        n_read, n_to_read = self._progress()
        figures = live_figures(
            self._info,
            self._stats(),
            self._cache(),
            n_read=n_read,
            n_to_read=n_to_read,
            elapsed_s=now_s - self._started_s,
            full=self._look.stats == "full",
        )
        hint = "stopping" if self._stopping() else "Ctrl-C stops"
        return render_panel(figures, columns=columns, rows=self._console.height - TEXT_ROWS, hint=hint)


def _slice(segments: list[Segment], start: int, end: int) -> list[Segment]:
    """The characters from `start` to `end`, neighbours of one style together."""
    found: list[Segment] = []
    at = 0
    for text, style in segments:
        part = text[max(start - at, 0) : max(end - at, 0)]
        at += len(text)
        if part and found and found[-1][1] == style:
            found[-1] = (found[-1][0] + part, style)
        elif part:
            found.append((part, style))
    return found
