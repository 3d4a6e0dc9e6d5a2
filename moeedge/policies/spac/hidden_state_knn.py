"""Experts predicted by similar contexts: k nearest neighbours over the draft's hidden states (pure NumPy).

Which experts a token activates depends on its meaning in its context. The draft model's last hidden state, a by-product
of drafting, carries some of that. So each verified token is stored with the draft's hidden state and the experts that
the target chose, and a new token is expected to activate what its nearest neighbours did: stored tokens with the most
similar hidden states (cosine), the same vocabulary token preferred. Neither model is trained or inspected.

The last draft of a batch has no hidden state yet, since no token was drafted from it. It uses the hidden state of the
token before it, among occurrences of the same vocabulary token.

Rows are a ring buffer. Hidden states of more than 64 values are reduced to sums of a few values each, with fixed random
signs, which keeps inner products except for noise (a count sketch; Charikar et al., 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import FloatArray

# Chosen on 210 recorded conversations with the bundled pair (share of the one-step oracle, free transfers): the token
# table alone finds 0.75, this with 1024 rows 0.86, 2048 0.89, 4096 0.89. 8 or 32 neighbours, a sharpness of 10 or 20
# and a prior of 0.15 to 0.6 make a difference of less than 0.005, the bonus of 0.1 to 0.3 one of less than 0.002.
ROWS_MAX = 4096
_NEIGHBOURS = 8
_SAME_TOKEN_BONUS = np.float32(0.2)  # in units of the cosine
_SHARPNESS = 20.0  # a neighbour whose cosine is lower by 1 / this has 1 / e of the weight
_PRIOR = 0.3  # neighbours
_LAST_DRAFT_SCORE_MIN = 0.9  # below it, a neighbour of the last draft is no occurrence of its token
_VALUES_MAX = 64  # of a hidden state; 24 lose 0.006 of the share
# OpenBLAS computes a product of at most this many multiplications on the calling thread. It spreads others over threads
# and waits for cores that the model is computing on
_ONE_THREAD = 1 << 18


class HiddenStateKNN:
    """`expect` adds what neighbours activated, `learn` stores a batch. n = n_layers * n_experts."""

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int) -> None:
        """n_bytes: memory of the rows; 0: the predictor stays empty."""
        self._n_layers, self._n = n_layers, n_layers * n_experts
        self._n_bytes = n_bytes
        self._layer_start = (np.arange(n_layers) * n_experts)[:, None, None]
        self._id_type = np.min_scalar_type(self._n)  # flat ids, and n for an unknown one
        self.n_rows = 0  # known with the first hidden state
        self._states: FloatArray = np.zeros((0, 0), dtype=np.float32)  # of each row's token, 0: unknown
        self._begins_batch = np.zeros(0, dtype=np.bool_)  # rows whose token before is not in the row before
        self._tokens = np.zeros(0, dtype=np.int32)
        self._flat_ids: NDArray[Any] = np.zeros((0, 0), dtype=self._id_type)  # [n_rows, n_layers * k]
        self._signs: FloatArray = np.zeros(0, dtype=np.float32)
        self._next_row = 0
        self.n_stored = 0
        self._pending: tuple[list[int], FloatArray] | None = None  # tokens and hidden states of the last `expect`

    def expect(self, tokens: Sequence[int], hidden_states: FloatArray, out: FloatArray) -> FloatArray:
        """Adds the activations that neighbours of `tokens` predict to `out` [n]; returns confidences 0..1 [n_tokens].

        hidden_states: float32 [n_states, n_embd] of the draft, for the first of `tokens`; the last may be missing.
        """
        confidence: FloatArray = np.zeros(len(tokens), dtype=np.float32)
        hidden_states = self._prepared(hidden_states[: len(tokens)])
        if not np.isfinite(hidden_states).all():  # a broken draft model
            self._pending = None
            return confidence
        self._pending = (list(tokens), hidden_states)
        n, m = len(hidden_states), self.n_stored
        if n == 0 or m == 0:
            return confidence
        n_all = min(n + 1, len(tokens))
        score: FloatArray = np.empty((n_all, m), dtype=np.float32)
        _product(hidden_states, self._states[:m], score[:n])
        same = np.array(tokens[:n_all], dtype=np.int32)[:, None] == self._tokens[None, :m]
        if n_all > n:  # the token before a row's is that of the row before: the last product, shifted by a row
            score[n, 1:] = score[n - 1, :-1]
            score[n, 0] = score[n - 1, -1]
            score[n, self._begins_batch[:m]] = 0.0
        score[:n] += same[:n] * _SAME_TOKEN_BONUS
        if n_all > n:
            score[n] += same[n]
        k = min(_NEIGHBOURS, m)
        near = np.argpartition(score, m - k, axis=1)[:, m - k :]  # [n_all, k]
        near_score = np.take_along_axis(score, near, axis=1)
        weight = np.exp(_SHARPNESS * (near_score - near_score.max(axis=1, keepdims=True)))
        if n_all > n:
            weight[n:] *= near_score[n:] >= _LAST_DRAFT_SCORE_MIN
        total = weight.sum(axis=1)
        confidence[:n_all] = total / (total + _PRIOR)
        weight /= (total + _PRIOR)[:, None]
        flat_ids = self._flat_ids[near.reshape(-1)]  # [n_all * k, n_layers * n_used]
        spread = np.repeat(weight.reshape(-1).astype(np.float64), flat_ids.shape[1])
        out += np.bincount(flat_ids.reshape(-1), spread, self._n + 1)[: self._n]
        return confidence

    def learn(self, tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Stores a batch: `tokens` [n_tokens], `ids` [n_layers, n_tokens, k], -1: unknown.

        Without a preceding `expect` for these tokens their hidden states are unknown, and the batch is left out.
        """
        pending, self._pending = self._pending, None
        if pending is None or pending[0] != tokens.tolist() or not self._allocate(pending[1].shape[1], ids.shape[2]):
            return
        hidden_states = pending[1]
        n = min(len(tokens), self.n_rows)
        known = np.zeros((len(tokens), hidden_states.shape[1]), dtype=np.float32)
        known[: len(hidden_states)] = hidden_states
        flat_ids = np.where(ids >= 0, ids + self._layer_start, self._n).transpose(1, 0, 2).reshape(len(tokens), -1)
        rows = (self._next_row + np.arange(n)) % self.n_rows
        self._states[rows] = known[:n]
        self._begins_batch[rows] = False
        self._begins_batch[rows[0]] = True
        self._tokens[rows] = tokens[:n]
        self._flat_ids[rows] = flat_ids[:n]
        self._next_row = (self._next_row + n) % self.n_rows
        self._begins_batch[self._next_row] = True  # the oldest row has lost the one before it
        self.n_stored = min(self.n_stored + n, self.n_rows)

    def _prepared(self, hidden_states: FloatArray) -> FloatArray:
        """Copies of length 1 and of at most 64 values."""
        n, d = hidden_states.shape
        if d > _VALUES_MAX:
            n_summed = -(-d // _VALUES_MAX)
            if self._signs.size != d:
                self._signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0], dtype=np.float32), d)
            padded: FloatArray = np.zeros((n, n_summed * _VALUES_MAX), dtype=np.float32)
            np.multiply(hidden_states, self._signs, out=padded[:, :d])
            hidden_states = padded.reshape(n, n_summed, _VALUES_MAX).sum(axis=1)
        length = np.sqrt(np.einsum("ij,ij->i", hidden_states, hidden_states))[:, None]
        return np.asarray(hidden_states / np.maximum(length, np.float32(1e-20)), dtype=np.float32)

    def _allocate(self, n_values: int, n_used: int) -> bool:
        """Allocates the rows at the first batch; False if there are none or the states are of another model."""
        if self._states.shape[1] == 0:
            n_ids = self._n_layers * n_used
            row_bytes = 4 * n_values + 4 + 1 + n_ids * self._id_type.itemsize
            self.n_rows = min(self._n_bytes // row_bytes, ROWS_MAX)
            self._states = np.zeros((self.n_rows, n_values), dtype=np.float32)
            self._begins_batch = np.ones(self.n_rows, dtype=np.bool_)
            self._tokens = np.full(self.n_rows, -1, dtype=np.int32)
            self._flat_ids = np.zeros((self.n_rows, n_ids), dtype=self._id_type)
        return self.n_rows > 0 and self._states.shape[1] == n_values


def _product(left: FloatArray, right: FloatArray, out: FloatArray) -> None:
    """out [n, m] = left [n, d] . right [m, d] transposed, in pieces that one thread computes."""
    n, d = left.shape
    piece = max(_ONE_THREAD // (n * d), 1)
    for first in range(0, len(right), piece):
        np.matmul(left, right[first : first + piece].T, out=out[:, first : first + piece])
