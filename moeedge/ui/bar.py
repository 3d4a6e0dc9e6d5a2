"""Progress on standard error: what the commands' own bars share."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from rich import progress
from rich.console import Console

from moeedge.ui.console import say

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
