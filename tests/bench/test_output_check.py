"""Differences between answers: near-ties are listed, all others fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.bench.output_check import NEAR_TIE_GAP, check_answers, logits_in
from moeedge.bench.samples import Sample
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase

_END = 9


def _sample(prompt: str, tokens: list[int], *, turn: int = 0, repetition: int = 0) -> Sample:
    return Sample("m", prompt, turn, repetition, 0, tokens=tokens, prompt_ids=[1])


def _logits(**values: float) -> NDArray[np.float32]:
    row = np.full(10, -5.0, dtype=np.float32)
    for name, value in values.items():
        row[int(name[1:])] = value
    return row


@pytest.mark.parametrize(("tokens", "first"), [([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0), ([9, 2, 3], 0)])
def test_the_first_difference_is_found(tokens: list[int], first: int) -> None:
    check = check_answers([_sample("a", tokens)], [_sample("a", [1, 2, 3])], lambda _s, _p: _logits(), [_END])
    assert [difference.position for difference in check.near_ties] == [first]


def test_logits_are_those_of_plain_decoding(tiny_moe: Path) -> None:
    sample = replace(_sample("a", [70, 71, 72]), prompt_ids=[65, 66, 67])
    with Model.load(tiny_moe) as model, Context(model, n_ctx=256, n_threads=1) as context:
        at_once = context.decode([65, 66, 67, 70, 71], phase=Phase.PREFILL, logits="last")[0].copy()
        assert logits_in(context)(sample, 2) == pytest.approx(at_once, abs=1e-3)


def test_a_small_gap_is_a_near_tie_and_a_large_one_a_failure() -> None:
    reference = [_sample("a", [1, 2, 3]), _sample("b", [1, 2, 3]), _sample("c", [1, 2, 3])]
    answers = [_sample("a", [1, 2, 3]), _sample("b", [1, 4, 3]), _sample("c", [1, 2, 5])]
    calls = []

    def logits_at(sample: Sample, position: int) -> NDArray[np.float32]:
        calls.append((sample.prompt, position))
        return _logits(t2=3.0, t4=3.0 - NEAR_TIE_GAP / 2) if sample.prompt == "b" else _logits(t3=3.0, t5=2.0)

    check = check_answers(answers, reference, logits_at, [_END])
    assert str(check) == "1/3"
    assert calls == [("b", 1), ("c", 2)]
    assert [(d.prompt, d.position, d.reference_token, d.token) for d in check.near_ties] == [("b", 1, 2, 4)]
    assert check.near_ties[0].gap == pytest.approx(NEAR_TIE_GAP / 2, abs=1e-6)
    assert [(d.prompt, d.gap) for d in check.different] == [("c", 1.0)]
    assert not check.passed


def test_an_early_stop_is_compared_by_the_logit_of_the_stop_token() -> None:
    check = check_answers(
        [_sample("a", [1])], [_sample("a", [1, 2])], lambda _s, _p: _logits(t2=1.0, t9=0.99), [8, _END]
    )
    assert [(d.reference_token, d.token, d.near_tie) for d in check.near_ties] == [(2, None, True)]
    assert check.passed


def test_a_prompt_is_equal_when_all_its_turns_and_repetitions_are() -> None:
    reference = [_sample("a", [1], turn=0), _sample("a", [2], turn=1), _sample("b", [3])]
    answers = [*reference, _sample("a", [1], turn=0, repetition=1), _sample("a", [7], turn=1, repetition=1)]
    check = check_answers(answers, reference, lambda _s, _p: _logits(t2=1.0), [_END])
    assert str(check) == "1/2"
    assert [(d.turn, d.repetition) for d in check.different] == [(1, 1)]


def test_the_reference_must_repeat_itself_too() -> None:
    unsteady = [_sample("a", [1]), _sample("a", [2], repetition=1), _sample("a", [2], repetition=2)]
    check = check_answers(unsteady, unsteady, lambda _s, _p: _logits(t1=4.0), [_END])
    assert (str(check), len(check.different)) == ("0/1", 1)  # the same difference once


def test_on_its_own_split_the_best_token_is_right() -> None:
    """Where other layers are on the GPU, the reference's token may be further from the best one than rounding."""
    reference = [_sample(name, [1, 2]) for name in "abc"]
    answers = [_sample("a", [1, 4]), _sample("b", [1, 5]), _sample("c", [1])]
    check = check_answers(
        answers, reference, lambda _s, _p: _logits(t2=1.0, t4=3.0, t5=2.9, t9=2.96), [_END], own_split=True
    )
    assert [(d.prompt, d.gap) for d in check.near_ties] == [("a", 0.0), ("c", pytest.approx(0.04, abs=1e-6))]
    assert [(d.prompt, d.gap) for d in check.different] == [("b", pytest.approx(0.1, abs=1e-6))]
