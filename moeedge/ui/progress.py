"""Progress of a command on standard error: a bar in a terminal, lines or no output elsewhere.

`Bar` is the one class; each command configures its label, its columns and what it counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from moeedge.ui.console import say, stderr_console, supports_panel
from moeedge.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moeedge.bench.samples import Sample

_WIDE = 80  # columns from which a download's name, rate and remaining time have room
_AnyBar = TypeVar("_AnyBar", bound="Bar")
LINE_S = 10.0  # between lines where a bar is not shown
_TENTHS = 10  # lines per file where a download has no bar


class Bar:
    """A context manager around the work; `is_shown` tells whether a person sees a bar."""

    def __init__(
        self,
        console: Console,
        *columns: ProgressColumn,
        is_shown: bool | None = None,
        transient: bool = True,
    ) -> None:
        """columns: from left to right; is_shown: by default in every terminal; transient: remove the bar at the end."""
        self.is_shown = console.is_terminal if is_shown is None else is_shown
        self._console = console
        self._progress = Progress(*columns, console=console, transient=transient, disable=not self.is_shown)
        self._task: TaskID | None = None

    def start(self, label: str, total: float, **fields: Any) -> None:
        """Begin a task; `fields` are what further columns read."""
        self._task = self._progress.add_task(label, total=total, **fields)

    def update(self, **changes: Any) -> None:
        """Change the running task: completed, description or fields."""
        if self._task is not None:
            self._progress.update(self._task, **changes)

    def add(self, amount: float = 1) -> None:
        """So much more is done."""
        self.update(advance=amount)

    def phase(self, text: str) -> None:
        """What the task does now."""
        self.update(description=text)

    def part(self) -> Callable[[int], None]:
        """A callback for the next part of the task; it takes the amount done of that part."""
        before = self._progress.tasks[-1].completed
        return lambda amount: self.update(completed=before + amount)

    def note(self, text: str) -> None:
        """A sentence for the user, above the bar."""
        say(self._console, text)

    def __enter__(self: _AnyBar) -> _AnyBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


class CountBar(Bar):
    """A bar that counts `unit`s: rows, steps; without a bar, a line every LINE_S seconds."""

    def __init__(self, console: Console, label: str, unit: str, total: int) -> None:
        amount = TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit)
        super().__init__(console, TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
        self._unit = unit
        self._line_s = time.monotonic()
        self.start(label, total)

    def update(self, **changes: Any) -> None:
        """Change the running task."""
        super().update(**changes)
        if self.is_shown or time.monotonic() < self._line_s + LINE_S:
            return
        self._line_s = time.monotonic()
        task = self._progress.tasks[-1]
        self.note(f"{task.description}: {task.completed:,.0f} of {task.total:,.0f} {self._unit}")


def count_bar(console: Console, label: str, unit: str, total: int) -> Bar:
    """A `CountBar` whose task has begun."""
    return CountBar(console, label, unit, total)


def byte_bar(console: Console, label: str, total_bytes: int) -> Bar:
    """A bar that counts bytes and shows their rate."""
    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Bar(console, TextColumn(label), BarColumn(), *columns)
    bar.start(label, total_bytes)
    return bar


class ProfileProgress(Bar):
    """Prompts and tokens; `step` fits `record_routing`'s on_step."""

    def __init__(self, n_prompts: int, console: Console) -> None:
        amount = TextColumn("prompt {task.fields[prompt]} of {task.total:.0f}, {task.fields[tokens]} tokens")
        super().__init__(console, TextColumn("profiling"), BarColumn(), amount, TimeElapsedColumn())
        self.start("profiling", n_prompts, prompt=1, tokens=0)
        self._tokens = 0

    def step(self, prompt: int, n_tokens: int) -> None:
        """A step of prompt `prompt` (from 0) emitted `n_tokens`."""
        self._tokens += n_tokens
        self.update(completed=prompt, prompt=prompt + 1, tokens=self._tokens)


class BenchProgress(Bar):
    """Samples of a benchmark; without a bar, a line per test and repetition."""

    def __init__(self, *, bar: bool = True) -> None:
        console = stderr_console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = bar and supports_panel(sys.stderr, columns=console.width, rows=console.height)
        super().__init__(console, *columns, is_shown=bar)
        self._reported = ""
        self._total = 0
        self._done = 0

    def begin(self, total: int) -> None:
        """`total` samples will come; a run of several parts begins each of them."""
        self._total = total
        self._done = 0
        if self._task is not None:
            self._progress.remove_task(self._task)
        self.start("warming up", total)

    def advance(self, sample: Sample, test: str) -> None:
        """One sample is measured."""
        self._done += 1
        repetition = f"{test}, repetition {sample.repetition + 1}"
        self.update(advance=1, description=f"{repetition}, {sample.mode}")
        if not self.is_shown and repetition != self._reported:
            self._reported = repetition
            self.note(f"{repetition}: sample {self._done} of {self._total}")


class _DownloadAmount(ProgressColumn):
    """Bytes that are here, of how many, and the rate of the download."""

    def render(self, task: Task) -> Text:
        rate = f", {format_rate(task.speed)}" if task.speed and task.fields["phase"] == "downloading" else ""
        return Text(f"{format_bytes(int(task.completed))} of {format_bytes(int(task.total or 0))}{rate}")


class PullProgress(Bar):
    """A bar per file; without bars, a line for every tenth of a file."""

    def __init__(self) -> None:
        console = stderr_console()
        self._is_wide = console.width >= _WIDE
        bar = BarColumn(bar_width=None if self._is_wide else 12)
        columns: tuple[ProgressColumn, ...] = (bar, _DownloadAmount())
        if self._is_wide:
            columns = (TextColumn("{task.description}"), *columns, TimeRemainingColumn())
        is_shown = supports_panel(sys.stderr, columns=console.width, rows=console.height)
        super().__init__(console, *columns, is_shown=is_shown, transient=False)
        self._name = ""
        self._total = 0
        self._done = 0
        self._phase = ""
        self._tenths = 0

    def begin(self, name: str, total_bytes: int) -> None:
        """A file comes next."""
        self._name, self._total, self._done, self._phase, self._tenths = name, total_bytes, 0, "", 0
        if not self.is_shown or not self._is_wide:
            self.note(f"{name}: {format_bytes(total_bytes)}")
        short, room = name.rpartition("/")[2], self._console.width // 3
        self.start(short if len(short) <= room else f"...{short[3 - room :]}", total_bytes, phase="checking")

    def at(self, n_bytes: int, *, phase: str) -> None:
        """So many bytes of the file are here."""
        if phase != self._phase and self._task is not None:  # bytes that were here before say nothing about the rate
            self._progress.reset(self._task, completed=n_bytes, phase=phase)
        self._phase, self._done = phase, n_bytes
        self.update(completed=n_bytes)
        tenths = n_bytes * _TENTHS // max(self._total, 1)
        if not self.is_shown and phase == "downloading" and tenths > self._tenths:
            self._tenths = tenths
            self.note(f"{self._name}: {format_bytes(n_bytes)} of {format_bytes(self._total)}")

    def end(self, *, done: bool) -> None:
        """The file is here, or the download stopped."""
        self.update(completed=self._total if done else self._done)
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = None
        if not done:
            self.note(f"{self._name}: stopped at {format_bytes(self._done)} of {format_bytes(self._total)}.")
