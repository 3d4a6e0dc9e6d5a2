"""Chats, the ChatML form they are written in, and the split between training and held-back prompts."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from moeedge.scoring.answers import Reference

T = TypeVar("T")

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

HELD_BACK_SHARE = 20  # one prompt in so many is never trained on


def contains(*expect: str, max_chars: int | None = None, ends_with: str = "") -> Reference:
    """Right when every string occurs, upper and lower case alike, within the limits."""
    return Reference("contains", expect, max_chars=max_chars, ends_with=ends_with)


def number(value: int) -> Reference:
    """Right when the last number of the answer is this one."""
    return Reference("number", (str(value),))


def letter(value: str) -> Reference:
    """Right when this option is chosen."""
    return Reference("letter", (value,))


def exact(text: str) -> Reference:
    """Right when the answer is this text."""
    return Reference("exact", (text,))


def code_tests(tests: str) -> Reference:
    """Right when the answer's code passes these assertions."""
    return Reference("code", tests=tests)


@dataclass(frozen=True)
class Turn:
    """One question with its answer, and the reference by which other answers are scored."""

    user: str
    assistant: str
    reference: Reference


@dataclass(frozen=True)
class Chat:
    """A conversation of one or more turns in one domain."""

    domain: str
    turns: tuple[Turn, ...]
    kind: str = ""  # the task inside the domain ("sum", "sort", ...); scorers may depend on it
    system: str | None = None

    def prompt_key(self) -> str:
        """All that the user says: the unit of the held-back split."""
        return "\n".join(turn.user for turn in self.turns)

    def is_held_back(self) -> bool:
        """Whether this chat's prompt belongs to the evaluation split (decided by a hash of the prompt alone)."""
        digest = hashlib.blake2b(self.prompt_key().encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % HELD_BACK_SHARE == 0

    def messages(self, n_turns: int | None = None) -> list[tuple[str, str]]:
        """(role, text) pairs; with `n_turns`, the prompt for that turn: its answer is left out."""
        out = [("system", self.system)] if self.system is not None else []
        last = len(self.turns) if n_turns is None else n_turns
        for i, turn in enumerate(self.turns[:last]):
            out.append(("user", turn.user))
            if n_turns is None or i + 1 < n_turns:
                out.append(("assistant", turn.assistant))
        return out


def render_message(role: str, text: str) -> str:
    """One message in ChatML."""
    return f"{IM_START}{role}\n{text}{IM_END}\n"


def render_prompt(messages: Sequence[tuple[str, str]]) -> str:
    """Messages in ChatML, followed by the opening of the assistant's answer."""
    return "".join(render_message(r, t) for r, t in messages) + f"{IM_START}assistant\n"


def skewed(rng: random.Random, options: Sequence[T], keep: float = 0.6) -> T:
    """Pick one option, each `1 - keep` as likely as the one before it.

    A clear favourite gives greedy decoding one well-defined continuation, while sampling still varies.
    """
    for option in options[:-1]:
        if rng.random() < keep:
            return option
    return options[-1]


def vary(rng: random.Random, text: str) -> str:
    """The same question as a hasty user would type it: lower case, no full stop."""
    if rng.random() < 0.15:
        text = text.lower()
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    return text
