"""How far a download is, on standard error: a bar in a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import sys

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from moeedge.hardware.size import format_bytes, format_rate
from moeedge.ui.bar import Shown
from moeedge.ui.console import stderr_console, supports_panel

_WIDE = 80  # columns from which there is room for a name, the rate and the time that is left
_LINES = 10  # in a file: one line for every tenth


class _Amount(ProgressColumn):
    """Bytes that are there, of how many, and how fast more come."""

    def render(self, task: Task) -> Text:
        rate = f", {format_rate(task.speed)}" if task.speed and task.fields["phase"] == "downloading" else ""
        return Text(f"{format_bytes(int(task.completed))} of {format_bytes(int(task.total or 0))}{rate}")


class PullProgress(Shown):
    """Fulfils the download's Watcher."""

    def __init__(self) -> None:
        console, bar = stderr_console(), None
        width = console.width
        if supports_panel(sys.stderr, columns=width, rows=console.height):
            name = [TextColumn("{task.description}")] if width >= _WIDE else []
            left = [TimeRemainingColumn()] if width >= _WIDE else []
            bar = Progress(
                *name, BarColumn(bar_width=None if width >= _WIDE else 12), _Amount(), *left, console=console
            )
        super().__init__(console, bar)
        self._task: TaskID | None = None
        self._name = ""
        self._total = 0
        self._done = 0
        self._phase = ""
        self._said = 0

    def begin(self, name: str, total_bytes: int) -> None:
        """A file comes next."""
        self._name, self._total, self._done, self._phase, self._said = name, total_bytes, 0, "", 0
        if self._bar is None or self._console.width < _WIDE:
            self.note(f"{name}: {format_bytes(total_bytes)}")
        if self._bar is not None:
            short = name.rpartition("/")[2]
            room = self._console.width // 3
            short = short if len(short) <= room else f"...{short[3 - room :]}"
            self._task = self._bar.add_task(short, total=total_bytes, phase="checking")

    def at(self, n_bytes: int, *, phase: str) -> None:
        """So many bytes of it are there."""
        changed, self._phase, self._done = phase != self._phase, phase, n_bytes
        if self._bar is not None and self._task is not None:
            if changed:  # what was here already says nothing about the line's speed
                self._bar.reset(self._task, completed=n_bytes, phase=phase)
            self._bar.update(self._task, completed=n_bytes)
            return
        tenth = n_bytes * _LINES // max(self._total, 1)
        if phase == "downloading" and tenth > self._said:
            self._said = tenth
            self.note(f"{self._name}: {format_bytes(n_bytes)} of {format_bytes(self._total)}")

    def end(self, *, done: bool) -> None:
        """The file is there, or the download stopped."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._total if done else self._done)
            self._bar.stop_task(self._task)
        self._task = None
        if not done:
            self.note(f"{self._name}: stopped at {format_bytes(self._done)} of {format_bytes(self._total)}.")
