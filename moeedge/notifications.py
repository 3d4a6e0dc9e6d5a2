"""Sentences for the user from any layer: the logic sends them, the CLI and the chat show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How much a notification asks for attention."""

    INFO = "info"  # what is done or will take a while
    WARNING = "warning"  # something asked for is off, slower or lost


@dataclass(frozen=True)
class Notification:
    """One or more full sentences."""

    text: str
    level: Level = Level.INFO


class Detail(str):
    """A note about a choice that the program made and that needs no attention; other notes are warnings."""

    __slots__ = ()


Notify = Callable[[Notification], None]


def ignore(notification: Notification) -> None:
    """A `Notify` for callers that show nothing."""
