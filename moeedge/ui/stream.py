"""Where a streaming answer goes: plainly to a stream, or above a live panel on a terminal."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import IO, Protocol

import psutil
from rich.cells import cell_len, chop_cells
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from moeedge.engine.types import EngineInfo, GenerationStats
from moeedge.ui.console import supports_panel, visible
from moeedge.ui.figures import live_figures
from moeedge.ui.panel import render_panel

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
    """Each piece goes out at once; the answer ends with a newline."""

    def __init__(self, stream: IO[str], *, safe: bool) -> None:
        self._stream = stream
        self._safe = safe  # the stream is a terminal: control characters become visible
        self._last = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._last and not self._last.endswith("\n"):
            self._stream.write("\n")
        self._stream.flush()

    def write(self, piece: str) -> None:
        """Show `piece` after what was shown."""
        self._stream.write(visible(piece) if self._safe else piece)
        self._stream.flush()
        self._last = piece


class LiveView:
    """Finished lines scroll away above; the line that grows and the panel below it are repainted by a thread.

    The decoding thread only appends to a list. The painter looks at it ten times a second at most and renders the
    figures three times a second, about 0.5 % of one core; a terminal that blocks never holds up the decoding.
    """

    def __init__(self, console: Console, info: EngineInfo, stats: Callable[[], GenerationStats]) -> None:
        self._console = console
        self._info = info
        self._stats = stats
        self._pieces: deque[str] = deque()  # from the decoding thread to the painter; append and popleft are atomic
        self._line = ""  # the line that grows
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
            if self._line:
                self._print(self._line)

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
        """Move what came in to the screen (finished lines) and to the growing line."""
        text = self._line
        while self._pieces:
            text += visible(self._pieces.popleft())
        finished, newline, self._line = text.expandtabs(_TAB).rpartition("\n")
        if newline:
            self._print(finished)

    def _print(self, text: str) -> None:
        """Above the region; the terminal itself wraps long lines, so that they are copied whole."""
        self._console.print(Text(text), soft_wrap=True)

    def _region(self, now_s: float) -> RenderableType:
        """The growing line, wrapped as the terminal will wrap it and cut to what fits, and the panel."""
        columns, rows = self._console.size
        if not self._panel or now_s - self._panel_at_s >= PANEL_S:
            self._panel_at_s = now_s
            self._panel = list(self._console.render(self._render_panel(columns, now_s)))
        if not self._line:
            return Segments(self._panel)
        panel_rows = sum(segment.text.count("\n") for segment in self._panel)
        wrapped = chop_cells(self._line, columns) if cell_len(self._line) > columns else [self._line]
        tail = wrapped[-max(1, rows - panel_rows - 1) :]
        return Group(Text("\n".join(tail), no_wrap=True, overflow="ignore"), Segments(self._panel))

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
    return PlainView(stream, safe=console.is_terminal)
