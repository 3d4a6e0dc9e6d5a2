"""The text generator: same seed, same text; held-back prompts stay out; scorers tell right from wrong."""

from __future__ import annotations

import itertools
import random

import pytest

from models.generator import DOMAINS, IM_START, Chat, Turn, chats, held_back, render_chat, render_prompt, score
from models.generator.base import contains

SEVEN = {"conversation", "arithmetic", "instructions", "questions", "choice", "code", "summaries"}


def first(n: int, seed: int | str = 0, domain: str | None = None) -> list[Chat]:
    return list(itertools.islice(chats(seed, domain), n))


def test_same_seed_same_text() -> None:
    random.seed(1)
    before = random.getstate()
    assert first(200, "a") == first(200, "a")
    assert first(200, "a") != first(200, "b")
    assert held_back(30) == held_back(30)
    assert random.getstate() == before  # of other users of chance


@pytest.mark.slow
def test_held_back_prompts_are_never_trained_on() -> None:
    kept = {chat.prompt_key() for chat in held_back(200)}
    seen = {chat.prompt_key() for chat in first(20_000, 7)}
    assert len(kept) == 200
    assert not kept & seen


@pytest.mark.parametrize("domain", sorted(DOMAINS))
def test_scorer_accepts_its_own_answers_and_rejects_others(domain: str) -> None:
    for chat in first(12 if domain == "code" else 200, 3, domain):  # code is run
        assert chat.domain == domain
        for i, turn in enumerate(chat.turns):
            assert score(chat, i, turn.assistant), (turn.user, turn.assistant)
            assert not score(chat, i, "")
            assert not score(chat, i, "Perhaps, perhaps not")


def test_every_step_of_worked_arithmetic_is_true() -> None:
    for chat in first(2000, 4, "arithmetic"):
        for turn in chat.turns:
            steps = [step for step in turn.assistant.replace(". ", "\n").split("\n") if "=" in step]
            for step in steps:
                left, right = step.rstrip(".").split(" = ")
                assert eval(left) == int(right), turn
            assert turn.reference.expect[0] == steps[-1].rstrip(".").split(" = ")[1]


def test_chatml_form() -> None:
    chat = Chat("x", (Turn("one", "two", contains("two")), Turn("three", "four", contains("four"))), system="s")
    text = render_chat(chat)
    assert text.startswith(f"{IM_START}system\ns<|im_end|>\n{IM_START}user\none<|im_end|>\n{IM_START}assistant\ntwo")
    assert text.endswith("four<|im_end|>\n<|endoftext|>")
    prompt = render_prompt(chat.messages(n_turns=2))
    assert text.startswith(prompt) and prompt.endswith(f"three<|im_end|>\n{IM_START}assistant\n")


def test_each_domain_occurs_and_some_chats_have_several_turns() -> None:
    sample = first(2000, 5)
    assert {chat.domain for chat in sample} == set(DOMAINS) == SEVEN
    several = sum(len(chat.turns) > 1 for chat in sample) / len(sample)
    assert 0.15 < several < 0.5
    assert 0.1 < sum(chat.system is not None for chat in sample) / len(sample) < 0.2
