"""A prompt set in memory: conversations of one or more turns, and where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from moeedge.scoring.answers import Reference

Role = Literal["system", "user", "assistant"]
# environment: $MOEEDGE_DATA; package: the sample that comes with moeedge; several: sets from different places
Place = Literal["environment", "cache", "hub", "file", "package", "several"]


@dataclass(frozen=True)
class PromptMessage:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer turn by turn.

    `turns[i]` are the messages before the i-th answer: usually one, more with a system message or a fixed history.
    `references[i]` is the reference for that answer; empty if the data has none.
    """

    id: str
    category: str
    turns: tuple[tuple[PromptMessage, ...], ...]
    references: tuple[Reference | None, ...] = ()
    language: str = ""  # as the data names it; empty where it does not say
    dataset: str = ""  # name of the set; filled in where prompts of several sets are put together

    @property
    def description(self) -> dict[str, str]:
        """The prompt in a trace: id, and dataset, category and language where they are known."""
        names = ("id", "dataset", "category", "language")
        return {name: value for name in names if (value := getattr(self, name))}

    def messages(self, turn: int) -> list[dict[str, str]]:
        """Returns the messages before the answer to `turn` (from 0), as chat templates and the engine take them."""
        return [asdict(message) for message in self.turns[turn]]

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
        """Returns `limit` prompts of each set, spread evenly over it (floor(i * n / limit)); all for None."""
        if limit is None or limit >= len(self.prompts):
            return self
        prompts: list[Prompt] = []
        for name in dict.fromkeys(prompt.dataset for prompt in self.prompts):
            own = [prompt for prompt in self.prompts if prompt.dataset == name]
            n = len(own)
            prompts += own if limit >= n else [own[i * n // limit] for i in range(limit)]
        return replace(self, prompts=tuple(prompts))


@dataclass(frozen=True)
class EvaluationText:
    """A fixed text for perplexity, and the facts that identify it."""

    name: str
    text: str
    sha256: str  # of the file


def join_datasets(sets: Sequence[Dataset]) -> Dataset:
    """Returns several sets as one: its categories are the sets, ids have their names in front; one set as it is."""
    if len(sets) == 1:
        return sets[0]
    pairs = [(each.name, prompt) for each in sets for prompt in each.prompts]
    places = {each.place for each in sets}
    return Dataset(
        name=",".join(each.name for each in sets),
        prompts=tuple(replace(p, id=f"{name}/{p.id}", category=name, dataset=name) for name, p in pairs),
        place=places.pop() if len(places) == 1 else "several",
        path=Path(",".join(each.path.name for each in sets)),
        sha256=",".join(each.sha256 for each in sets),
        variant="; ".join(each.variant for each in sets),
        unscored="; ".join(dict.fromkeys(each.unscored for each in sets if each.unscored)),
        answer_tokens=max(each.answer_tokens for each in sets),
    )


def user_turns(*texts: str) -> tuple[tuple[PromptMessage, ...], ...]:
    """Returns one turn with one user message per text."""
    return tuple((PromptMessage("user", text),) for text in texts)
