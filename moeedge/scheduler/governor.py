"""How many tokens to draft: the length with the most tokens per second, by the cost of the steps so far.

A step with gamma drafts emits N(gamma) tokens and takes gamma * T_D + T_T(gamma + 1) (`moeedge.speculation` for the
notation). All three are estimated from the steps themselves:

  N    from the chance that draft i is accepted after all before it were, counted by position, old steps forgotten
  T_D  the mean time of a draft token
  T_T  a Gaussian estimate of log T_T(t) for t = 1..n, in which one measurement corrects all t: its prior has the shape
       of the production study's T(K + 1) (`speculation.verification_ratio`), and its level may drift much faster, as
       costs fall while a cache fills, whatever is drafted. Waits for experts from the file are no part of it: they grow
       with the distinct experts of t tokens and change faster

Now and then another length is tried, where the trial is expected to tell more than it costs. It is paid from a credit,
which grows by a fixed share of the time and so bounds the cost of all trials. Plain steps are tried without credit, so
that drafts that lose are found out soon. Where drafts come with a confidence, most steps have no fixed length: a draft
ends where another token does not pay (`stopping`).

Texts that are decoded together have one length. Of B texts T_T is that of B * (gamma + 1) tokens, and N(gamma) is each
text's.

This runs in every step: what a step needs repeatedly is kept until `observe`, and lists of up to 17 numbers are
Python's floats, for which a call of NumPy takes longer than the list.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge import speculation
from moeedge.records import figure
from moeedge.run import Decision
from moeedge.scheduler.stopping import N_BINS, AcceptanceByConfidence, DraftStop, ExpectedGain, confidence_bin

FloatArray = NDArray[np.float64]

GAMMA_MAX = 16  # longer drafts are not considered
FIRST = (2, 0, 4)  # the lengths of the first steps; the first one is not measured
_FEW_STEPS = 16  # an estimate of fewer may be off by a factor


def gain_of_better(z: float) -> float:
    """E[max(z + X, 0)] - max(z, 0), X of the standard normal distribution; 0 beyond five deviations."""
    z = -abs(z)
    return 0.0 if z < -5 else z * math.erfc(-z / 2**0.5) / 2 + math.exp(-z * z / 2) / math.tau**0.5


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Times of a step in seconds, and its drafts."""

    n_drafted: int
    n_accepted: int
    others: Sequence[tuple[int, int]] = ()  # drafted and accepted tokens of each text that was decoded with it
    draft_s: float  # of drafting
    target_s: float  # of everything else
    loading_s: float = 0.0  # of `target_s`, that waited for experts from the file
    by_ngrams: bool = False  # n-grams drafted in place of the session's own source
    # of what the own source has computed, in order; those after `n_drafted` were left out. Empty: unknown
    confidences: list[float] = field(default_factory=list)
    # of the drafts that n-grams had, as many as there were tokens to compare them with, and how many were right
    ngram_confidences: list[float] = field(default_factory=list)
    ngram_accepted: int = 0

    @property
    def n_longest(self) -> int:
        """Drafted tokens of the text with the most."""
        return max(self.n_drafted, *(n for n, _ in self.others)) if self.others else self.n_drafted


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """The drafts of a step, and the reasons; speed-ups are over plain decoding, by estimate."""

    gamma: int = figure("Tokens to draft in the next step at most")
    gamma_max: int = figure("The most that may be chosen")
    best: int = figure("The length that is fastest by what steps have cost")
    source: Literal["draft", "ngram"] = figure(
        "Who drafts: the session's draft, or n-grams of the text", default="draft"
    )
    is_trial: bool = figure("Whether this length is tried out to learn its cost", default=False)
    ends_early: bool = figure("Whether a draft ends where another token does not pay", default=False)
    speed_up: float | None = figure("Speed with the best length over plain decoding's; null: unknown", default=None)
    other: int = figure("The length next to the best: where drafts are off, the best one with drafts", default=0)
    other_speed_up: float = figure("Speed with that length over that of plain decoding", default=1.0)
    n_measured: int = figure("Steps that the estimates are made of", default=0)

    @property
    def decision(self) -> Decision:
        """How long drafts are, or where they end, trials aside."""
        what, chosen = "draft length", f"{self.best} of {self.gamma_max}" if self.best else "off"
        if self.ends_early:
            what, chosen = "draft end", "where another token does not pay"
        if self.speed_up is None or self.n_measured < _FEW_STEPS:
            return Decision(what, chosen, basis="being measured")
        if self.best or self.ends_early:
            return Decision(what, chosen, self.speed_up, "plain decoding", "by estimate")
        return Decision(what, chosen, 1 / self.other_speed_up, f"drafts of {self.other}", "by estimate")


def token_counts(most: int) -> list[int]:
    """The t at which T_T(t) is estimated: each up to `GAMMA_MAX` + 1, then an eighth apart up to `most`."""
    counts = list(range(1, min(most, GAMMA_MAX + 1) + 1))
    while counts[-1] < most:
        counts.append(min(most, counts[-1] + counts[-1] // 8))
    return counts


class VerificationTime:
    """A Kalman filter of log T_T(t) at the t of `token_counts(most)`, n numbers.

    expert_ratio: distinct experts of t tokens over those of one.
    """

    _LEVEL = 3.0  # standard deviation of the level before the first measurement
    _EXPERT_SHARE = 0.5  # of a plain step, that loads experts: the prior
    _SLOPE, _BEND, _OWN = 0.3, 0.14, 0.06  # standard deviations of the shape: per log t, between neighbours, of each t
    _FORGET = 0.0005  # of the shape's prior variance, comes back with each step
    _LEVEL_GAIN = 0.15  # variance of the level's drift per step over that of a measurement
    _CLIP = 2.0  # standard deviations that a measurement may be off

    def __init__(self, most: int, expert_ratio: Callable[[int], float] = lambda t: 1.0) -> None:
        self._counts = token_counts(most)
        log_t = np.log(self._counts)
        prior = [speculation.verification_ratio(self._EXPERT_SHARE, expert_ratio(t)) for t in self._counts]
        self._mean = np.log(prior)
        self._shape_covariance = (
            self._SLOPE**2 * np.outer(log_t, log_t)
            + self._BEND**2 * np.minimum.outer(log_t, log_t)
            + self._OWN**2 * np.eye(len(log_t))
        )
        self._covariance = self._shape_covariance + self._LEVEL**2
        self._forgotten = self._FORGET * self._shape_covariance
        self._seconds: list[float] | None = None  # since the last change
        self.noise = 0.2**2  # relative variance of a measurement
        self.n_measured = 0

    def observe(self, n_tokens: int, seconds: float) -> None:
        """A verification of `n_tokens` took `seconds`."""
        i = self._index(n_tokens)
        self._seconds = None
        if self.n_measured == 0:
            self._mean += math.log(seconds) - self._mean[i]
        self.n_measured += 1
        self._covariance += self._forgotten + self._LEVEL_GAIN * self.noise
        row = self._covariance[i].copy()
        expected = row.item(i)
        variance = expected + self.noise
        # the mean of the logarithm is too low where times scatter
        surprise = math.log(seconds) + self.noise / 2 - self._mean.item(i)
        clip = self._CLIP * math.sqrt(variance)
        surprise = min(max(surprise, -clip), clip)
        self._mean += row * (surprise / variance)
        self._covariance -= np.multiply.outer(row, row) / variance
        self.noise = max(0.03**2, self.noise + 0.04 * (max(surprise**2 - expected, 0.0) - self.noise))

    def _index(self, n_tokens: int) -> int:
        return min(bisect_left(self._counts, n_tokens), len(self._counts) - 1)

    def scale(self, factor: float) -> None:
        """All of T_T(t) has changed by a known factor."""
        self._seconds = None
        self._mean += math.log(factor)

    def seconds(self, n_tokens: Iterable[int]) -> list[float]:
        """T_T(t) of each of `n_tokens`; never less for more tokens."""
        if self._seconds is None:
            self._seconds = list(accumulate(np.exp(self._mean).tolist(), max))
        return [self._seconds[self._index(t)] for t in n_tokens]

    def relative_variance(self, n_tokens: Iterable[int], other: int) -> list[float]:
        """Variance of log T_T(t) - log T_T(other) of each of `n_tokens`."""
        j = self._index(other)
        diagonal, row = self._covariance.diagonal().tolist(), self._covariance[j].tolist()
        return [max(diagonal[i] + diagonal[j] - 2 * row[i], 0.0) for i in map(self._index, n_tokens)]


class TrialCredit:
    """Seconds that trials may cost: a share of the time, `first` steps at the beginning, at most `most` at once."""

    _SHARE = 0.02

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self.seconds: float | None = None  # before the first step there is none

    def earn(self, spent_s: float, step_s: float) -> None:
        """Steps have taken `spent_s`; a step takes `step_s`."""
        before = self._first * step_s if self.seconds is None else self.seconds
        self.seconds = min(self._most * step_s, before + self._SHARE * spent_s)

    def pay(self, cost_s: float) -> None:
        if self.seconds is not None:
            self.seconds -= cost_s

    def allows(self, cost_s: float) -> bool:
        return self.seconds is not None and cost_s <= max(self.seconds, 0.0)


class AcceptanceByPosition:
    """The chance of each draft, after all before it were accepted: by position, drawn towards that of all positions.

    Without drafts the estimate returns to the chance of all drafts so far, before any to `_PRIOR`.
    """

    _FORGET = 0.015  # of the counts' weight, with each text's step
    _FORGET_ALL = 0.001  # of what all drafts of the session were
    _PRIOR = 0.8
    _PRIOR_WEIGHT = 8.0  # verdicts
    _POSITION_WEIGHT = 20.0  # verdicts of a position that count as much as all positions together

    def __init__(self, n_positions: int) -> None:
        self._judged = [0.0] * n_positions
        self._accepted = [0.0] * n_positions
        self._tokens: list[float] | None = None  # since the last step
        self._n_judged = self._PRIOR_WEIGHT  # of all drafts so far
        self._n_accepted = self._PRIOR * self._PRIOR_WEIGHT

    def observe(self, n_drafted: int, n_accepted: int, left_out: float | None = None) -> None:
        """The first `n_accepted` of the drafts were accepted; those after the first rejected one say nothing.

        left_out: the chance of a draft that was not verified, by which it counts: verified ones have better chances.
        """
        weight, n_judged = 1 - self._FORGET, min(n_accepted + 1, n_drafted)
        self._tokens = None
        self._judged = [n * weight + (i < n_judged) for i, n in enumerate(self._judged)]
        self._accepted = [n * weight + (i < n_accepted) for i, n in enumerate(self._accepted)]
        self._n_judged = (1 - self._FORGET_ALL) * self._n_judged + n_judged
        self._n_accepted = (1 - self._FORGET_ALL) * self._n_accepted + n_accepted
        if left_out is not None and n_accepted == n_drafted:
            self._judged[n_drafted] += 1
            self._accepted[n_drafted] += left_out

    def tokens(self) -> list[float]:
        """N(gamma), gamma = 0..n_positions."""
        if self._tokens is None:
            self._tokens = self.raised_tokens(0.0)
        return self._tokens

    def raised_tokens(self, n_deviations: float) -> list[float]:
        """`tokens` with chances that are so many standard deviations higher."""
        n_judged = sum(self._judged) + self._PRIOR_WEIGHT
        chance = (sum(self._accepted) + self._n_accepted / self._n_judged * self._PRIOR_WEIGHT) / n_judged
        chance = min(1.0, chance + n_deviations * math.sqrt(chance * (1 - chance) / n_judged))
        prior = self._POSITION_WEIGHT * chance
        by_position = [
            (accepted + prior) / (judged + self._POSITION_WEIGHT)
            for accepted, judged in zip(self._accepted, self._judged, strict=True)
        ]
        return speculation.expected_tokens_by_position(by_position)


class DraftGovernor:
    """Chooses the drafts of each step; `observe` every step afterwards. A pure function of these calls.

    The session's own source is a draft model, a head of the target, or n-grams. Next to a model, n-grams of the text
    may draft instead in single steps; whether they would have been right is known after each step at no cost.

    gamma_max: the longest draft, at least 1. own_max: that of the session's own source, where n-grams may draft more.
    n_experts, n_used: of a MoE layer, per token; 0 experts for a dense model. n_texts: that are decoded together, at
    most. stop: ends the draft of the step that was chosen last, unless it has a fixed length.
    """

    _TRIAL_DISTANCE = 1  # steps at the best length between two trials
    _TRIAL_CREDIT = 2.0  # plain steps, that they may cost at first, and at once
    _HORIZON = 35  # steps in which what a trial tells is of use
    _N_TRIALS = (1, 2, 4, 8)  # of a length, that are considered at once
    _HYSTERESIS = 0.01  # by which another length must be better, for a change
    _SHARING = 0.7  # neighbouring tokens share more experts than independent ones: an exponent of their number
    _DRAFT_SHARE = 0.1  # T_D over T_T(1), before any draft
    _NGRAM_PRIOR = 0.3  # chance of a draft by n-grams, before any was compared
    _NGRAM_FORGET = 0.03  # of the counts of n-grams, with each step: they cost nothing to learn anew
    _BENEFIT = 0.5  # standard deviations by which drafts of little known confidences may be better than known
    _LOADING_GAIN = 0.25  # of the waits for experts: they change from step to step
    _LOOKS_FORGET = 0.05  # of the counts of the first draft's confidence, with each step that has one

    def __init__(
        self,
        gamma_max: int = GAMMA_MAX,
        *,
        own_max: int | None = None,
        n_experts: int = 0,
        n_used: int = 0,
        n_texts: int = 1,
    ) -> None:
        self.gamma_max = min(gamma_max, GAMMA_MAX)
        self._own_max = self.gamma_max if own_max is None else min(own_max, self.gamma_max)
        self._experts = n_experts, n_used
        self._target = VerificationTime(n_texts * (self.gamma_max + 1), self._expert_ratio)  # without waits for experts
        self._n_texts = 0  # of the next step
        self._set_texts(1)
        self._loading_s = 0.0  # that a plain step waits for experts
        self._acceptance = AcceptanceByPosition(self.gamma_max)
        self._by_confidence = AcceptanceByConfidence()
        self._by_ngram = AcceptanceByConfidence([self._NGRAM_PRIOR] * N_BINS, forget=self._NGRAM_FORGET)
        self._looks = [0.0] * N_BINS  # first drafts by confidence
        self._passes: dict[int, tuple[int, float]] = {}  # measurements of T_D, and T_D, by the number of texts
        self._n_steps = 0
        self._n_since_trial = 0
        self._best = min(FIRST[0], self._own_max)
        self._credit = TrialCredit(self._TRIAL_CREDIT, self._TRIAL_CREDIT)
        self._skips = True  # the next step's times say nothing
        self._drafted_last = True
        self.stop = DraftStop()
        self.choice = DraftChoice(gamma=self._best, gamma_max=self.gamma_max, best=self._best)

    def begin_answer(self) -> None:
        """A prompt was decoded; the step after it is not measured."""
        self._skips = True
        self._drafted_last = True  # the draft model has decoded the prompt as well

    def _expert_ratio(self, n_tokens: int) -> float:
        """Distinct experts of so many tokens over those of one."""
        n_experts, n_used = self._experts
        return (speculation.uniform_unique(n_experts, n_used, n_tokens) / n_used) ** self._SHARING if n_experts else 1.0

    def _set_texts(self, n_texts: int) -> None:
        """So many texts are decoded together in the next step."""
        if n_texts != self._n_texts:
            self._n_texts = n_texts
            self._tokens = [n_texts * (gamma + 1) for gamma in range(self.gamma_max + 1)]  # of a step, by gamma
            self._ratios = [self._expert_ratio(n_tokens) for n_tokens in self._tokens]
            self._steps_s: list[float] | None = None  # since the last step

    def choose(self, ngram: float | None = None, n_texts: int = 1) -> DraftChoice:
        """The drafts of the next step. ngram: the confidence of n-grams, where they may draft instead of a model."""
        self.stop = DraftStop()
        self._set_texts(n_texts)
        if self._n_steps < len(FIRST):
            gamma = min(FIRST[self._n_steps], self._own_max)
            self.choice = DraftChoice(gamma=gamma, gamma_max=self.gamma_max, best=gamma)
            return self.choice
        rate, variances = self._rates()
        best = rate.index(max(rate))
        if rate[best] > (1 + self._HYSTERESIS) * rate[self._best]:
            self._best = best
        self.choice = self._by_gain(rate, ngram)
        trial = self._trial(rate, variances, rate[0] * (self.choice.speed_up or 1.0))
        if trial != self._best:
            self.stop = DraftStop()
            self.choice = replace(self.choice, gamma=trial, source="draft", is_trial=True)
        return self.choice

    def _by_gain(self, rate: Sequence[float], ngram: float | None) -> DraftChoice:
        """The drafts of a step that is no trial: by the source with the larger gain, to the length that pays."""
        best_rate, step_s, tokens = rate[self._best], self._step_s(), self._drafted(self._acceptance.tokens())
        other = 0 if self._best else rate.index(max(rate[1:]), 1)
        choice = DraftChoice(
            gamma=self._best,
            gamma_max=self.gamma_max,
            best=self._best,
            speed_up=best_rate / rate[0],
            other=other,
            other_speed_up=rate[other] / rate[0],
            n_measured=self._target.n_measured,
        )
        limit = min(self.gamma_max, 2 * self._best + 4)  # not far beyond what was measured
        n = limit + 1
        gain = ExpectedGain([best_rate * s for s in step_s[:n]], best_rate * self._pass_s(step_s), tokens[:n])
        own = tokens[self._best] - 1 - best_rate * (step_s[self._best] - step_s[0])  # of the fixed length
        # without a fixed length that pays, plain steps must go on: they tell what a draft has to beat
        if self._best and any(self._looks) and self._n_texts == 1:
            n_looks = sum(self._looks)
            looking = gain.of_looking(self._by_confidence.chances(), [n / n_looks for n in self._looks])
            if looking > own:
                more = (looking - own) / (best_rate * step_s[max(self._best, 1)])
                choice = replace(choice, gamma=limit, ends_early=True, speed_up=best_rate / rate[0] * (1 + more))
                self.stop, own = DraftStop(gain, self._by_confidence.chances(self._BENEFIT)), looking
        if ngram is not None:
            length, by_ngrams = gain.of_equals(self._by_ngram.chance(confidence_bin(ngram)))
            if by_ngrams > own:
                self.stop = DraftStop()
                return replace(choice, gamma=length, source="ngram")
        return choice

    def observe(self, step: StepCost) -> None:
        """The step after `choose`; it may have fewer drafts than chosen."""
        n_drafted = step.n_drafted
        self._n_steps += 1
        self._n_since_trial = 0 if self.choice.is_trial else self._n_since_trial + 1
        if step.ngram_confidences:
            self._by_ngram.observe(step.ngram_confidences, step.ngram_accepted)
        n_computed = 0 if step.by_ngrams else max(step.n_longest, len(step.confidences))
        self._learn_acceptance(step)
        skips, self._skips = self._skips, False
        caught_up, self._drafted_last = not self._drafted_last, n_computed > 0
        if skips or step.target_s <= 0:
            return
        self._pay(step)
        self._steps_s = None
        n_tokens = sum((n + 1 for n, _ in step.others), n_drafted + 1)
        self._target.observe(n_tokens, max(step.target_s - step.loading_s, 0.01 * step.target_s))
        loading_s = step.loading_s / self._expert_ratio(n_tokens)
        self._loading_s += (loading_s - self._loading_s) * max(self._LOADING_GAIN, 1 / self._target.n_measured)
        if n_computed:
            n, draft_s = self._passes.get(self._n_texts, (0, 0.0))
            seconds = step.draft_s / n_computed
            if n:  # after plain steps the draft model first decodes what it has missed
                seconds = min(seconds, draft_s if caught_up else 3 * draft_s)
            n = min(n + 1, 30)
            self._passes[self._n_texts] = n, draft_s + (seconds - draft_s) / n

    def _learn_acceptance(self, step: StepCost) -> None:
        """Takes in the verdicts on the session's own source."""
        if step.by_ngrams:
            self._acceptance.observe(0, 0)
            return
        left_out = None
        if step.confidences:
            if len(step.confidences) > step.n_drafted:
                left_out = self._by_confidence.chance(confidence_bin(step.confidences[step.n_drafted]))
            self._by_confidence.observe(step.confidences[: step.n_drafted], step.n_accepted)
            self._looks = [n * (1 - self._LOOKS_FORGET) for n in self._looks]
            self._looks[confidence_bin(step.confidences[0])] += 1
        self._acceptance.observe(step.n_drafted, step.n_accepted, left_out)
        for n_drafted, n_accepted in step.others:
            if n_drafted:  # a plain step is forgotten once, however many texts it has
                self._acceptance.observe(n_drafted, n_accepted)

    def _drafted(self, tokens: Sequence[float]) -> list[float]:
        """N(gamma) of the session's own source, [gamma_max + 1]: no more where it drafts no more."""
        n = self._own_max + 1
        return [*tokens[:n], *[tokens[self._own_max]] * (len(tokens) - n)]

    def _step_s(self) -> list[float]:
        """Seconds of a step with gamma = 0..gamma_max drafts."""
        if self._steps_s is None:
            target_s = self._target.seconds(self._tokens)
            pass_s = self._pass_s(target_s)
            self._steps_s = [
                seconds + pass_s * gamma + self._loading_s * ratio
                for gamma, (seconds, ratio) in enumerate(zip(target_s, self._ratios, strict=True))
            ]
        return self._steps_s

    def _pass_s(self, step_s: Sequence[float]) -> float:
        """T_D; step_s: of a plain step is its first element."""
        return self._passes[self._n_texts][1] if self._n_texts in self._passes else self._DRAFT_SHARE * step_s[0]

    def _rates(self) -> tuple[list[float], list[float]]:
        """Tokens per second by gamma, [gamma_max + 1], and the variance of its log relative to that of `_best`."""
        tokens, step_s, best = self._drafted(self._acceptance.tokens()), self._step_s(), self._best
        variance = self._target.relative_variance(self._tokens, self._tokens[best])
        for gamma, (target_s, seconds) in enumerate(zip(self._target.seconds(self._tokens), step_s, strict=True)):
            variance[gamma] *= (target_s / seconds) ** 2
        raised = self._drafted(self._acceptance.raised_tokens(1.0))
        of_best = math.log(raised[best] / tokens[best])
        for gamma in range(best + 1, len(tokens)):  # the drafts of the best length tell shorter ones as well
            variance[gamma] += (math.log(raised[gamma] / tokens[gamma]) - of_best) ** 2
        return [n / seconds for n, seconds in zip(tokens, step_s, strict=True)], variance

    def _trial(self, rate: Sequence[float], variances: Sequence[float], now_rate: float) -> int:
        """The length of the next step: the best, or one whose trial is worth what it is expected to cost.

        k trials move the estimate of a length's advantage by a known deviation. The expected gain of the better of the
        two counts for `_HORIZON` steps (the knowledge gradient of Frazier, Powell and Dayanik 2008, of k measurements
        at once). now_rate: tokens per second of the step without a trial.
        """
        if self._n_since_trial < self._TRIAL_DISTANCE:
            return self._best
        length, most = self._best, 0.0
        unit_s = self._step_s()[self._best]
        for gamma in range(min(2 * self._best + 4, self._own_max + 1)):  # not far beyond what was measured
            if gamma == self._best:
                continue
            cost_s = self._trial_cost_s(gamma, now_rate)
            if gamma and not self._credit.allows(cost_s):
                continue
            cost, variance = cost_s / unit_s, max(variances[gamma], 1e-9)
            # what k trials may be worth grows with the deviation and is largest at an advantage of 0
            if self._HORIZON * math.sqrt(variance / math.tau) <= cost + most:
                continue
            advantage = math.log(rate[gamma] / now_rate)
            for k in self._N_TRIALS:
                deviation = math.sqrt(variance * k * variance / (k * variance + self._target.noise))
                worth = self._HORIZON * deviation * gain_of_better(advantage / deviation) / k - cost
                if worth > most:
                    length, most = gamma, worth
        return length

    def _trial_cost_s(self, gamma: int, best_rate: float) -> float:
        """Seconds that a step of a length is expected to take longer than its tokens at the best rate."""
        return max(self._step_s()[gamma] - self._drafted(self._acceptance.tokens())[gamma] / best_rate, 0.0)

    def _pay(self, step: StepCost) -> None:
        """Adds the step's share to the credit for trials; of a trial takes off what it has cost more than it gave."""
        if self._target.n_measured == 0:
            return
        step_s = self._step_s()
        if self.choice.is_trial:
            best_rate = self._drafted(self._acceptance.tokens())[self._best] / step_s[self._best]
            self._credit.pay(self._trial_cost_s(step.n_longest, best_rate))
        self._credit.earn(step.draft_s + step.target_s, step_s[0])
