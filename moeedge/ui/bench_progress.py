"""How far a benchmark is, on standard error: a bar in a terminal, a line per test and repetition elsewhere."""

from __future__ import annotations

import sys

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from moeedge.bench.samples import Sample
from moeedge.ui.bar import Shown
from moeedge.ui.console import stderr_console, supports_panel


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
