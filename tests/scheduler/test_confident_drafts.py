"""Drafts that end by their confidence, and n-grams next to a model: by all lengths tried out, and on known chances."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from moeedge import speculation
from moeedge.scheduler.governor import GAMMA_MAX
from moeedge.scheduler.stopping import N_BINS, AcceptanceByConfidence, DraftStop, ExpectedGain, confidence_bin
from tests.benchmarks import draft_chains
from tests.benchmarks.draft_chains import Position
from tests.scheduler.test_governor import GAMMAS, N_TOKENS, TRACES, Trace, experts

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
        assert [confidence_bin(c) for c in (0.0, 0.3, 0.6, 0.98, 0.99, 1.0)] == [0, 1, 2, 5, 6, 6]
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
        fixed = DraftStop()  # does not end
        assert all(fixed.keeps(UNSURE) and fixed.goes_on() for _ in range(20))
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


@dataclass(frozen=True)
class Text:
    """Drafts of known chances: a share of `sure` tokens is accepted by 0.98, the others by `otherwise`.

    stated: the confidence of a draft by its chance. ngram: the chance of drafts by n-grams, at the n-th token; None:
    they find nothing.
    """

    sure: float
    otherwise: float
    stated: Callable[[float], float] = lambda chance: chance
    ngram: Callable[[int], float | None] = lambda n: None

    @property
    def acceptance(self) -> float:
        return self.sure * 0.98 + (1 - self.sure) * self.otherwise

    def positions(self, n_tokens: int, seed: int) -> list[Position]:
        """What can be drafted after each of so many tokens."""
        rng, found = np.random.default_rng(seed), []
        for n in range(n_tokens):
            chances = np.where(rng.random(GAMMA_MAX) < self.sure, 0.98, self.otherwise)
            ngram = self.ngram(n)
            n_right, ngram_right = (
                int(np.argmin([*(rng.random(GAMMA_MAX) < chance), False])) for chance in (chances, ngram or 0.0)
            )
            stated = [self.stated(chance) for chance in chances.tolist()]
            found.append(Position(stated, n_right, None if ngram is None else 1.0, ngram_right, n_tokens - n))
        return found


def governed(costs: Trace, text: Text, seed: int, n_tokens: int = N_TOKENS) -> tuple[float, float]:
    """Seconds per token, and the share of steps in which n-grams drafted."""
    times = draft_chains.Costs([costs.target_s(gamma + 1) for gamma in GAMMAS], costs.draft_s)
    texts = [text.positions(n_tokens, seed)]
    seconds, share = draft_chains.governed_s(texts, times, seed=seed, noise=costs.noise)
    return seconds / n_tokens, share


def mean_s(costs: Trace, text: Text, n_seeds: int = 8) -> float:
    return float(np.mean([governed(costs, text, seed)[0] for seed in range(n_seeds)]))


def best_fixed_s(costs: Trace, acceptance: float) -> float:
    """Seconds per token of the best fixed length."""
    return min(
        (gamma * costs.draft_s + costs.target_s(gamma + 1)) / speculation.expected_tokens(gamma, acceptance)
        for gamma in GAMMAS
    )


MIXED = Text(sure=0.7, otherwise=0.2)


@pytest.mark.parametrize(
    ("name", "text", "most"),
    [
        *[(name, MIXED, 0.97) for name in ("best 2", "best 8", "jump")],  # it beats every fixed length
        ("best 2", Text(sure=0.75, otherwise=0.3, stated=lambda chance: 0.6), 1.06),  # it says nothing
        # sure where it should be unsure, and unsure where it is right: this is corrected
        ("best 2", Text(sure=0.7, otherwise=0.2, stated=lambda chance: 0.2 if chance > 0.5 else 0.995), 1.02),
    ],
)
def test_confidence_next_to_the_best_fixed_length(name: str, text: Text, most: float) -> None:
    assert mean_s(TRACES[name], text) < most * best_fixed_s(TRACES[name], text.acceptance)


def test_hopeless_drafts_are_off() -> None:
    """Looking at drafts that are never right costs a pass each; trials are all that is left."""
    costs = Trace(lambda t: 0.1 * experts(t), 0.03, lambda n: 0.0)
    seconds, _ = governed(costs, Text(sure=0.0, otherwise=0.05, stated=lambda chance: 0.995), 1, 1024)
    assert seconds < 1.04 * costs.target_s(1)


def test_ngrams_take_over_where_they_are_right() -> None:
    """In the second half of the text they copy; before they find what is wrong."""
    costs = TRACES["best 2"]
    text = Text(sure=0.0, otherwise=0.7, ngram=lambda n: 0.1 if n < N_TOKENS // 2 else 0.97)
    seconds, share = governed(costs, text, 3)
    assert seconds < 0.85 * governed(costs, Text(sure=0.0, otherwise=0.7), 3)[0]
    assert 0.1 < share < 0.9


def test_ngrams_that_are_wrong_cost_nothing() -> None:
    costs = TRACES["best 2"]
    alone, beside = Text(sure=0.0, otherwise=0.8), Text(sure=0.0, otherwise=0.8, ngram=lambda n: 0.2)
    assert mean_s(costs, beside) < 1.02 * mean_s(costs, alone)
    assert governed(costs, beside, 2)[1] < 0.05


@pytest.mark.parametrize("chance", [0.3, 0.5, 0.8])
def test_drafts_that_cost_more_than_they_bring_are_off(chance: float) -> None:
    """However sure they are: each token of a verification reads its own experts."""
    costs = TRACES["best 0"]
    assert mean_s(costs, Text(sure=0.0, otherwise=chance)) < 1.04 * costs.target_s(1)


@pytest.mark.parametrize("name", ["measured, F16", "experts 30%", "experts 90%", "dense"])
def test_regret_on_recorded_drafts(name: str) -> None:
    """640 tokens of recorded drafts at recorded costs and formulas: at most 3 % over the best fixed length."""
    texts = draft_chains.positions(json.loads(gzip.decompress(draft_chains.RECORD.read_bytes()))) * 4
    assert regret(texts, draft_chains.curves()[name]) <= 0.03


@pytest.mark.parametrize("rate", [0.7, 0.9])
@pytest.mark.parametrize("shape", draft_chains.surfaces())
def test_regret_at_the_costs_of_full_shapes(rate: float, shape: str) -> None:
    assert regret(draft_chains.scripted(rate), draft_chains.surfaces()[shape]) <= 0.03


def regret(texts: Sequence[Sequence[Position]], costs: draft_chains.Costs) -> float:
    best_s = min(sum(draft_chains.fixed_s(text, costs, gamma) for text in texts) for gamma in range(GAMMA_MAX + 1))
    seconds = [draft_chains.governed_s(texts, costs, seed=seed)[0] for seed in range(4)]
    return float(np.mean(seconds)) / best_s - 1
