"""How far a benchmark is, on standard error: a bar in a terminal, a line per test and repetition elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from moeedge.bench.samples import Sample
from moeedge.ui.console import stderr_console, supports_panel


class BenchProgress:
    """Fulfils the runner's Progress; a context manager, because a bar must leave the terminal as it was."""

    def __init__(self, *, bar: bool = True) -> None:
        self._console = stderr_console()
        bar = bar and supports_panel(sys.stderr, columns=self._console.width, rows=self._console.height)
        self._bar = (
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            if bar
            else None
        )
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

    def note(self, text: str) -> None:
        """A sentence for the user."""
        self._console.print(text, style="dim", soft_wrap=True)

    def __enter__(self) -> BenchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
