"""Activation rates of experts, predicted from exponentially decayed counts (pure NumPy).

Four averages are kept per expert, in activations per token: of the last step, of the drafts that the last step rejected
(how many of a rejected draft's experts return with the next one differs from pair to pair), and two decayed ones with a
short and a long memory. Their best mix differs from text to text, so it is fitted while the model runs: ridge
regression of each step's rates on the averages before it, over all layers and experts at once, with old steps
forgotten, a pull towards a fixed mix and no negative weights.

No product of arrays uses BLAS, here and in token_experts.py: it would spread those of 9,216 elements and more over
threads and wait for cores that the model is computing on, 50 microseconds for a sum of 5.

Arrays are flat over layers and experts, n = n_layers * n_experts, float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import FloatArray

# Chosen on the gpt-oss-20b trace with both models of rejected tokens: memories of about 3 and 20 steps. One average
# with beta 0.7 has pair-hits of 0.559 and 0.506 at 5 of 32, the fitted mix 0.598 and 0.508; ridge and forgetting hardly
# matter between 0.1 and 0.0001, 0.9 and 1.
_REJECTED, _SHORT, _LONG = 1, 2, 3  # rows of the averages; 0 is the last step
_KEPT = (0.7, 0.95)  # of the two decayed averages, per step
_INITIAL_MIX = np.array([0.2, 0.0, 0.4, 0.4])
_FORGET = 0.98  # per step: the fit remembers about 50 steps
_RIDGE = 0.01  # of the mean square of an average
_PARTS = 4  # of the experts; each fit reads one
_N = len(_INITIAL_MIX)
_IDENTITY = np.eye(_N)


class ActivationEMA:
    """Predicts `rate`, activations per token [n]. Call `read`, then `observe`, for every step."""

    def __init__(self, n: int, *, fitted: bool = True) -> None:
        """fitted: False keeps the initial mix."""
        self._fitted = fitted
        self.rate: FloatArray = np.zeros(n, dtype=np.float32)
        self.now: FloatArray = np.zeros(n, dtype=np.float32)  # activations per token of the step read last
        self._rows: FloatArray = np.zeros((_N + 1, n), dtype=np.float32)  # the averages, then the step after them
        self._averages = self._rows[:_N]
        self._change: FloatArray = np.zeros((_N - _SHORT, n), dtype=np.float32)
        self._filled = [0.0] * _N  # total weight of the steps in each decayed average: 1 after many
        self._gram = np.zeros((_N, _N + 1))  # products of the averages with each other and, last column, with the step
        self._part = 0
        self.mix = _INITIAL_MIX.copy()

    def reset(self) -> None:
        """Forgets the short memory, which says little about a new text; keeps the long one and the mix."""
        self._filled[_SHORT] = 0.0
        self._filled[_LONG] *= 0.5

    def read(self, counts: NDArray[Any], n_tokens: int) -> FloatArray:
        """Reads the activations [n] of a step of `n_tokens` tokens into `now`."""
        np.copyto(self.now, counts, casting="unsafe")
        self.now *= np.float32(1.0 / n_tokens)
        return self.now

    def observe(self, n_tokens: int, rejected: NDArray[Any] | None = None, *, fit: bool = True) -> None:
        """Takes in the step in `now`.

        rejected: activations [n] of its rejected drafts. fit: False for a step that is not to be predicted (a prefill).
        """
        rows, averages = self._rows, self._averages
        if fit and self._fitted and self._filled[_LONG] > 0.0:
            rows[_N] = self.now
            self._fit()
        averages[0] = self.now
        if rejected is None:
            averages[_REJECTED] = 0.0
        else:
            np.copyto(averages[_REJECTED], rejected, casting="unsafe")
            averages[_REJECTED] *= np.float32(1.0 / n_tokens)
        change = np.subtract(self.now, averages[_SHORT:], out=self._change)
        for row, kept in enumerate(_KEPT, start=_SHORT):
            self._filled[row] = kept * self._filled[row] + (1.0 - kept)
            change[row - _SHORT] *= np.float32((1.0 - kept) / self._filled[row])  # the first step counts in full
        averages[_SHORT:] += change
        rate, term = self.rate, self._rows[_N]
        rate.fill(0.0)
        for row, weight in enumerate(self.mix.tolist()):
            if weight > 0.0:
                np.multiply(averages[row], np.float32(weight), out=term)
                rate += term

    def _fit(self) -> None:
        """One step of the regression: the mix of the averages that would have predicted the step."""
        gram = self._gram
        gram *= _FORGET
        # one part of the experts is enough: the next one each time
        width = -(-self.now.size // _PARTS)
        rows = self._rows[:, self._part * width : (self._part + 1) * width]
        self._part = (self._part + 1) % _PARTS
        gram += np.einsum("ij,kj->ik", rows[:_N], rows)
        pull = _RIDGE * float(gram[0, 0] + gram[1, 1] + gram[2, 2] + gram[3, 3]) / _N + 1e-12
        left = gram[:, :_N] + pull * _IDENTITY
        right = gram[:, _N] + pull * _INITIAL_MIX
        mix = np.linalg.solve(left, right)
        if mix.min() < 0.0:  # drop the negative weights and solve for the others
            kept = np.flatnonzero(mix > 0.0)
            mix[:] = 0.0
            mix[kept] = np.maximum(np.linalg.solve(left[kept][:, kept], right[kept]), 0.0)
        self.mix = mix
