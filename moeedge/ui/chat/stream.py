"""The view of a streaming answer: plain text to a stream, or rows above a live panel on a terminal.

Growing text is wrapped so that full rows never change again.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
from rich.cells import cell_len, chop_cells
from rich.console import Console, RenderableType

from moeedge.ui.chat.answer_figures import live_figures
from moeedge.ui.chat.panel import render_panel
from moeedge.ui.console import supports_panel, visible

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo, GenerationStats
    from moeedge.scheduler.stats import PlacementStats
    from moeedge.ui.chat.settings import Look, StatsLevel

REPAINT_S = 0.1  # between repaints of the text
PANEL_S = 0.3  # between repaints of the figures, which cost several times as much
RAM_S = 1.0  # between two readings of this process's memory
TEXT_ROWS = 5  # least rows of the window that the panel leaves to the text
_TAB = 4
_HIDE_CURSOR, _SHOW_CURSOR, _ERASE_BELOW = "\x1b[?25l", "\x1b[?25h", "\x1b[J"
# a word with the blanks after it; scripts written without blanks may break after every character
_WIDE = "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
_WORD = re.compile(rf"[{_WIDE}]\s*|[^\s{_WIDE}]+\s*|\s+")


def wrap_rows(line: str, columns: int) -> list[str]:
    """One line of text (no newline) in rows of at most `columns` terminal cells, not counting blanks at their ends.

    The joined rows equal the line. A word longer than a row begins a new row and is cut. There is at least one row.
    """
    rows = [""]
    for word in _WORD.findall(line):
        if cell_len(rows[-1] + word.rstrip()) <= columns or not word.strip():
            rows[-1] += word
            continue
        pieces = chop_cells(word.rstrip(), columns) if cell_len(word.rstrip()) > columns else [word.rstrip()]
        pieces[-1] += word[len(word.rstrip()) :]
        rows = (rows if rows != [""] else []) + pieces
    return rows


def complete_end(line: str) -> int:
    """The end of the last word of `line` that cannot grow any more."""
    words = _WORD.findall(line)
    if not words or words[-1][-1].isspace() or re.fullmatch(f"[{_WIDE}]", words[-1]):
        return len(line)
    return len(line) - len(words[-1])


class PlainView:
    """Writes each piece at once and ends the answer with a newline.

    On a terminal it wraps lines between words, so that a word waits for its end, and shows control characters.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stream = console.file
        self._row = ""  # text of the terminal's last row
        self._word = ""  # not shown yet
        self._last = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # the terminal or the reader of a pipe may be gone
            self._wrap(self._word + "\n" if self._row or self._word else "")
            if self._last and not self._last.endswith("\n") and not self._console.is_terminal:
                self._stream.write("\n")
            self._stream.flush()

    def write(self, piece: str) -> None:
        """Append `piece`."""
        self._last = piece
        if self._console.is_terminal:
            self._wrap(self._word + visible(piece))
        else:
            self._stream.write(piece)
        self._stream.flush()

    def _wrap(self, text: str) -> None:
        """Write the words of `text` that are complete."""
        *lines, last = text.expandtabs(_TAB).split("\n")
        for line in lines:
            self._write_words(line)
            self._stream.write("\n")
            self._row = ""
        end = complete_end(last)
        self._write_words(last[:end])
        self._word = last[end:]

    def _write_words(self, words: str) -> None:
        """Write complete words after the last row, in new rows where they do not fit; blanks at a row's end wait."""
        first, *others = wrap_rows(self._row + words, self._console.width)
        self._stream.write(first.rstrip()[len(self._row.rstrip()) :])
        for row in others:
            self._stream.write("\n" + row.rstrip())
        self._row = others[-1] if others else first


class LiveView:
    """Full rows scroll away above; a thread repaints the growing row and the panel below it.

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
        stats_level: StatsLevel = "line",
    ) -> None:
        self._console = console
        self._stopping = stopping  # whether the answer was asked to stop and the engine finishes its step
        self._info = info
        self._stats = stats
        self._cache = cache
        self._progress = progress  # tokens of the prompt read so far, and all that are to be read
        self._stats_level = stats_level
        self._pieces: deque[str] = deque()  # from the decoding thread to the painter; append and popleft are atomic
        self._row = ""  # the growing row
        self._region_rows = 0  # rows of the region on the screen; the cursor is below them
        self._panel = ""  # with its control sequences
        self._panel_at_s = 0.0
        self._ram_bytes = 0
        self._ram_at_s = 0.0
        self._process = psutil.Process()
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
            rows = self._take_rows()
            self._write([*rows, self._row.rstrip()] if self._row else rows, "", ending=_SHOW_CURSOR)

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
        if not self._panel or now_s - self._panel_at_s >= PANEL_S:
            self._panel_at_s = now_s
            with self._console.capture() as capture:
                self._console.print(self._render_panel(self._console.width, now_s))
            self._panel = capture.get()
        rows = self._take_rows()
        self._write(rows, (f"{self._row.rstrip()}\n" if self._row else "") + self._panel)

    def _take_rows(self) -> list[str]:
        """Rows that are full with the pieces since the last call; the growing row keeps the rest."""
        text = self._row
        while self._pieces:
            text += visible(self._pieces.popleft())
        columns = self._console.width
        *lines, last = text.expandtabs(_TAB).split("\n")
        rows = [row for line in lines for row in wrap_rows(line, columns)]
        *full, self._row = wrap_rows(last, columns)
        return [row.rstrip() for row in rows + full]

    def _write(self, rows: list[str], region: str, *, ending: str = "") -> None:
        """Replace the region on the screen by permanent rows and a new region."""
        above = f"\x1b[{self._region_rows}A" if self._region_rows else ""
        stay = "".join(f"{row}\n" for row in rows)
        self._console.file.write(f"{_HIDE_CURSOR}{above}\r{_ERASE_BELOW}{stay}{region}{ending}")
        self._console.file.flush()
        self._region_rows = region.count("\n")

    def _render_panel(self, columns: int, now_s: float) -> RenderableType:
        full = self._stats_level == "full"
        if full and (now_s - self._ram_at_s >= RAM_S or not self._ram_bytes):
            self._ram_at_s = now_s
            self._ram_bytes = self._process.memory_info().rss
        n_read, n_to_read = self._progress()
        figures = live_figures(
            self._info,
            self._stats(),
            self._cache(),
            n_read=n_read,
            n_to_read=n_to_read,
            elapsed_s=now_s - self._started_s,
            ram_bytes=self._ram_bytes,
            full=full,
        )
        hint = "stopping" if self._stopping() else "Ctrl-C stops"
        return render_panel(figures, columns=columns, rows=self._console.height - TEXT_ROWS, hint=hint)


def open_view(
    console: Console,
    info: EngineInfo,
    stats: Callable[[], GenerationStats],
    *,
    stopping: Callable[[], bool] = lambda: False,
    cache: Callable[[], PlacementStats | None] = lambda: None,
    progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    look: Look,
    panel: bool = True,
) -> LiveView | PlainView:
    """A live view if `panel` is set and the console's terminal can show one, else a plain view."""
    stream = console.file
    shows_panel = panel and look.stats != "off"
    if shows_panel and supports_panel(stream, columns=console.width, rows=console.height):
        return LiveView(console, info, stats, stopping, cache, progress, look.stats)
    return PlainView(console)
