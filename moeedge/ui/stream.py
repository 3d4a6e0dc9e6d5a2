"""Where a streaming answer goes: plainly to a stream, or above a live panel on a terminal."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from moeedge.engine.types import EngineInfo, GenerationStats
from moeedge.ui.console import supports_panel, visible
from moeedge.ui.figures import live_figures
from moeedge.ui.panel import render_panel
from moeedge.ui.wrap import complete_end, wrap_rows

REPAINT_S = 0.1  # between repaints of the text
PANEL_S = 0.3  # between repaints of the figures, which cost five times as much
RAM_S = 1.0  # between two looks at this process's memory
_TAB = 4


class View(Protocol):
    """Takes the pieces of one answer."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def write(self, piece: str) -> None:
        """Show `piece` after what was shown."""


class PlainView:
    """Each piece goes out at once and the answer ends with a newline.

    On a terminal lines are wrapped between words, so a word waits for its end, and control characters become visible.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stream = console.file
        self._row = ""  # what the terminal's last row shows
        self._word = ""  # not shown yet
        self._last = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):  # the terminal or the reader of a pipe may be gone
            self._wrap(self._word + "\n" if self._row or self._word else "")
            if self._last and not self._last.endswith("\n") and not self._console.is_terminal:
                self._stream.write("\n")
            self._stream.flush()

    def write(self, piece: str) -> None:
        """Show `piece` after what was shown."""
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
        """Write complete words behind the last row, in new rows where they do not fit; blanks at a row's end wait."""
        first, *others = wrap_rows(self._row + words, self._console.width)
        self._stream.write(first.rstrip()[len(self._row.rstrip()) :])
        for row in others:
            self._stream.write("\n" + row.rstrip())
        self._row = others[-1] if others else first


class LiveView:
    """Full rows scroll away above; the row that grows and the panel below it are repainted by a thread.

    The decoding thread only appends to a list. The painter looks at it ten times a second at most and renders the
    figures three times a second, about 0.5 % of one core; a terminal that blocks never holds up the decoding.
    """

    def __init__(self, console: Console, info: EngineInfo, stats: Callable[[], GenerationStats]) -> None:
        self._console = console
        self._info = info
        self._stats = stats
        self._pieces: deque[str] = deque()  # from the decoding thread to the painter; append and popleft are atomic
        self._row = ""  # the row that grows
        self._panel: list[Segment] = []
        self._panel_at_s = 0.0
        self._ram_bytes = 0
        self._ram_at_s = 0.0
        self._process = psutil.Process()
        self._started_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._paint_until_stopped, name="moeedge-painter", daemon=True)
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def __enter__(self) -> LiveView:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(OSError):  # the terminal may be gone
            self._live.update(Text(""))
            self._live.stop()
            self._take_pieces()
            if self._row:
                self._print([self._row])

    def write(self, piece: str) -> None:
        """Show `piece` after what was shown."""
        self._pieces.append(piece)

    def _paint_until_stopped(self) -> None:
        with suppress(OSError):
            self._paint()
            while not self._stop.wait(REPAINT_S):
                self._paint()

    def _paint(self) -> None:
        self._take_pieces()
        self._live.update(self._region(time.monotonic()), refresh=True)

    def _take_pieces(self) -> None:
        """Move what came in to the screen (rows that are full) and to the growing row."""
        text = self._row
        while self._pieces:
            text += visible(self._pieces.popleft())
        columns = self._console.width
        *lines, last = text.expandtabs(_TAB).split("\n")
        rows = [row for line in lines for row in wrap_rows(line, columns)]
        *full, self._row = wrap_rows(last, columns)
        self._print(rows + full)

    def _print(self, rows: list[str]) -> None:
        """Above the region."""
        if rows:
            self._console.print(Text("\n".join(row.rstrip() for row in rows)), soft_wrap=True)

    def _region(self, now_s: float) -> RenderableType:
        """The growing row and the panel."""
        if not self._panel or now_s - self._panel_at_s >= PANEL_S:
            self._panel_at_s = now_s
            self._panel = list(self._console.render(self._render_panel(self._console.width, now_s)))
        panel = Segments(self._panel)
        return Group(Text(self._row.rstrip(), no_wrap=True, overflow="ignore"), panel) if self._row else panel

    def _render_panel(self, columns: int, now_s: float) -> RenderableType:
        if now_s - self._ram_at_s >= RAM_S or not self._ram_bytes:
            self._ram_at_s = now_s
            self._ram_bytes = self._process.memory_info().rss
        figures = live_figures(self._info, self._stats(), ram_bytes=self._ram_bytes, elapsed_s=now_s - self._started_s)
        return render_panel(figures, columns=columns)


def open_view(console: Console, info: EngineInfo, stats: Callable[[], GenerationStats], *, panel: bool = True) -> View:
    """A live view where the console's terminal can show one and `panel` is wished, else a plain one."""
    stream = console.file
    if panel and supports_panel(stream, columns=console.size.width):
        return LiveView(console, info, stats)
    return PlainView(console)
