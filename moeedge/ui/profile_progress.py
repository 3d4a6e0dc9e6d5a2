"""The progress bar of `moeedge profile`."""

from __future__ import annotations

from rich import progress
from rich.console import Console

from moeedge.ui.bar import Bar


class Progress(Bar):
    """`step` fits `record_routing`'s on_step."""

    def __init__(self, n_questions: int, console: Console) -> None:
        shown = progress.TextColumn("prompt {task.fields[shown]} of {task.total:.0f}, {task.fields[tokens]} tokens")
        super().__init__("profiling", (shown, progress.TimeElapsedColumn()), console, n_questions, shown=1, tokens=0)
        self._tokens = 0

    def step(self, question: int, n_tokens: int) -> None:
        """A step of question `question` (from 0) emitted `n_tokens`."""
        self._tokens += n_tokens
        self._update(completed=question, shown=question + 1, tokens=self._tokens)
