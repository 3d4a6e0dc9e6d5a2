"""How often every expert will be used per token, foretold from how often it was (pure NumPy).

Four histories are kept per expert, all in activations per token: of the last step, of the drafts that the last step
refused (how much of a refused draft returns in the next one differs from pair to pair), and two decayed ones with a
short and a long memory. Their best mix differs from text to text, so it is fitted while the model runs: ridge
regression of each step's rates on the histories before it, over all layers and experts at once, with old steps
forgotten, a pull towards a fixed mix, and no negative parts.

No product of arrays goes to BLAS, here and in scheduler/lookahead.py: it would spread those of 9,216 elements and more
over threads, and wait for cores that the model is computing on, 50 microseconds for a sum of 5.

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
_KEPT = (0.7, 0.95)  # of the two decayed ones, per step
_FIRST_MIX = np.array([0.2, 0.0, 0.4, 0.4])
_FORGET = 0.98  # per step: the fit remembers about 50 steps
_RIDGE = 0.01  # of the mean square of a history
_PARTS = 4  # of the cells; the fit looks at one at a time
_N = len(_FIRST_MIX)
_IDENTITY = np.eye(_N)


class ActivationEMA:
    """Predicts `rate`, [n] activations per token; `observe` it after every step."""

    def __init__(self, n: int, *, fitted: bool = True) -> None:
        self._fitted = fitted  # False: the mix stays as it is at the start
        self.rate: FloatArray = np.zeros(n, dtype=np.float32)
        self.now: FloatArray = np.zeros(n, dtype=np.float32)  # activations per token of the step observed last
        self._rows: FloatArray = np.zeros(
            (_N + 1, n), dtype=np.float32
        )  # the histories, then the step that they foretell
        self._past = self._rows[:_N]
        self._change: FloatArray = np.zeros((_N - _SHORT, n), dtype=np.float32)
        self._filled = [0.0] * _N  # weight of what the decayed ones saw: 1 once they have forgotten their start
        self._gram = np.zeros((_N, _N + 1))  # products of the histories, and with what they foretell in the last column
        self._part = 0
        self.mix = _FIRST_MIX.copy()

    def reset(self) -> None:
        """A new text: what was used lately says little now. The long memory and the mix stay."""
        self._filled[_SHORT] = 0.0
        self._filled[_LONG] *= 0.5

    def sense(self, counts: NDArray[Any], n_tokens: int) -> FloatArray:
        """Reads the activations [n] of a step of `n_tokens` tokens into `now`, before `observe`."""
        np.copyto(self.now, counts, casting="unsafe")
        self.now *= np.float32(1.0 / n_tokens)
        return self.now

    def observe(self, n_tokens: int, refused: NDArray[Any] | None = None, *, fit: bool = True) -> None:
        """Takes in the step that `sense` read, and the activations [n] of its refused drafts.

        fit: the step is one of those that are to be foretold (a prefill is not).
        """
        rows, past = self._rows, self._past
        if fit and self._fitted and self._filled[_LONG] > 0.0:
            rows[_N] = self.now
            self._fit()
        past[0] = self.now
        if refused is None:
            past[_REFUSED] = 0.0
        else:
            np.copyto(past[_REFUSED], refused, casting="unsafe")
            past[_REFUSED] *= np.float32(1.0 / n_tokens)
        change = np.subtract(self.now, past[_SHORT:], out=self._change)
        for row, kept in enumerate(_KEPT, start=_SHORT):
            self._filled[row] = kept * self._filled[row] + (1.0 - kept)
            change[row - _SHORT] *= np.float32((1.0 - kept) / self._filled[row])  # the first step counts in full
        past[_SHORT:] += change
        rate, term = self.rate, self._rows[_N]
        rate.fill(0.0)
        for row, part in enumerate(self.mix.tolist()):
            if part > 0.0:  # some are not
                np.multiply(past[row], np.float32(part), out=term)
                rate += term

    def _fit(self) -> None:
        """One step of the regression: which mix of the histories would have foretold the step."""
        gram = self._gram
        gram *= _FORGET
        # a part of the cells tells as much as all: each time the next one
        width = -(-self.now.size // _PARTS)
        rows = self._rows[:, self._part * width : (self._part + 1) * width]
        self._part = (self._part + 1) % _PARTS
        gram += np.einsum("ij,kj->ik", rows[:_N], rows)
        pull = _RIDGE * float(gram[0, 0] + gram[1, 1] + gram[2, 2] + gram[3, 3]) / _N + 1e-12
        left = gram[:, :_N] + pull * _IDENTITY
        right = gram[:, _N] + pull * _FIRST_MIX
        mix = np.linalg.solve(left, right)
        if mix.min() < 0.0:  # without the negative ones, the rest anew
            kept = np.flatnonzero(mix > 0.0)
            mix[:] = 0.0
            mix[kept] = np.maximum(np.linalg.solve(left[kept][:, kept], right[kept]), 0.0)
        self.mix = mix
