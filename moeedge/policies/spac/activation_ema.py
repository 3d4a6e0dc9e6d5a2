"""Activations that an expert brings while it stays on the device, predicted from decayed counts (pure NumPy).

An uploaded expert stays for many steps where few experts move, for one or two where many do. So the prediction is a
discounted mean over the steps to come; the caller sets `discount` after the turnover of the slots (0: the next step):

    rate = (1 - discount) * sum over j >= 0 of discount^j * (activations per token of step t + 1 + j)

Five averages are kept per expert, in activations per token: of the last step, of the drafts that it rejected, and three
exponentially decayed ones, which remember a passage, a text, and other texts. Their best mix differs from text to text
and with the discount, so it is fitted while the model runs: ridge regression of what came on the averages before it,
with old steps forgotten, a pull towards a fixed mix and no negative weights. A trace of discounted past averages pairs
each step with all averages that should have predicted it (as in TD(1); Sutton, 1988).

No product of arrays uses BLAS, here and in token_experts.py: it would spread those of 9,216 elements and more over
threads and wait for cores that the model is computing on, 50 microseconds for a sum of 5.

Arrays are flat over layers and experts, n = n_layers * n_experts, float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import FloatArray

_LAST, _REJECTED, _SHORT, _LONG, _OTHER_TEXTS = range(5)  # rows of the averages
# Of the three decayed averages, per step: memories of about 3, 20 and 200 steps. Chosen on texts 0 to 152 of the
# gpt-oss-20b trace, where one average more or less, or other memories, change the hit rate by less than 0.003
_KEPT = (0.7, 0.95, 0.995)
_N = 5
_INITIAL_MIX = np.array([0.25, 0.0, 0.25, 0.25, 0.25])
_FORGET = 0.98  # per step: the fit remembers about 50 steps
_RIDGE = 0.01  # of the mean square of an average
_FITTED_MAX = 2048  # experts that the regression reads: every second, third, ... one of more
_SOLVE_ALL_STEPS, _SOLVE_EVERY = 24, 4  # the mix changes slowly after the first steps
_IDENTITY = np.eye(_N)


class ActivationEMA:
    """Predicts `rate` [n]. Call `read`, then `observe`, for every step. fitted: False keeps the initial mix."""

    def __init__(self, n: int, *, fitted: bool = True) -> None:
        self._fitted = fitted
        self.discount = 0.0  # 0 to below 1
        self.rate: FloatArray = np.zeros(n, dtype=np.float32)
        self.now: FloatArray = np.zeros(n, dtype=np.float32)  # activations per token of the step read last
        self._averages: FloatArray = np.zeros((_N, n), dtype=np.float32)
        self._change: FloatArray = np.zeros(n, dtype=np.float32)
        self._filled = [0.0] * len(_KEPT)  # total weight of the steps in each decayed average: 1 after many
        self._every = -(-n // _FITTED_MAX)
        # of the fitted experts: the averages, and their discounted sum over the steps so far
        self._sample: FloatArray = np.zeros((_N, len(range(0, n, self._every))), dtype=np.float32)
        self._trace: FloatArray = np.zeros(self._sample.shape, dtype=np.float32)
        self._trace_weight = 0.0
        self._gram = np.zeros((_N, _N))  # products of the averages with each other, and with what came
        self._products = np.zeros(_N)
        self._n_steps = 0
        self.mix = _INITIAL_MIX.copy()

    def reset(self) -> None:
        """Forgets the passage, which says little about a new text; keeps the longer memories and the mix."""
        self._filled[0] = 0.0

    def read(self, counts: NDArray[Any], n_tokens: int) -> FloatArray:
        """Reads the activations [n] of a step of `n_tokens` tokens into `now`."""
        np.copyto(self.now, counts, casting="unsafe")
        self.now *= np.float32(1.0 / n_tokens)
        return self.now

    def observe(
        self, n_tokens: int, rejected: NDArray[Any] | None = None, *, fit: bool = True, weight: float = 1.0
    ) -> None:
        """Takes in the step in `now`, with its weight in the decayed averages.

        rejected: activations [n] of its rejected drafts. fit: False for a step that is not to be predicted (a prefill).
        """
        now, averages, change = self.now, self._averages, self._change
        if fit and self._fitted and self._filled[-1] > 0.0:
            self._fit(weight)
        averages[_LAST] = now
        if rejected is None:
            averages[_REJECTED] = 0.0
        else:
            np.multiply(rejected, np.float32(1.0 / n_tokens), out=averages[_REJECTED], casting="unsafe")
        for index, decay in enumerate(_KEPT):
            self._filled[index] = decay * self._filled[index] + (1.0 - decay) * weight
            average = averages[_SHORT + index]
            np.subtract(now, average, out=change)
            change *= np.float32((1.0 - decay) * weight / self._filled[index])  # the first step counts in full
            average += change
        rate = self.rate
        rate.fill(0.0)
        for average, share in zip(averages, self.mix.tolist(), strict=True):
            if share > 0.0:
                np.multiply(average, np.float32(share), out=change)
                rate += change

    def _fit(self, weight: float) -> None:
        """One step of the regression: the mix of the averages that would have predicted the step in `now`."""
        sample, trace = self._sample, self._trace
        np.copyto(sample, self._averages[:, :: self._every])
        discount = self.discount
        trace *= np.float32(discount)
        self._trace_weight = discount * self._trace_weight + 1.0
        trace += sample
        self._gram *= _FORGET
        self._gram += weight * np.einsum("ij,kj->ik", sample, sample)
        self._products *= _FORGET
        self._products += weight / self._trace_weight * np.einsum("ij,j->i", trace, self.now[:: self._every])
        self._n_steps += 1
        if self._n_steps > _SOLVE_ALL_STEPS and self._n_steps % _SOLVE_EVERY != 0:
            return
        pull = _RIDGE * float(self._gram.trace()) / _N + 1e-12
        left = self._gram + pull * _IDENTITY
        right = self._products + pull * _INITIAL_MIX
        mix = np.linalg.solve(left, right)
        if mix.min() < 0.0:  # drop the negative weights and solve for the others
            rows = np.flatnonzero(mix > 0.0)
            mix[:] = 0.0
            mix[rows] = np.maximum(np.linalg.solve(left[rows][:, rows], right[rows]), 0.0)
        self.mix = mix
