"""How often every expert will be used per token, foretold from how often it was (pure NumPy).

Four histories are kept per expert, all in activations per token: of the last step, of the drafts that the last step
refused (how much of a refused draft returns in the next one differs from pair to pair), and two decayed ones with a
short and a long memory. Their best mix differs from text to text, so it is fitted while the model runs: ridge
regression of each step's rates on the histories before it, over all layers and experts at once, with old steps
forgotten, a pull towards a fixed mix, and no negative parts.

Arrays are flat over layers and experts, n = n_layers * n_experts, float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

# Chosen on the gpt-oss-20b trace, optimistic and pessimistic tails: memories of about 3 and 20 steps. One average with
# beta 0.7 gives pair-hits of 0.559 and 0.506 at 5 of 32, the fitted mix 0.598 and 0.508; ridge and forgetting hardly
# matter between 0.1 and 0.0001, 0.9 and 1.
_REFUSED, _SHORT, _LONG = 1, 2, 3  # rows of the histories; 0 is the last step
_DECAYS = np.array([0.0, 0.0, 0.7, 0.95])
_FIRST_MIX = np.array([0.2, 0.0, 0.4, 0.4])
_FORGET = 0.98  # per step: the fit remembers about 50 steps
_RIDGE = 0.01  # of the mean square of a history
_N = len(_DECAYS)


class History:
    """Predicts `rate`, [n] activations per token; `observe` it after every step."""

    def __init__(self, n: int, *, fitted: bool = True) -> None:
        self._fitted = fitted  # False: the mix stays as it is at the start
        self.rate: FloatArray = np.zeros(n, dtype=np.float32)
        self._past: FloatArray = np.zeros((_N, n), dtype=np.float32)
        self._change: FloatArray = np.zeros((2, n), dtype=np.float32)
        self._filled = np.zeros(2)  # weight of what the decayed ones saw: 1 once they have forgotten their start
        self._gram = np.zeros((_N, _N))
        self._answer = np.zeros(_N)
        self.mix = _FIRST_MIX.copy()

    def reset(self) -> None:
        """A new text: what was used lately says little now. The long memory and the mix stay."""
        self._filled[0] = 0.0
        self._filled[1] *= 0.5

    def observe(
        self, counts: NDArray[Any], n_tokens: int, refused: NDArray[Any] | None = None, *, fit: bool = True
    ) -> None:
        """Takes in the activations [n] of a step of `n_tokens` tokens, and of its refused drafts.

        fit: the step is one of those that are to be foretold (a prefill is not).
        """
        past = self._past
        scale = np.float32(1.0 / n_tokens)
        # the last step's own row is not needed before it is overwritten, except by the fit
        now = np.multiply(counts, scale, out=self._change[0], casting="unsafe")
        if fit and self._fitted and self._filled[1] > 0.0:
            self._fit(now)
        past[0] = now
        if refused is None:
            past[_REFUSED] = 0.0
        else:
            np.multiply(refused, scale, out=past[_REFUSED], casting="unsafe")
        kept = _DECAYS[_SHORT:]
        self._filled = kept * self._filled + (1.0 - kept)
        share = ((1.0 - kept) / self._filled).astype(np.float32)  # the first step counts in full
        change = np.subtract(past[0], past[_SHORT:], out=self._change)
        change *= share[:, None]
        past[_SHORT:] += change
        np.dot(self.mix.astype(np.float32), past, out=self.rate)

    def _fit(self, now: FloatArray) -> None:
        """One step of the regression: which mix of the histories would have foretold `now`."""
        past = self._past
        self._gram *= _FORGET
        self._gram += past @ past.T
        self._answer *= _FORGET
        self._answer += past @ now
        pull = _RIDGE * float(np.trace(self._gram)) / _N + 1e-12
        left = self._gram.copy()
        left.flat[:: _N + 1] += pull
        right = self._answer + pull * _FIRST_MIX
        mix = np.linalg.solve(left, right)
        if mix.min() < 0.0:  # without the negative ones, the rest anew
            kept = mix > 0.0
            mix[~kept] = 0.0
            mix[kept] = np.maximum(np.linalg.solve(left[np.ix_(kept, kept)], right[kept]), 0.0)
        self.mix = mix
