"""The progress bar of `moeedge profile`, on standard error and only where a person sees it."""

from __future__ import annotations

from types import TracebackType

from rich import progress
from rich.console import Console


class Progress:
    """Context manager; `step` fits `record_routing`'s on_step."""

    def __init__(self, n_questions: int, console: Console) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("profiling"),
            progress.BarColumn(),
            progress.TextColumn("prompt {task.fields[shown]} of {task.total:.0f}, {task.fields[tokens]} tokens"),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=n_questions, shown=1, tokens=0)
        self._tokens = 0

    def step(self, question: int, n_tokens: int) -> None:
        """A step of question `question` (from 0) emitted `n_tokens`."""
        self._tokens += n_tokens
        self._bar.update(self._task, completed=question, shown=question + 1, tokens=self._tokens)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
