"""When a draft ends: where the next draft token is expected to bring less than it costs.

A draft comes with a confidence, known before it is drawn: of a draft model the share of its most likely token, of
n-grams the part of the longest n-gram that was found. How often drafts of a confidence are accepted is counted from the
verifications, in a few bins. With lambda, the tokens per second that steps give anyway, a longer draft pays iff

  expected further tokens > lambda * expected further seconds

(renewal reward: the most tokens per second). Whether a draft is kept depends on its distribution and on earlier drafts,
never on the token that is drawn from it, and what is drawn is verified: rejection sampling stays exact.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import mul

N_BINS = 7  # of confidence
_EDGES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
_BELIEVED = (0.2, 0.4, 0.6, 0.78, 0.9, 0.97, 0.99)  # chances of drafts that are accepted as often as they should be


def confidence_bin(confidence: float) -> int:
    """The index of the bin that a confidence from 0 to 1 belongs to."""
    return bisect_right(_EDGES, confidence)


class AcceptanceByConfidence:
    """The chance of a draft, after all before it were accepted, by its confidence.

    Counts lose the share `forget` of their weight with each step. prior: the chance of each bin before any verdict,
    [N_BINS]; by default confidences are believed.
    """

    _PRIOR_WEIGHT = 4.0  # verdicts

    def __init__(self, prior: Sequence[float] = _BELIEVED, *, forget: float = 0.005) -> None:
        self._prior = prior
        self._forget = forget
        self._judged = [0.0] * N_BINS
        self._accepted = [0.0] * N_BINS

    def observe(self, confidences: list[float], n_accepted: int) -> None:
        """Of drafts with these confidences, in order, the first `n_accepted` were accepted, and the next was not."""
        weight = 1 - self._forget
        self._judged = [n * weight for n in self._judged]
        self._accepted = [n * weight for n in self._accepted]
        for i, confidence in enumerate(confidences[: n_accepted + 1]):
            where = confidence_bin(confidence)
            self._judged[where] += 1
            self._accepted[where] += i < n_accepted

    def chances(self, n_deviations: float = 0.0) -> list[float]:
        """By bin, [N_BINS]; so many standard deviations higher where few verdicts are known."""
        return [self.chance(where, n_deviations) for where in range(N_BINS)]

    def chance(self, where: int, n_deviations: float = 0.0) -> float:
        """The chance of one bin's drafts, as in `chances`."""
        n_judged = self._judged[where] + self._PRIOR_WEIGHT
        chance = (self._accepted[where] + self._PRIOR_WEIGHT * self._prior[where]) / n_judged
        return min(chance + n_deviations * math.sqrt(chance * (1 - chance) / n_judged), 1.0)


class ExpectedGain:
    """Tokens that a step is expected to give beyond a plain one, by the length and the chances of its drafts.

    Seconds count as the tokens that they give anyway. step_tokens: lambda * seconds of a step with 0, 1, ..., n drafts.
    pass_tokens: the part of one draft in them, lambda * T_D. tokens: N(0), ..., N(n) of drafts of unknown confidence.
    """

    def __init__(self, step_tokens: Sequence[float], pass_tokens: float, tokens: Sequence[float]) -> None:
        self._step, self._pass, self._tokens = step_tokens, pass_tokens, tokens
        # chance that the first i drafts are accepted
        self._reached = [max(more - less, 1e-12) for less, more in zip((0.0, *tokens), tokens, strict=False)]

    def of_more(self, n_kept: int, chance: float) -> float:
        """The gain of the best number of further drafts, at least one, after `n_kept` that are accepted by `chance`."""
        if n_kept + 1 >= len(self._step):
            return -math.inf
        tokens, step, share = self._tokens[n_kept], self._step[n_kept], chance / self._reached[n_kept]
        further = zip(self._tokens[n_kept + 1 :], self._step[n_kept + 1 :], strict=True)
        return max([(more - tokens) * share - (cost - step) for more, cost in further])

    def of_next(self, n_kept: int, chance: float) -> float:
        """The gain of keeping the next draft, computed already; `chance` that it and all before are accepted."""
        own = chance - (self._step[n_kept + 1] - self._step[n_kept]) + self._pass
        return own + max(self.of_more(n_kept + 1, chance), 0.0)

    def of_looking(self, chances: Sequence[float], frequency: Sequence[float]) -> float:
        """The gain of computing the first draft, to keep it where that pays; both by bin of confidence, [N_BINS]."""
        by_bin = zip(chances, frequency, strict=True)
        return sum([share * max(self.of_next(0, chance), 0.0) for chance, share in by_bin if share]) - self._pass

    def of_equals(self, chance: float) -> tuple[int, float]:
        """The best number of drafts that are accepted by `chance` each and cost no time to make, and their gain."""
        tokens = accumulate(accumulate(repeat(chance, len(self._step) - 1), mul))
        plain = self._step[0]
        gains = [
            more - (cost - plain - self._pass * n)
            for n, (more, cost) in enumerate(zip(tokens, self._step[1:], strict=True), start=1)
        ]
        best = max(gains)
        return gains.index(best) + 1, best


class DraftStop:
    """Ends the draft of one step: a source asks `keeps` before it draws a token, and `goes_on` after it.

    gain: of the step; None: the draft has a fixed length. chances: of a draft by the bin of its confidence, [N_BINS].
    minimum: confidence below which a draft ends in any case (--draft-p-min).
    """

    def __init__(self, gain: ExpectedGain | None = None, chances: Sequence[float] | None = None) -> None:
        self._gain = gain
        self._chances = [1.0] * N_BINS if chances is None else chances
        self.minimum = 0.0
        self._n_kept = 0
        self._chance = 1.0  # that all that were kept are accepted

    def keeps(self, confidence: float) -> bool:
        """Whether the next draft, of this confidence, is drawn; otherwise those before it are all."""
        if confidence < self.minimum:
            return False
        if self._gain is None:
            return True
        chance = self._chance * self._chances[confidence_bin(confidence)]
        if self._gain.of_next(self._n_kept, chance) <= 0:
            return False
        self._n_kept, self._chance = self._n_kept + 1, chance
        return True

    def goes_on(self) -> bool:
        """Whether another draft is computed after the one that was kept last."""
        return self._gain is None or self._gain.of_more(self._n_kept, self._chance) > 0
