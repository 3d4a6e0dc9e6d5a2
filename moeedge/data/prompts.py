"""A prompt set in memory: conversations of one or more turns, and where they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moeedge.scoring.answers import Reference

Role = Literal["system", "user", "assistant"]
# environment: $MOEEDGE_DATA; package: the sample that comes with moeedge
Place = Literal["environment", "cache", "hub", "file", "package"]


@dataclass(frozen=True)
class PromptMessage:
    """One message of a conversation."""

    role: Role
    content: str

    def as_dict(self) -> dict[str, str]:
        """Returns the form that chat templates and the engine take."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer turn by turn.

    `turns[i]` are the messages appended before the i-th answer: usually one user message, more if the data has a system
    message or a fixed history. `references[i]` is the reference for that answer; empty if the data has none.
    """

    id: str
    category: str
    turns: tuple[tuple[PromptMessage, ...], ...]
    references: tuple[Reference | None, ...] = ()
    language: str = ""  # as the data names it; empty where it does not say
    dataset: str = ""  # name of the set; filled in where prompts of several sets are put together

    @property
    def description(self) -> dict[str, str]:
        """What a trace says about the prompt's texts: id, and category, language and dataset where they are known."""
        named = {"id": self.id, "dataset": self.dataset, "category": self.category, "language": self.language}
        return {name: value for name, value in named.items() if value}

    def reference(self, turn: int) -> Reference | None:
        """Returns the reference for the answer to `turn` (from 0), or None."""
        return self.references[turn] if turn < len(self.references) else None


@dataclass(frozen=True)
class Dataset:
    """Prompts in file order, with the facts that identify them."""

    name: str
    prompts: tuple[Prompt, ...]
    place: Place
    path: Path
    sha256: str  # of the file
    variant: str  # one line: whose file this is, and whether it is part of the set
    unscored: str = ""  # why answers without a reference have none
    answer_tokens: int = 512  # typical maximum of a complete answer

    def limited(self, limit: int | None) -> Dataset:
        """Returns `limit` prompts spread evenly over the file, so that every category occurs; all for None.

        Prompt i of the result is prompt floor(i * n / limit) of the file.
        """
        n = len(self.prompts)
        if limit is None or limit >= n:
            return self
        return replace(self, prompts=tuple(self.prompts[i * n // limit] for i in range(limit)))


def user_turns(*texts: str) -> tuple[tuple[PromptMessage, ...], ...]:
    """Returns one turn with one user message per text."""
    return tuple((PromptMessage("user", text),) for text in texts)
