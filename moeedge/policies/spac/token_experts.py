"""Activations of the next batch, predicted from what is known about its tokens (pure NumPy).

The draft's tokens are known before verification, and where a draft model made them, its hidden states. Two predictors
learn from them while the model runs: `HiddenStateKNN` from tokens in similar contexts, where hidden states are known,
and, for what that leaves open, `TokenExpertTable` from all occurrences of the same vocabulary token.
`NextBatchPredictor` mixes both with the activation rates of `ActivationEMA`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import FloatArray
from moeedge.policies.spac.hidden_state_knn import HiddenStateKNN

# Chosen on recorded runs of the bundled pair (pair-hit at ratio 0.17, share of the one-step oracle): all occurrences
# 0.92, only the last 8 0.91, 4 0.90, 2 0.86. The prior, in occurrences, hardly matters between 0.3 and 1.
_PRIOR = 0.5
_HALVE_AT = 128  # occurrences
_COUNT = np.uint8(1)
_TOKEN_BYTES = 136  # bookkeeping of a token: its entry in a dictionary and the number of its occurrences

_FORGET = 0.98  # of trust, per step
_TRUST_PRIOR = 1.0  # squared activations per layer that count for full trust at the start


class TokenExpertTable:
    """P(expert | layer, token), n = n_layers * n_experts. `expect` adds predictions, `learn` counts a batch.

    A row per token holds, for every layer and expert, how many of the token's last occurrences used it: one byte each,
    halved when the row has counted 128 occurrences, so that it follows the text. Only tokens that occurred have rows;
    when the table is full a new token takes the row of the token that was seen longest ago.
    """

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int) -> None:
        """n_bytes: memory of the table; 0: it stays empty."""
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

    @property
    def n_tokens(self) -> int:
        """Tokens that have a row."""
        return len(self._row_of)

    @property
    def n_bytes(self) -> int:
        """Memory of the rows in use with their bookkeeping."""
        return len(self._row_of) * (int(self._rows.shape[1]) + _TOKEN_BYTES)

    def expect(self, tokens: Sequence[int], weight: FloatArray, out: FloatArray) -> float:
        """Adds to `out` [n] the activations of each token times its `weight` [n_tokens]; returns the sum of shares.

        A token with w occurrences has the share w / (w + prior) of its weight, an unknown one none.
        """
        rows = map(self._row_of.get, tokens)
        known = [(row, part) for row, part in zip(rows, weight.tolist(), strict=True) if row is not None]
        if not known:
            return 0.0
        factors = [part / (self._occurrences[row] + _PRIOR) for row, part in known]
        read = self._read([row for row, _ in known])
        out += np.einsum("i,ij->j", np.array(factors, dtype=np.float32), read)
        return float(sum(part for _, part in known) - _PRIOR * sum(factors))

    def learn(self, tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Counts a batch: `tokens` [n_tokens], `ids` [n_layers, n_tokens, k], -1: unknown."""
        if self.n_rows == 0:
            return
        # in pieces, so that no count exceeds 255 and no token of a piece takes another's row
        piece = min(_HALVE_AT - 1, self.n_rows)
        for start in range(0, len(tokens), piece):
            self._learn(tokens[start : start + piece].tolist(), ids[:, start : start + piece])

    def _read(self, rows: list[int]) -> FloatArray:
        """The rows as float32 [len(rows), n]."""
        if len(self._bytes) < len(rows):
            self._bytes = np.empty((len(rows), self._rows.shape[1]), dtype=np.uint8)
            self._floats = np.empty(self._bytes.shape, dtype=np.float32)
        floats = self._floats[: len(rows)]
        np.copyto(floats, self._rows.take(rows, axis=0, out=self._bytes[: len(rows)], mode="clip"))
        return floats

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
    the activations beyond the rates on those predicted beyond the rates. A layer whose routing follows neither context
    nor token drives it to 0, and the predictions have no effect.
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
        """Adds to `out` [n] what `tokens` are expected to activate beyond `rate`; returns how many are predicted.

        rate: activations per token [n], for what the tokens do not predict. hidden_states: float32 [n_states, n_embd],
        the draft's for the first of `tokens`. weight: of what is added.
        """
        predicted, share = self._predicted, 0.0
        predicted.fill(0.0)
        open_part: FloatArray = np.ones(len(tokens), dtype=np.float32)
        if hidden_states is not None:
            confidence = self.knn.expect(tokens, hidden_states, predicted)
            share = float(confidence.sum())
            open_part -= confidence
        share += self.table.expect(tokens, open_part, predicted)
        self._n_tokens = len(tokens)
        self._share = share
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
        known = tokens >= 0
        if not known.all():
            tokens, ids = tokens[known], ids[:, known]
        self.knn.learn(tokens, ids)
        self.table.learn(tokens, ids)
