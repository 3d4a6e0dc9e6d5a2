"""Progress on standard error: what the commands' own bars share.

How far a benchmark is, on standard error: a bar in a terminal, a line per test and repetition elsewhere.

The progress bar of `moeedge profile`.

How far a download is, on standard error: a bar in a terminal, a line every tenth elsewhere.
"""

from __future__ import annotations

import sys
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from rich import progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from moeedge.bench.samples import Sample
from moeedge.ui.console import say, stderr_console, supports_panel
from moeedge.units import format_bytes, format_rate

_Shown = TypeVar("_Shown", bound="Shown")


class Shown:
    """A context manager, because a bar must leave the terminal as it was; without a bar there are notes only."""

    def __init__(self, console: Console, bar: progress.Progress | None) -> None:
        self._console = console
        self._bar = bar

    def note(self, text: str) -> None:
        """A sentence for the user."""
        say(self._console, text)

    def __enter__(self: _Shown) -> _Shown:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class Bar(Shown):
    """One task, only where a person sees it, gone when it ends. Those who inherit tell `_update` what it stands at."""

    def __init__(
        self, label: str, columns: tuple[progress.ProgressColumn, ...], console: Console, total: float, **shown: Any
    ) -> None:
        """columns: behind label and bar; shown: the fields that they read."""
        bar = progress.Progress(
            progress.TextColumn(label),
            progress.BarColumn(),
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        super().__init__(console, bar)
        task = bar.add_task("", total=total, **shown)
        self._update = partial(bar.update, task)


class BenchProgress(Shown):
    """Fulfils the runner's Progress."""

    def __init__(self, *, bar: bool = True) -> None:
        console = stderr_console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = bar and supports_panel(sys.stderr, columns=console.width, rows=console.height)
        super().__init__(console, Progress(*columns, console=console, transient=True) if bar else None)
        self._task: TaskID | None = None
        self._said = ""
        self._total = 0
        self._done = 0

    def begin(self, total: int) -> None:
        """`total` samples will come."""
        self._total = total
        if self._bar is not None:
            self._task = self._bar.add_task("warming up", total=total)

    def advance(self, sample: Sample, test: str) -> None:
        """One sample is there."""
        self._done += 1
        where = f"{test}, repetition {sample.repetition + 1}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, description=f"{where}, {sample.mode}")
        elif where != self._said:
            self._said = where
            self.note(f"{where}: sample {self._done} of {self._total}")


class ProfileProgress(Bar):
    """`step` fits `record_routing`'s on_step."""

    def __init__(self, n_questions: int, console: Console) -> None:
        shown = progress.TextColumn("prompt {task.fields[shown]} of {task.total:.0f}, {task.fields[tokens]} tokens")
        super().__init__("profiling", (shown, progress.TimeElapsedColumn()), console, n_questions, shown=1, tokens=0)
        self._tokens = 0

    def step(self, question: int, n_tokens: int) -> None:
        """A step of question `question` (from 0) emitted `n_tokens`."""
        self._tokens += n_tokens
        self._update(completed=question, shown=question + 1, tokens=self._tokens)


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
