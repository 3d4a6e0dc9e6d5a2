"""The end of a draft by its confidence, next to all lengths tried out."""

from __future__ import annotations

import numpy as np
import pytest

from moeedge.scheduler.stopping import N_BINS, AcceptanceByConfidence, DraftStop, ExpectedGain, confidence_bin

CERTAIN, UNSURE = 1.0, 0.1


def gain(pass_tokens: float = 0.1, token_tokens: float = 0.3, chance: float = 0.6, n: int = 8) -> ExpectedGain:
    """Each draft costs `pass_tokens` to make and `token_tokens` to verify; unseen ones have `chance`."""
    lengths = np.arange(n + 1)
    tokens = np.cumsum(chance**lengths)
    return ExpectedGain((1.0 + (pass_tokens + token_tokens) * lengths).tolist(), pass_tokens, tokens.tolist())


def chances(**by_bin: float) -> list[float]:
    found = [0.5] * N_BINS
    found[confidence_bin(CERTAIN)] = by_bin.get("certain", 0.99)
    found[confidence_bin(UNSURE)] = by_bin.get("unsure", 0.05)
    return found


class TestAcceptanceByConfidence:
    def test_confidences_are_believed_at_first(self) -> None:
        found = AcceptanceByConfidence().chances()
        assert (np.diff(found) > 0).all()
        assert found[confidence_bin(0.6)] == pytest.approx(0.6)

    def test_verdicts_count(self) -> None:
        """A draft that is sure of itself and wrong is found out, up to the first rejected one of each step."""
        acceptance = AcceptanceByConfidence()
        for _ in range(100):
            acceptance.observe([UNSURE, CERTAIN, CERTAIN, CERTAIN], 1)
        found = acceptance.chances()
        assert found[confidence_bin(UNSURE)] > 0.9
        assert found[confidence_bin(CERTAIN)] < 0.1
        assert all(high >= low for high, low in zip(acceptance.chances(1.0), found, strict=True))

    def test_bins(self) -> None:
        assert [confidence_bin(c) for c in (0.0, 0.3, 0.6, 0.98, 0.99, 1.0)] == [0, 1, 2, 5, 6, 6]


class TestExpectedGain:
    def test_of_more_is_the_best_length(self) -> None:
        """Further drafts have the chance of unseen ones each, after those that are accepted by 0.8."""
        found = gain()
        lengths = [sum(0.8 * 0.6**k for k in range(1, n + 1)) - 0.4 * n for n in range(1, 7)]
        assert found.of_more(2, 0.8) == pytest.approx(max(lengths))
        assert found.of_more(8, 1.0) < 0  # there are no more

    def test_of_next_does_not_pay_the_pass_again(self) -> None:
        found = gain(chance=0.1)  # no draft pays after it
        assert found.of_next(0, 0.35) == pytest.approx(0.05)
        assert found.of_next(0, 0.25) < 0

    def test_of_looking(self) -> None:
        """Half of the first drafts are right and half are wrong: looking costs one pass, and only the former go on."""
        found = gain(chance=0.1)
        frequency = [0.0] * N_BINS
        frequency[confidence_bin(UNSURE)] = frequency[confidence_bin(CERTAIN)] = 0.5
        assert found.of_looking(chances(certain=1.0, unsure=0.0), frequency) == pytest.approx(0.5 * 0.7 - 0.1)

    def test_of_equals(self) -> None:
        """They are made without a pass."""
        n, value = gain().of_equals(0.8)
        lengths = [sum(0.8**k for k in range(1, n + 1)) - 0.3 * n for n in range(1, 9)]
        assert n == 1 + int(np.argmax(lengths))
        assert value == pytest.approx(max(lengths))


class TestDraftStop:
    def test_ends_before_a_draft_that_is_unsure(self) -> None:
        stop = DraftStop(gain(), chances())
        assert stop.keeps(CERTAIN)
        assert stop.goes_on()
        assert not stop.keeps(UNSURE)

    def test_ends_after_a_draft_where_no_other_one_pays(self) -> None:
        """By then the chance that all are accepted is too low for the cost of one more."""
        stop = DraftStop(gain(chance=0.5), [0.7] * N_BINS)
        n = 0
        while stop.keeps(CERTAIN):
            n += 1
            if not stop.goes_on():
                break
        assert n == 1  # 0.7 * 0.5 < 0.4, and 0.7 > 0.3

    def test_a_fixed_length_does_not_end(self) -> None:
        stop = DraftStop()
        assert all(stop.keeps(UNSURE) and stop.goes_on() for _ in range(20))
