"""How an operation speaks with its caller (messages, decisions, whether to stop) and ends; its turns and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class Level(Enum):
    """How much a notification asks for attention."""

    INFO = "info"  # a choice that the program made, or something that takes a while
    NOTICE = "notice"  # the same, but shown at the start of a session
    WARNING = "warning"  # something asked for is off, slower or lost


class Notification(str):
    """Full sentences, or that of a decision, with a level; a string everywhere else, JSON included."""

    level: Level

    def __new__(cls, text: str, level: Level = Level.INFO) -> Notification:
        self = super().__new__(cls, text)
        self.level = level
        return self


Notify = Callable[[Notification], None]
Cancel = Callable[[], bool]  # asked now and then; True stops an operation


def is_warning(note: str) -> bool:
    """Whether a note needs attention: all do but notifications of another level."""
    return not isinstance(note, Notification) or note.level is Level.WARNING


def ignore(notification: Notification) -> None:
    """A `Notify` for callers that show nothing."""


@dataclass(frozen=True)
class Decision:
    """What a part of the program chose, told in the same words and order everywhere on screen.

    gain: of `chosen` over `over`, times; None: not compared. basis: how that is known, such as "measured", "by
    estimate", "being measured" or "given by the user". why: a clause that the figures do not tell.
    """

    what: str
    chosen: str
    gain: float | None = None
    over: str = ""
    basis: str = ""
    why: str = ""
    measure: str = "as fast"  # that `gain` compares

    @classmethod
    def switch(cls, what: str, on: bool, gain: float | None, *more: str) -> Decision:
        """Something that is on or off. gain: with it over without. more: the fields from `basis` on."""
        times = None if not gain else gain if on else 1 / gain
        return cls(what, "on" if on else "off", times, "without" if on else "with it", *more)

    @property
    def value(self) -> str:
        """The sentence without its beginning."""
        return f"{self.brief}; {self.why}" if self.why else self.brief

    @property
    def brief(self) -> str:
        """The value without its last clause."""
        compared = "" if self.gain is None else f"{self._times} as {self.over}"
        return ", ".join(filter(None, [self.chosen, compared, self.basis]))

    @property
    def short(self) -> str:
        """The value where there is little room."""
        known = ", ".join(filter(None, [self._times, self.basis]))
        return f"{self.chosen} ({known})" if known else self.chosen

    @property
    def _times(self) -> str:
        return "" if self.gain is None else f"{self.gain:.2f} times {self.measure}"

    def sentence(self) -> str:
        """One line for the user, without a full stop: what, what was chosen, over what, how that is known."""
        return f"{self.what}: {self.value}"


class Progress:
    """Receives how far an operation is; this one shows nothing."""

    def start(self, label: str, total: float) -> None:
        """Begins a task of `total` units."""

    def add(self, amount: float = 1) -> None:
        """Advances the task by some units."""

    def phase(self, text: str, part: str = "") -> None:
        """Describes what the task does now. part: of the task, of which a line says that it begins, without a bar."""


NO_PROGRESS = Progress()


@dataclass(eq=False)
class Run:
    """One operation: opening a session, a measurement.

    show: shows a message at once; may be replaced. notes: sentences about the result, a warning where they are plain
    strings. progress: of the operation, whose caller has begun the task where it knows the total.
    """

    show: Notify = ignore
    notes: list[str] = field(default_factory=list)
    cancelled: Cancel = lambda: False
    progress: Progress = NO_PROGRESS

    def note(self, text: str, level: Level = Level.INFO) -> None:
        """Adds a sentence to the notes."""
        self.notes.append(Notification(text, level))

    def warn(self, text: str) -> None:
        """Adds a sentence that needs attention to the notes."""
        self.notes.append(text)

    def say(self, text: str, level: Level = Level.INFO) -> None:
        """Shows a sentence at once."""
        self.show(Notification(text, level))

    def report(self, text: str, level: Level = Level.WARNING) -> None:
        """Shows a sentence at once, and adds it to the notes."""
        self.notes.append(notification := Notification(text, level))
        self.show(notification)


class Closing:
    """A context manager that closes itself at the end of its block."""

    def close(self) -> None:
        """Frees what the object holds; closing twice is harmless."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def rotated(items: Sequence[T], turn: int) -> tuple[T, ...]:
    """Returns the order in which the items run for the `turn`-th time: rotated, every second cycle reversed.

    Slow drift of the machine then affects all alike: each item comes in every place, and after each other one.
    """
    cycle, shift = divmod(turn, len(items))
    order = (*items[shift:], *items[:shift])
    return order[::-1] if cycle % 2 else order


def within(limit_s: float, rounds: Iterable[T], *, at_least: int = 1) -> Iterator[T]:
    """Yields rounds of a measurement until one ends after `limit_s` seconds; at_least: of them, however long they take.

    The time runs from the request for the first; no round is cut short.
    """
    end_s = time.perf_counter() + limit_s
    for n_begun, each in enumerate(rounds, 1):
        yield each
        if n_begun >= at_least and time.perf_counter() > end_s:
            return


def seconds_of(work: Callable[[], object]) -> float:
    """Does the work; returns the seconds that it took. Raises what the work raises."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
