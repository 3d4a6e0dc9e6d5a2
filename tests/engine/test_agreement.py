"""Equal answers, near-ties and errors are distinguished."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.bench.output_check import NEAR_TIE_GAP, ReferenceGap, compare_answers, top2_gap
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase


def never(position: int) -> float:
    raise AssertionError("no gap is needed")


def test_equal_answers_need_no_gap() -> None:
    result = compare_answers([1, 2, 3], [1, 2, 3], never)
    assert result.equal and result.first_difference is None and not result.near_tie


@pytest.mark.parametrize(("tokens", "first"), [([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0), ([9, 2, 3], 0)])
def test_the_first_difference_is_found(tokens: list[int], first: int) -> None:
    asked: list[int] = []

    def gap_of(position: int) -> float:
        asked.append(position)
        return 1.0

    result = compare_answers([1, 2, 3], tokens, gap_of)
    assert not result.equal
    assert asked == [first] == [result.first_difference]


@pytest.mark.parametrize(("gap", "near"), [(0.0, True), (NEAR_TIE_GAP, True), (NEAR_TIE_GAP * 1.01, False)])
def test_a_narrow_gap_is_a_near_tie(gap: float, near: bool) -> None:
    result = compare_answers([1, 2], [1, 3], lambda _position: gap)
    assert (result.gap, result.near_tie) == (gap, near)


def test_reference_gap_is_that_of_plain_decoding(tiny_moe: Path) -> None:
    prompt, reference = [65, 66, 67], [70, 71, 72]
    with Model.load(tiny_moe) as model, Context(model, n_ctx=256, n_threads=1) as context:
        logits = context.decode([*prompt, *reference[:2]], phase=Phase.PREFILL, logits="last")
        expected = float(np.diff(np.sort(logits[0])[-2:])[0])
        third = int(np.argsort(logits[0])[-3])
        gap_to_third = float(logits[0].max() - logits[0, third])
        assert ReferenceGap(context, prompt, reference, reference[:2])(2) == pytest.approx(expected, abs=1e-3)
        other = [*reference[:2], third]
        assert ReferenceGap(context, prompt, reference, other)(2) == pytest.approx(gap_to_third, abs=1e-3)


def test_top2_gap() -> None:
    assert top2_gap(np.array([1.0, -2.0, 4.0, 3.5], dtype=np.float32)) == 0.5
