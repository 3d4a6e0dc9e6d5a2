"""Chat-formatted text made by rules, in several domains with answers that can be checked. Same seed, same text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from models.generator import (
    arithmetic,
    choice,
    code,
    conversation,
    instructions,
    questions,
    summaries,
)
from models.generator.base import END_OF_TEXT, IM_END, IM_START, Chat, Turn, render_message, render_prompt
from moeedge.scoring.answers import score_answer

__all__ = [
    "DOMAINS",
    "END_OF_TEXT",
    "IM_END",
    "IM_START",
    "Chat",
    "Turn",
    "chats",
    "held_back",
    "long_chats",
    "render_chat",
    "render_message",
    "render_prompt",
    "score",
]

MODULES: tuple[tuple[ModuleType, float], ...] = (  # with each domain's share of the chats
    (conversation, 0.13),
    (arithmetic, 0.22),
    (instructions, 0.24),
    (questions, 0.15),
    (choice, 0.13),
    (code, 0.06),
    (summaries, 0.07),
)
DOMAINS: dict[str, ModuleType] = {module.DOMAIN: module for module, _ in MODULES}

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Be brief.",
    "You are a kind and friendly assistant.",
    "Answer in short sentences.",
    "You are a toy model.",
    "Help the user.",
)
SYSTEM_SHARE = 0.15
MOST_MISSES = 3000  # after so many chats without a new held-back prompt there are hardly any left


def _any_chat(rng: random.Random, domain: str | None) -> Chat:
    modules, weights = zip(*MODULES, strict=True)
    module = DOMAINS[domain] if domain else rng.choices(modules, weights)[0]
    chat: Chat = module.make(rng)
    if rng.random() < SYSTEM_SHARE:
        chat = replace(chat, system=rng.choice(SYSTEM_MESSAGES))
    return chat


def chats(seed: int | str, domain: str | None = None) -> Iterator[Chat]:
    """Endless training chats; prompts of the held-back split never occur."""
    rng = random.Random(f"train-{seed}")
    while True:
        chat = _any_chat(rng, domain)
        if not chat.is_held_back():
            yield chat


def long_chats(seed: int | str) -> Iterator[Chat]:
    """Endless training chats with very long questions."""
    rng = random.Random(f"train-long-{seed}")
    while True:
        chat = conversation.make_long(rng)
        if not chat.is_held_back():
            yield chat


def held_back(n: int, seed: int | str = 0, domain: str | None = None) -> list[Chat]:
    """`n` different chats that training never sees, domains in turn (or all of one domain).

    A domain of few prompts may hold back fewer than `n`: then there are fewer.
    """
    rng = random.Random(f"held-back-{seed}")
    order = [domain] if domain else list(DOMAINS)
    out: dict[str, Chat] = {}
    misses = 0
    while len(out) < n and misses < MOST_MISSES:
        chat = _any_chat(rng, order[len(out) % len(order)])
        if chat.is_held_back() and chat.prompt_key() not in out:
            out[chat.prompt_key()] = chat
            misses = 0
        else:
            misses += 1
    return list(out.values())


def render_chat(chat: Chat) -> str:
    """A complete chat in ChatML, ended by the end-of-text token."""
    return "".join(render_message(role, text) for role, text in chat.messages()) + END_OF_TEXT


def score(chat: Chat, index: int, answer: str) -> bool:
    """Whether `answer` is right for turn `index` of `chat`; code is run, apart from everything, and tested."""
    return score_answer(chat.turns[index].reference, answer, run_code=True).value == 1.0
