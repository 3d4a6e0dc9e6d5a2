"""Whether steps are faster with the expert cache than without it, by what they have taken.

Recent steps give T(t), the seconds of a step that verifies t tokens (`governor.VerificationTime`). Now and then a few
steps in a row are computed the other way. Their seconds over T(t) measure the logarithm of the time without the cache
over the time with it; its variance grows with every step, since the text and what the cache holds change. The cache
goes off where that number is below zero beyond doubt, and on again likewise. Trials are paid from a credit, as those of
draft lengths are (`governor.DraftGovernor`). A trial of the cache begins with unmeasured steps, in which it fills.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moeedge.records import figure
from moeedge.run import Decision
from moeedge.scheduler.governor import GAMMA_MAX, TrialCredit, VerificationTime

_N_WARM = 32  # steps before the first trial, in which the cache fills
_N_MEASURED = 5  # steps of a trial
_N_SKIPPED = {False: 1, True: 8}  # steps at the beginning of a trial without and with the cache
_FIRST_CREDIT, _MOST_CREDIT = 4.0, 16.0  # steps, that trials may cost at first, and at once
_GIVE_UP = 0.5  # logarithm of a time ratio at which a trial ends early
_MARGIN = 0.02  # logarithm of a time ratio that matters
_CONFIDENCE = 1.0  # standard deviations for a change
_HOPE = 0.8  # standard deviations for a trial
_DRIFT = 0.0002  # variance that the logarithm gains per step
_DRIFT_OF_TEXT = 0.1  # the same where another text begins


@dataclass(frozen=True, kw_only=True)
class CacheChoice:
    """How the next step is computed."""

    on: bool = figure("Whether the next step is computed with the cache", default=True)
    is_trial: bool = figure("Whether that is a trial", default=False)
    pays: bool = figure("Whether steps are faster with it, trials aside", default=True)
    gain: float | None = figure("Speed with the cache over that without; null: being measured", default=None)

    @property
    def decision(self) -> Decision:
        """Whether the cache is on, trials aside."""
        why = "" if self.pays else "tried again from time to time"
        return Decision.switch("expert cache", self.pays, self.gain, "measured" if self.gain else "being measured", why)


class CacheGovernor:
    """Decides for each step; `observe` every step afterwards. A pure function of these calls.

    n_texts: that are decoded together, at most.
    """

    def __init__(self, n_texts: int = 1) -> None:
        self._time = VerificationTime(n_texts * (GAMMA_MAX + 1))  # as decided, with the cache or without it
        self._pays = True
        self._log_gain = 0.0
        self._variance = math.inf
        self._n_steps = 0
        self._n_trial = 0  # steps of the trial in progress, 0: there is none
        self._trial_sum = 0.0  # of the logarithms of its measured steps' times over those expected
        self._trial_cost_s = 0.0
        self._credit = TrialCredit(_FIRST_CREDIT, _MOST_CREDIT)
        self._skips = True  # the next step is not measured: it follows a prompt or a change

    @property
    def choice(self) -> CacheChoice:
        is_trial, gain = self._n_trial > 0, None if math.isinf(self._variance) else math.exp(self._log_gain)
        return CacheChoice(on=self._pays != is_trial, is_trial=is_trial, pays=self._pays, gain=gain)

    def begin_answer(self) -> None:
        """A prompt was decoded; the step after it is not measured."""
        self._skips = True

    def begin_text(self) -> None:
        """Another text begins: what was measured counts less."""
        self._variance += _DRIFT_OF_TEXT

    def observe(self, n_tokens: int, seconds: float) -> None:
        """The step verified `n_tokens` in `seconds`."""
        self._n_steps += 1
        self._variance += _DRIFT
        skips, self._skips = self._skips, False
        if skips or seconds <= 0:
            return
        if self._n_trial:
            self._observe_trial(seconds, *self._time.seconds([n_tokens]))
            return
        self._time.observe(n_tokens, seconds)
        [step_s] = self._time.seconds([n_tokens])
        self._credit.earn(seconds, step_s)
        self._n_trial = int(self._is_due(step_s))

    def _is_due(self, step_s: float) -> bool:
        """Whether a trial can be paid and may change the decision."""
        if self._n_steps < _N_WARM:
            return False
        if math.isinf(self._variance):
            return True
        loss = self._log_gain if self._pays else -self._log_gain  # of the other way
        cost_s = (_N_SKIPPED[not self._pays] + _N_MEASURED) * step_s * max(math.expm1(loss), 0.0)
        return _HOPE * math.sqrt(self._variance) - loss > _MARGIN and self._credit.allows(cost_s)

    def _observe_trial(self, seconds: float, expected_s: float) -> None:
        self._trial_cost_s += seconds - expected_s
        n_measured = self._n_trial - _N_SKIPPED[not self._pays]
        self._n_trial += 1
        if n_measured <= 0:
            return
        self._trial_sum += math.log(seconds / expected_s)
        loss = self._trial_sum / n_measured
        if n_measured < _N_MEASURED and not (n_measured >= 2 and loss > _GIVE_UP):
            return
        # the trial ends: the other way took exp(loss) times as long
        variance = self._time.noise * (1 / n_measured + 0.3)  # 0.3: of what was expected
        weight = 1.0 if math.isinf(self._variance) else self._variance / (self._variance + variance)
        self._log_gain += weight * ((loss if self._pays else -loss) - self._log_gain)
        self._variance = variance if math.isinf(self._variance) else self._variance * (1 - weight)
        self._credit.pay(self._trial_cost_s)
        self._n_trial, self._trial_sum, self._trial_cost_s = 0, 0.0, 0.0
        self._skips = True
        advantage = -self._log_gain if self._pays else self._log_gain  # of the other way
        if advantage - _CONFIDENCE * math.sqrt(self._variance) > _MARGIN:
            self._pays = not self._pays
            self._time.scale(math.exp(-advantage))
