"""What contexts like this one activated: experts foretold from the draft's hidden states (pure NumPy).

Which experts a token takes depends on what it means where it stands, and the draft model knows something of that: its
last hidden state, a by-product of drafting. So each verified token is kept with the draft's state and the experts that
the target chose, and a token to come is expected to behave as its nearest neighbours did: those of most similar state
(cosine), the same word preferred. No training, and nothing that must be told about either model.

The last draft of a batch has no state yet, since nothing was drafted from it; it goes by the state of the token before
it, among occurrences of the same word.

Rows live in a ring: the newest push out the oldest. Of states of more than 64 values, sums of a few each, with fixed
random signs, are kept: that leaves inner products as they are but for noise (a count sketch; Charikar et al., 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

# Chosen on 210 recorded conversations with the bundled pair (share of the one-step oracle, free transfers): the token
# table alone finds 0.75, this with 1024 rows 0.86, 2048 0.89, 4096 0.89. 8 or 32 neighbours, a sharpness of 10 or 20
# and a prior of 0.15 to 0.6 make less than 0.005 of a difference, the same word's 0.1 to 0.3 less than 0.002.
MOST_ROWS = 4096
_NEIGHBOURS = 8
_SAME_WORD = np.float32(0.2)  # in units of the cosine
_SHARPNESS = 20.0  # a neighbour whose cosine is lower by 1 / this counts for 1 / e
_PRIOR = 0.3  # neighbours
_WORD_AND_MORE = 0.9  # score of a last draft below which it found no occurrence of its word
_MOST_VALUES = 64  # of a state; 24 lose 0.006 of the share
# OpenBLAS computes a product of no more multiplications than this on the calling thread; others it spreads, and waits
# for cores that the model is computing on
_ONE_THREAD = 1 << 18


class HiddenStateKNN:
    """`expect` adds what neighbours did, `learn` keeps what a batch showed."""

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int) -> None:
        self._n_layers, self._n = n_layers, n_layers * n_experts
        self._n_bytes = n_bytes
        self._first = (np.arange(n_layers) * n_experts)[:, None, None]
        self._cell_type = np.min_scalar_type(self._n)  # one more than there are: where nothing was recorded
        self.n_rows = 0  # known with the first state
        self._states: FloatArray = np.zeros((0, 0), dtype=np.float32)  # of each row's token, 0: not known
        self._before: FloatArray = self._states  # of the token before it
        self._tokens = np.zeros(0, dtype=np.int32)
        self._cells: NDArray[Any] = np.zeros((0, 0), dtype=self._cell_type)
        self._signs: FloatArray = np.zeros(0, dtype=np.float32)
        self._next = 0  # row
        self.n_kept = 0
        self._asked: tuple[list[int], FloatArray] | None = None

    def expect(self, tokens: Sequence[int], hidden_states: FloatArray, out: FloatArray) -> FloatArray:
        """Adds to `out` [n] what neighbours of `tokens` activated; returns how far each is foretold by them, 0..1.

        states: float32 [n_states, n_embd] of the draft, of the first of `tokens`; one is missing, or more.
        """
        told: FloatArray = np.zeros(len(tokens), dtype=np.float32)
        hidden_states = self._prepared(hidden_states[: len(tokens)])
        if not np.isfinite(hidden_states).all():  # of a draft that computes nonsense: no neighbour is near
            self._asked = None
            return told
        self._asked = (list(tokens), hidden_states)
        n, m = len(hidden_states), self.n_kept
        if n == 0 or m == 0:
            return told
        n_all = min(n + 1, len(tokens))
        score: FloatArray = np.empty((n_all, m), dtype=np.float32)
        _product(hidden_states, self._states[:m], score[:n])
        same = np.array(tokens[:n_all], dtype=np.int32)[:, None] == self._tokens[None, :m]
        score[:n] += same[:n] * _SAME_WORD
        if n_all > n:
            _product(hidden_states[-1:], self._before[:m], score[n:])
            score[n:] += same[n:]
        k = min(_NEIGHBOURS, m)
        near = np.argpartition(score, m - k, axis=1)[:, m - k :]
        close = np.take_along_axis(score, near, axis=1)
        weight = np.exp(_SHARPNESS * (close - close.max(axis=1, keepdims=True)))
        if n_all > n:
            weight[n:] *= close[n:] >= _WORD_AND_MORE
        total = weight.sum(axis=1)
        told[:n_all] = total / (total + _PRIOR)
        weight /= (total + _PRIOR)[:, None]
        cells = self._cells[near]  # [n_all, k, n_layers * n_used]
        spread = np.broadcast_to(weight[:, :, None], cells.shape)
        out += np.bincount(cells.reshape(-1), spread.reshape(-1), self._n + 1)[: self._n]
        return told

    def learn(self, tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Keeps the batch that `expect` was asked about: `ids` [n_layers, n_tokens, k], -1 where nothing is known.

        A batch that it was not asked about has no states: it is left out.
        """
        asked, self._asked = self._asked, None
        if asked is None or asked[0] != tokens.tolist():
            return
        hidden_states = asked[1]
        if not self._make_room(hidden_states.shape[1], ids.shape[2]):
            return
        n = min(len(tokens), self.n_rows)
        known = np.zeros((len(tokens), hidden_states.shape[1]), dtype=np.float32)
        known[: len(hidden_states)] = hidden_states
        cells = np.where(ids >= 0, ids + self._first, self._n).transpose(1, 0, 2).reshape(len(tokens), -1)
        rows = (self._next + np.arange(n)) % self.n_rows
        self._states[rows] = known[:n]
        self._before[rows[:1]] = 0.0
        self._before[rows[1:]] = known[: n - 1]
        self._tokens[rows] = tokens[:n]
        self._cells[rows] = cells[:n]
        self._next = (self._next + n) % self.n_rows
        self.n_kept = min(self.n_kept + n, self.n_rows)

    def _prepared(self, hidden_states: FloatArray) -> FloatArray:
        """Of length 1, and short enough; copies."""
        n, d = hidden_states.shape
        if d > _MOST_VALUES:
            n_summed = -(-d // _MOST_VALUES)
            if self._signs.size != d:
                self._signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0], dtype=np.float32), d)
            padded: FloatArray = np.zeros((n, n_summed * _MOST_VALUES), dtype=np.float32)
            np.multiply(hidden_states, self._signs, out=padded[:, :d])
            hidden_states = padded.reshape(n, n_summed, _MOST_VALUES).sum(axis=1)
        length = np.sqrt(np.einsum("ij,ij->i", hidden_states, hidden_states))[:, None]
        return np.asarray(hidden_states / np.maximum(length, np.float32(1e-20)), dtype=np.float32)

    def _make_room(self, n_values: int, n_used: int) -> bool:
        """At the first batch; False where there are no bytes for rows, or the states are of another model."""
        if self._states.shape[1] == 0:
            cells = self._n_layers * n_used
            row_bytes = 2 * 4 * n_values + 4 + cells * self._cell_type.itemsize
            self.n_rows = min(self._n_bytes // row_bytes, MOST_ROWS)
            self._states = np.zeros((self.n_rows, n_values), dtype=np.float32)
            self._before = np.zeros_like(self._states)
            self._tokens = np.full(self.n_rows, -1, dtype=np.int32)
            self._cells = np.zeros((self.n_rows, cells), dtype=self._cell_type)
        return self.n_rows > 0 and self._states.shape[1] == n_values


def _product(left: FloatArray, right: FloatArray, out: FloatArray) -> None:
    """out [n, m] = left [n, d] . right [m, d] transposed, in pieces that one thread computes."""
    n, d = left.shape
    piece = max(_ONE_THREAD // (n * d), 1)
    for first in range(0, len(right), piece):
        np.matmul(left, right[first : first + piece].T, out=out[:, first : first + piece])
