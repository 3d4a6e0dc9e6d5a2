"""Progress of a command on standard error: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import progress as rich_progress
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from moeedge.run import Progress
from moeedge.ui.console import say, stderr_console, supports_panel
from moeedge.units import format_bytes, format_rate

if TYPE_CHECKING:
    from typing_extensions import Self

BYTES = "bytes"  # a unit
_WIDE = 80  # columns from which names and remaining times have room
LINE_S = 10.0  # between lines where a bar is not shown


class _Amount(ProgressColumn):
    """How many units are done, of how many; of bytes the rate, too. Its text is written where there is no bar."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        if self.unit != BYTES:
            return Text(f"{task.completed:,.0f} of {task.total:,.0f} {self.unit}")
        rate = f", {format_rate(task.speed)}" if task.speed else ""
        return Text(f"{format_bytes(int(task.completed))} of {format_bytes(int(task.total or 0))}{rate}")


class Bar(Progress):
    """A context manager around the work. is_shown: by default in every terminal; transient: it goes at the end."""

    def __init__(self, console: Console, unit: str, *, is_shown: bool | None = None, transient: bool = True) -> None:
        self.is_shown = console.is_terminal if is_shown is None else is_shown
        self.is_wide = console.width >= _WIDE
        self._console = console
        self._amount = _Amount(unit)
        columns = [TextColumn("{task.description}"), BarColumn(40 if self.is_wide else 12), self._amount]
        left = [TimeRemainingColumn()] if self.is_wide else []
        self._progress = rich_progress.Progress(
            *columns, *left, console=console, transient=transient, disable=not self.is_shown
        )
        self._task: TaskID | None = None
        self._line_s, self._part = time.monotonic(), ""

    def start(self, label: str, total: float) -> None:
        """Begin a task, in place of the one that runs."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(label, total=total)

    def update(self, **changes: Any) -> None:
        """Change the running task: total, completed, advance or description."""
        if self._task is None:
            return
        self._progress.update(self._task, **changes)
        if not self.is_shown and time.monotonic() >= self._line_s + LINE_S:
            self._line_s = time.monotonic()
            task = self._progress.tasks[-1]
            self.note(f"{task.description}: {self._amount.render(task)}")

    def add(self, amount: float = 1) -> None:
        """Advance the running task."""
        self.update(advance=amount)

    def phase(self, text: str, part: str = "") -> None:
        """Describe the running task anew."""
        if part != self._part:
            self._part, self._line_s = part, -LINE_S  # a line now
        self.update(description=text)

    def note(self, text: str) -> None:
        """A sentence for the user, above the bar."""
        say(self._console, text)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def count_bar(console: Console, label: str, unit: str, total: int) -> Bar:
    """A bar whose task has begun."""
    bar = Bar(console, unit)
    bar.start(label, total)
    return bar


class PullProgress(Bar):
    """A bar per file."""

    def __init__(self) -> None:
        console = stderr_console()
        super().__init__(console, BYTES, is_shown=supports_panel(console), transient=False)
        self._phase = ""

    @contextmanager
    def file(self, name: str, total_bytes: int) -> Iterator[Callable[[int, str], None]]:
        """The bar of a file; yields what moves it: `n_bytes` of the file are here, in a phase of `hub.pull.At`."""
        self._phase = ""
        if not self.is_shown or not self.is_wide:
            self.note(f"{name}: {format_bytes(total_bytes)}")
        short, room = name.rpartition("/")[2], self._console.width // 3
        self.start((short if len(short) <= room else f"...{short[3 - room :]}") if self.is_wide else "", total_bytes)
        task = self._progress.tasks[-1]
        try:
            yield self._at
        except BaseException:
            self.note(f"{name}: stopped at {self._amount.render(task)}.")
            raise
        finally:
            self._progress.stop_task(task.id)
            self._task = None

    def _at(self, n_bytes: int, phase: str) -> None:
        if phase != self._phase and self._task is not None:  # bytes that were here before say nothing about the rate
            self._progress.reset(self._task, completed=n_bytes)
        self._phase = phase
        self.update(completed=n_bytes)
