"""Sentences for the user from any layer: the logic makes them, the CLI and the chat show them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Level(Enum):
    """How much a notification asks for attention."""

    INFO = "info"  # a choice that the program made, or something that takes a while
    NOTICE = "notice"  # the same, but shown at the start of a session
    WARNING = "warning"  # something asked for is off, slower or lost


class Notification(str):
    """One or more full sentences with a level; a string everywhere else, JSON included."""

    level: Level

    def __new__(cls, text: str, level: Level = Level.INFO) -> Notification:
        self = super().__new__(cls, text)
        self.level = level
        return self


Notify = Callable[[Notification], None]


def is_warning(note: str) -> bool:
    """Whether a note needs attention: all do but notifications of another level."""
    return not isinstance(note, Notification) or note.level is Level.WARNING


def ignore(notification: Notification) -> None:
    """A `Notify` for callers that show nothing."""
