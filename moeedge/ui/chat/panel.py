"""The panel under a streaming answer, and the meter that reads the expert cache's counters for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import ROUNDED
from rich.panel import Panel
from rich.text import Text

from moeedge.notifications import Notify, ignore
from moeedge.ui.figures import Figure

if TYPE_CHECKING:
    from moeedge.engine.session import Session
    from moeedge.scheduler.stats import PlacementStats, StepRecord

_CELL_COLUMNS = 24  # label, blank and value of one figure
_NARROW_CELL_COLUMNS = 17
_NARROW = 60  # panels below this many columns
_GAP = "  "
_FRAME_ROWS = 2

Row = list[tuple[Figure, int]]  # figures and how many cells each takes


class CacheMeter:
    """A context manager around one answer; a call returns the counters since its first token, so without the prompt.

    A call returns None if there is no expert cache. Any thread may call: the decoding thread reads the session between
    its steps, at most every `interval_s` seconds. `notes` collects the session's notifications, such as a lost device,
    to be shown after the answer.
    """

    def __init__(self, session: Session, interval_s: float = 0.25) -> None:
        self._session = session
        self._interval_s = interval_s
        self._read_s = 0.0
        self.notes: list[str] = []
        self._notify: Notify = ignore  # the session's, while this one takes its place
        self._start: PlacementStats | None = None
        self._newest: PlacementStats | None = None

    def __call__(self) -> PlacementStats | None:
        start, newest = self._start, self._newest
        return None if start is None or newest is None else newest - start

    def __enter__(self) -> CacheMeter:
        self._notify = self._session.notify
        self._session.notify = self.notes.append
        self._start = self._newest = self._session.placement_stats()
        if self._start is not None:
            self._session.observers.append(self._observe)
        return self

    def __exit__(self, *error: object) -> None:
        self._session.notify = self._notify
        if self._start is not None:
            self._session.observers.remove(self._observe)
            self._newest = self._session.placement_stats()

    def _observe(self, record: StepRecord, session: Session) -> None:
        now_s = time.perf_counter()
        prompt_read = record.n_verified == 0
        if prompt_read or now_s - self._read_s >= self._interval_s:
            self._read_s = now_s
            self._newest = session.placement_stats()
            if prompt_read:
                self._start = self._newest


def render_panel(figures: Sequence[Figure], *, columns: int, rows: int, hint: str) -> Panel:
    """A panel of `columns` characters with the figures in cells, row by row.

    A figure that is too long for its cell takes several cells, a drawn one takes a row. If the panel would exceed
    `rows` rows, figures of the highest rank are left out, the last first.
    The layout is our own: a Rich table takes three times as long, and this runs while the model decodes.
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
        if index:
            body.append("\n")
        _append_line(body, line, cell, inner)
    return Panel(body, box=ROUNDED, width=columns, border_style="dim", subtitle=hint, subtitle_align="right")


def _lay_out(figures: Sequence[Figure], across: int, cell: int) -> list[Row]:
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


def _append_line(body: Text, line: Row, cell: int, inner: int) -> None:
    for index, (figure, span) in enumerate(line):
        label = f"{figure.label} " if figure.label else ""
        if figure.draw is not None:
            value = figure.draw(inner - len(label))
        else:
            value = figure.value
            if index + 1 < len(line):
                value = value.ljust(span * (cell + len(_GAP)) - len(label))
        body.append(label, "dim")
        body.append(value, "bold")
