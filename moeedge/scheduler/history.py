"""How often every expert will be used per token, foretold from how often it was (pure NumPy).

Three histories are kept per expert, all in activations per token: the last step's, and two decayed ones with a short
and a long memory. How they are best mixed differs from text to text (how much of a refused draft returns in the next
batch decides it), so the mix is fitted while the model runs: ridge regression of each step's rates on the histories
before it, over all layers and experts at once, with old steps forgotten and a pull towards a fixed mix.

Arrays are flat over layers and experts, n = n_layers * n_experts, float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

# Chosen on the gpt-oss-20b trace, optimistic and pessimistic tails (tests/policies/test_comparison.py): memories of
# about 3 and 20 steps. One average with beta 0.7 gives pair-hits of 0.559 and 0.506, this mix 0.585 and 0.508.
DECAYS = (0.0, 0.7, 0.95)
_FIRST_MIX = (0.2, 0.4, 0.4)
_FORGET = 0.98  # per step: the fit remembers about 50 steps
_RIDGE = 0.01  # of the mean square of a history
_STEP_TOKENS = 8.0  # a prefill of so many tokens weighs as one step, a longer one as more
_STEPS_MAX = 8.0


class History:
    """Predicts `rate`, [n] activations per token; `observe` it after every step."""

    def __init__(self, n: int, *, fitted: bool = True) -> None:
        self._fitted = fitted  # False: the mix stays as it is at the start
        self.rate: FloatArray = np.zeros(n, dtype=np.float32)
        self._past: FloatArray = np.zeros((len(DECAYS), n), dtype=np.float32)
        self._now: FloatArray = np.zeros(n, dtype=np.float32)
        self._work: FloatArray = np.zeros((len(DECAYS), n), dtype=np.float32)
        self._filled = np.zeros(len(DECAYS))  # weight of what was seen: 1 once an average has forgotten its start
        self._gram = np.zeros((len(DECAYS), len(DECAYS)))
        self._answer = np.zeros(len(DECAYS))
        self.mix = np.array(_FIRST_MIX)

    def reset(self) -> None:
        """A new text: what was used lately says little now. The long memory and the mix stay."""
        self._filled[:-1] = 0.0
        self._filled[-1] *= 0.5

    def observe(self, counts: NDArray[Any], n_tokens: int, *, prefill: bool) -> None:
        """Takes in the activations [n] of a step of `n_tokens` tokens."""
        if n_tokens < 1:
            return
        now, past = self._now, self._past
        np.multiply(counts, 1.0 / n_tokens, out=now, casting="unsafe")
        if self._fitted and not prefill and self._filled[-1] > 0.0:
            self._fit(now)
        n_steps = min(max(n_tokens / _STEP_TOKENS, 1.0), _STEPS_MAX) if prefill else 1.0
        kept = np.power(DECAYS, n_steps)
        self._filled = kept * self._filled + (1.0 - kept)
        share = ((1.0 - kept) / self._filled).astype(np.float32)  # the first step counts in full
        np.subtract(now, past, out=self._work)
        self._work *= share[:, None]
        past += self._work
        np.dot(self.mix.astype(np.float32), past, out=self.rate)
        np.maximum(self.rate, 0.0, out=self.rate)

    def _fit(self, now: FloatArray) -> None:
        """One step of the regression: which mix of the histories would have foretold `now`."""
        past = self._past
        self._gram *= _FORGET
        self._gram += past @ past.T
        self._answer *= _FORGET
        self._answer += past @ now
        pull = _RIDGE * float(np.trace(self._gram)) / len(DECAYS) + 1e-12
        left = self._gram.copy()
        left.flat[:: len(DECAYS) + 1] += pull
        self.mix = np.linalg.solve(left, self._answer + pull * np.array(_FIRST_MIX))
