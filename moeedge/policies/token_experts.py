"""Activations of the next batch, predicted from what is known about its tokens (pure NumPy).

The draft's tokens are known before verification, and where a draft model made them, its hidden states. Two predictors
learn from them while the model runs, without training or inspecting either model:

HiddenStateKNN     k nearest neighbours over the draft's last hidden states, a by-product of drafting. Each verified
                   token is stored with the draft's hidden state and the experts that the target chose. A new token is
                   expected to activate what the stored tokens with the most similar states (cosine) did, the same
                   vocabulary token preferred. The last draft of a batch has no state yet, since no token was drafted
                   from it: it uses that of the token before it, among occurrences of the same vocabulary token.
TokenExpertTable   all occurrences of the same vocabulary token, for what the neighbours leave open.

`NextBatchPredictor` mixes both with the activation rates of `ActivationEMA`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import FloatArray

# Chosen on 210 recorded conversations with the bundled pair (share of the one-step oracle, free transfers): the token
# table alone finds 0.75, this with 1024 rows 0.86, 2048 0.89, 4096 0.89. 8 or 32 neighbours, a sharpness of 10 or 20
# and a prior of 0.15 to 0.6 make a difference of less than 0.005, the bonus of 0.1 to 0.3 one of less than 0.002.
ROWS_MAX = 4096
_NEIGHBOURS = 8
_SAME_TOKEN_BONUS = np.float32(0.2)  # in units of the cosine
_SHARPNESS = 20.0  # a neighbour whose cosine is lower by 1 / this has 1 / e of the weight
_NEIGHBOURS_PRIOR = 0.3  # neighbours
_LAST_DRAFT_SCORE_MIN = 0.9  # below it, a neighbour of the last draft is no occurrence of its token
_VALUES_MAX = 64  # of a hidden state; 24 lose 0.006 of the share
# OpenBLAS computes a product of at most this many multiplications on the calling thread. It spreads others over threads
# and waits for cores that the model is computing on
_ONE_THREAD = 1 << 18

# Chosen on recorded runs of the bundled pair (pair-hit at ratio 0.17, share of the one-step oracle): all occurrences
# 0.92, only the last 8 0.91, 4 0.90, 2 0.86. The prior, in occurrences, hardly matters between 0.3 and 1.
_PRIOR = 0.5
_HALVE_AT = 128  # occurrences
_COUNT = np.uint8(1)
_TOKEN_BYTES = 136  # bookkeeping of a token: its entry in a dictionary and the number of its occurrences

_FORGET = 0.98  # of trust, per step
_TRUST_PRIOR = 1.0  # squared activations per layer that count for full trust at the start


class HiddenStateKNN:
    """`expect` adds what neighbours activated, `learn` stores a batch. n = n_layers * n_experts.

    Rows are a ring buffer of `n_bytes`; 0: it stays empty. Hidden states of more than 64 values are reduced to sums of
    a few values each, with fixed random signs, which keeps inner products except for noise (a count sketch; Charikar et
    al., 2002).
    """

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int) -> None:
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
            score[n] += same[n]
        score[:n] += same[:n] * _SAME_TOKEN_BONUS
        k = min(_NEIGHBOURS, m)
        near = np.argpartition(score, m - k, axis=1)[:, m - k :]  # [n_all, k]
        near_score = np.take_along_axis(score, near, axis=1)
        weight = np.exp(_SHARPNESS * (near_score - near_score.max(axis=1, keepdims=True)))
        if n_all > n:
            weight[n:] *= near_score[n:] >= _LAST_DRAFT_SCORE_MIN
        total = weight.sum(axis=1)
        confidence[:n_all] = total / (total + _NEIGHBOURS_PRIOR)
        weight /= (total + _NEIGHBOURS_PRIOR)[:, None]
        flat_ids = self._flat_ids[near.reshape(-1)]  # [n_all * k, n_layers * n_used]
        spread = np.repeat(weight.reshape(-1).astype(np.float64), flat_ids.shape[1])
        out += np.bincount(flat_ids.reshape(-1), spread, self._n + 1)[: self._n]
        return confidence

    def learn(self, tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Stores a batch: `tokens` [n_tokens], `ids` [n_layers, n_tokens, k], -1: unknown; after `expect` for it."""
        pending, self._pending = self._pending, None
        if pending is None or pending[0] != tokens.tolist() or not self._allocate(pending[1].shape[1], ids.shape[2]):
            return
        hidden_states = pending[1]
        n = min(len(tokens), self.n_rows)
        states = np.zeros((len(tokens), hidden_states.shape[1]), dtype=np.float32)
        states[: len(hidden_states)] = hidden_states
        flat_ids = np.where(ids >= 0, ids + self._layer_start, self._n).transpose(1, 0, 2).reshape(len(tokens), -1)
        rows = (self._next_row + np.arange(n)) % self.n_rows
        self._states[rows] = states[:n]
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


class TokenExpertTable:
    """P(expert | layer, token), n = n_layers * n_experts. `expect` adds predictions, `learn` counts a batch.

    A row per token holds, for every layer and expert, how many of the token's last occurrences used it: one byte each,
    halved when the row has counted 128 occurrences, so that it follows the text. When the table of `n_bytes` is full (0
    bytes: it stays empty), a new token takes the row of the token that was seen longest ago.
    """

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int) -> None:
        n = n_layers * n_experts
        self.n_rows = n_bytes // (n + _TOKEN_BYTES)
        # zeroed pages use no memory until they are written
        self._rows: NDArray[np.uint8] = np.zeros((self.n_rows, n), dtype=np.uint8)
        self._flat_rows = self._rows.reshape(-1)  # the same bytes
        self._occurrences: list[int] = []  # of each row in use
        self._row_of: dict[int, int] = {}  # token -> row, the token seen longest ago first
        self._layer_start = (np.arange(n_layers) * n_experts)[:, None]
        self._bytes: NDArray[np.uint8] = np.empty((0, n), dtype=np.uint8)
        self._floats: FloatArray = np.empty((0, n), dtype=np.float32)

    def expect(self, tokens: Sequence[int], weight: FloatArray, out: FloatArray) -> float:
        """Adds to `out` [n] each token's activations times its `weight` [n_tokens]; returns the sum of shares.

        A token with w occurrences has the share w / (w + prior) of its weight, an unknown one none.
        """
        rows = map(self._row_of.get, tokens)
        parts = [(row, part) for row, part in zip(rows, weight.tolist(), strict=True) if row is not None]
        if not parts:
            return 0.0
        factors = [part / (self._occurrences[row] + _PRIOR) for row, part in parts]
        n = len(parts)
        if len(self._bytes) < n:
            self._bytes = np.empty((n, self._rows.shape[1]), dtype=np.uint8)
            self._floats = np.empty(self._bytes.shape, dtype=np.float32)
        counts = self._floats[:n]
        np.copyto(counts, self._rows.take([row for row, _ in parts], axis=0, out=self._bytes[:n], mode="clip"))
        out += np.einsum("i,ij->j", np.array(factors, dtype=np.float32), counts)
        return float(sum(part for _, part in parts) - _PRIOR * sum(factors))

    def learn(self, tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Counts a batch: `tokens` [n_tokens], `ids` [n_layers, n_tokens, k], -1: unknown."""
        if self.n_rows == 0:
            return
        # in pieces, so that no count exceeds 255 and no token of a piece takes another's row
        piece = min(_HALVE_AT - 1, self.n_rows)
        for start in range(0, len(tokens), piece):
            self._learn(tokens[start : start + piece].tolist(), ids[:, start : start + piece])

    def _learn(self, tokens: list[int], ids: NDArray[np.int32]) -> None:
        rows = [self._claim(token) for token in tokens]
        width = self._rows.shape[1]
        starts = self._layer_start + np.array([row * width for row in rows])
        places = ids + starts[:, :, None]  # int64 [n_layers, n_tokens, k]
        np.add.at(self._flat_rows, places.reshape(-1) if ids.min() >= 0 else places[ids >= 0], _COUNT)
        occurrences, full = self._occurrences, False
        for row in rows:
            occurrences[row] += 1
            full = full or occurrences[row] >= _HALVE_AT
        if full:
            for row in {row for row in rows if occurrences[row] >= _HALVE_AT}:
                self._rows[row] >>= 1
                occurrences[row] >>= 1

    def _claim(self, token: int) -> int:
        """The token's row, now the one seen last; a new token takes a free row or that of the oldest token."""
        row = self._row_of.pop(token, None)
        if row is None:
            row = len(self._row_of)
            if row >= self.n_rows:
                oldest = next(iter(self._row_of))
                row = self._row_of.pop(oldest)
                self._rows[row] = 0
                self._occurrences[row] = 0
            else:
                self._occurrences.append(0)
        self._row_of[token] = row
        return row


class NextBatchPredictor:
    """Mixes predictions from tokens with activation rates; n = n_layers * n_experts.

    `trust` [n_layers] in 0..1 is the weight of predictions from tokens: the regression, kept while the model runs, of
    the activations beyond the rates on those predicted beyond the rates. Routing that follows neither context nor token
    drives it to 0.
    """

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int, *, fitted: bool = True) -> None:
        """n_bytes: memory of each predictor; 0: rates only. fitted: False keeps full trust."""
        self._fitted = fitted
        self._shape = (n_layers, n_experts)
        n = n_layers * n_experts
        self.table = TokenExpertTable(n_layers, n_experts, n_bytes)
        self.knn = HiddenStateKNN(n_layers, n_experts, n_bytes)
        self._predicted: FloatArray = np.zeros(n, dtype=np.float32)  # by the last `add`
        self._share = 0.0  # tokens that this covers
        self._n_tokens = 0  # of the last `add`
        self._beyond: FloatArray = np.zeros(n, dtype=np.float32)  # predicted beyond the rates
        self._observed_beyond: FloatArray = np.zeros(n, dtype=np.float32)
        self._numerator = np.full(n_layers, _TRUST_PRIOR)
        self._denominator = np.full(n_layers, _TRUST_PRIOR)
        self.trust: FloatArray = np.ones(n_layers, dtype=np.float32)
        self._trust_flat: FloatArray = np.ones(n, dtype=np.float32)
        self._full_trust = True  # in all layers

    def add(
        self,
        rate: FloatArray,
        tokens: Sequence[int],
        out: FloatArray,
        hidden_states: FloatArray | None = None,
        *,
        weight: float = 1.0,
    ) -> float:
        """Adds to `out` [n], by `weight`, what `tokens` should activate beyond `rate`; returns how many are predicted.

        rate: activations per token [n]. hidden_states: float32 [n_states, n_embd], the draft's for the first `tokens`.
        """
        predicted, share = self._predicted, 0.0
        predicted.fill(0.0)
        open_part: FloatArray = np.ones(len(tokens), dtype=np.float32)
        if hidden_states is not None:
            confidence = self.knn.expect(tokens, hidden_states, predicted)
            share = float(confidence.sum())
            open_part -= confidence
        share += self.table.expect(tokens, open_part, predicted)
        self._n_tokens, self._share = len(tokens), share
        if share == 0.0:
            return share
        # weight * trust * (predicted - share * rate)
        beyond = np.multiply(rate, np.float32(-share), out=self._beyond)
        beyond += predicted
        if not self._full_trust:
            beyond *= self._trust_flat
        if weight != 1.0:
            beyond *= np.float32(weight)
        out += beyond
        np.maximum(out, 0.0, out=out)  # rounding
        return share

    def fit_trust(self, rate: FloatArray, observed: FloatArray, n_tokens: int) -> None:
        """Fits `trust` to the last `add` and the `observed` activations per token [n]; before `rate` moves on."""
        share, self._share = self._share, 0.0  # each prediction is fitted once
        if not self._fitted or share == 0.0 or n_tokens != self._n_tokens:
            return
        beyond = np.multiply(rate, np.float32(-share), out=self._beyond)
        beyond += self._predicted
        beyond = beyond.reshape(self._shape)
        observed_beyond = np.subtract(observed, rate, out=self._observed_beyond).reshape(self._shape)
        self._numerator *= _FORGET
        self._numerator += n_tokens * np.einsum("ij,ij->i", beyond, observed_beyond)
        self._denominator *= _FORGET
        self._denominator += np.einsum("ij,ij->i", beyond, beyond)
        ratio = self._numerator / self._denominator
        self._full_trust = bool(ratio.min() >= 1.0)
        if self._full_trust:
            self.trust.fill(1.0)
        else:
            np.copyto(self.trust, np.minimum(np.maximum(ratio, 0.0), 1.0), casting="unsafe")
            self._trust_flat.reshape(self._shape)[:] = self.trust[:, None]

    def learn(self, tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Adds a batch: `tokens` [n_tokens], `ids` [n_layers, n_tokens, k], -1: unknown."""
        is_known = tokens >= 0
        if not is_known.all():
            tokens, ids = tokens[is_known], ids[:, is_known]
        self.knn.learn(tokens, ids)
        self.table.learn(tokens, ids)
