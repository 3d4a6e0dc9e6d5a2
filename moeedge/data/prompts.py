"""What a prompt set is once read: conversations of one or more turns, with the place that they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moeedge.scoring.answers import Reference

Role = Literal["system", "user", "assistant"]
# environment: $MOEEDGE_DATA; package: the sample that comes with moeedge
Place = Literal["environment", "cache", "hub", "file", "package"]


@dataclass(frozen=True)
class Message:
    """One message of a conversation, as chat templates take them."""

    role: Role
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates and the engine take."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered turn by turn.

    `turns[i]` are the messages that are appended before the model answers for the i-th time: one user message as a
    rule, more where the data bring a system message or a fixed history. `references[i]` is what that answer is held
    against; the tuple is empty where the data have nothing.
    """

    id: str
    category: str
    turns: tuple[tuple[Message, ...], ...]
    references: tuple[Reference | None, ...] = ()

    def reference(self, turn: int) -> Reference | None:
        """What the answer to `turn` (from 0) is held against, if anything."""
        return self.references[turn] if turn < len(self.references) else None


@dataclass(frozen=True)
class Dataset:
    """Prompts in file order, and enough to say exactly which ones they were."""

    name: str
    prompts: tuple[Prompt, ...]
    place: Place
    path: Path
    sha256: str  # of the file
    variant: str  # one line: whose file this is, and whether it is a part of the set
    unscored: str = ""  # why answers without a reference have none
    answer_tokens: int = 512  # that a whole answer takes at most, as a rule

    def limited(self, limit: int | None) -> Dataset:
        """`limit` prompts spread evenly over the file, so that every category comes in; all where limit is None.

        Prompt i is the one at floor(i * n / limit): the same ones on every run.
        """
        n = len(self.prompts)
        if limit is None or limit >= n:
            return self
        return replace(self, prompts=tuple(self.prompts[i * n // limit] for i in range(limit)))


def user_turns(*texts: str) -> tuple[tuple[Message, ...], ...]:
    """One turn of one user message for each text."""
    return tuple((Message("user", text),) for text in texts)
