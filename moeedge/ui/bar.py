"""A progress bar on standard error, only where a person sees it: what the commands' own bars share."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

from rich import progress
from rich.console import Console

_Bar = TypeVar("_Bar", bound="Bar")


class Bar:
    """Context manager: gone when it ends. Those who inherit tell `_update` what it stands at."""

    def __init__(
        self, label: str, columns: tuple[progress.ProgressColumn, ...], console: Console, total: float, **shown: Any
    ) -> None:
        """columns: behind label and bar; shown: the fields that they read."""
        self._bar = progress.Progress(
            progress.TextColumn(label),
            progress.BarColumn(),
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, **shown)

    def _update(self, **changed: Any) -> None:
        self._bar.update(self._task, **changed)

    def __enter__(self: _Bar) -> _Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
