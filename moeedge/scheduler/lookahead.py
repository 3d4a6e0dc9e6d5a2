"""What every vocabulary token activated before: P(expert | layer, token), learned as the model runs (pure NumPy).

The draft's tokens are known before verification, so their experts can be foretold. A row per token seen holds, for
every layer and expert, how many of the token's last occurrences used it: one byte each, halved when the row has
counted 128 occurrences, so that it follows the text. Rows exist for tokens that occurred, never for a vocabulary;
when the table is full the token that was not seen for longest gives up its row.

Against history alone (scheduler/history.py) a row is worth what the layer says: `trust` [n_layers] in 0..1 is the
regression, kept as the model runs, of what came beyond the history on what the table said beyond it. A model whose
routing does not follow the token drives it to 0 and the table is without effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

# Chosen on recorded runs of the bundled pair (pair-hit at ratio 0.17, share of the one-step oracle): all occurrences
# 0.92, only the last 8 0.91, 4 0.90, 2 0.86. The prior, in occurrences, hardly matters between 0.3 and 1.
_PRIOR = 0.5
_HALVE_AT = 128  # occurrences
_FORGET = 0.98  # of trust, per step
_TRUST_PULL = 1.0  # squared activations per layer that speak for full trust at the start


class TokenTable:
    """`expect` mixes rows into expected activations, `learn` adds what a batch showed."""

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int, *, judged: bool = True) -> None:
        self._judged = judged  # False: full trust, whatever comes
        self.n_layers, self.n_experts = n_layers, n_experts
        n = n_layers * n_experts
        self.n_rows = min(n_bytes // n, 1 << 20)
        # zeroed pages cost no memory before they are written
        self._rows: NDArray[np.uint8] = np.zeros((self.n_rows, n), dtype=np.uint8)
        self._seen: NDArray[np.float32] = np.zeros(self.n_rows, dtype=np.float32)  # occurrences in each row
        self._row_of: dict[int, int] = {}  # token -> row, the token seen longest ago first
        self._layer_start = (np.arange(n_layers) * n_experts)[:, None, None]
        self._foreseen: FloatArray = np.zeros(n, dtype=np.float32)  # by the last `expect`: sum of the rows' rates
        self._share = 0.0  # of how many tokens that was
        self._expected_tokens = 0
        self._above: FloatArray = np.zeros((n_layers, n_experts), dtype=np.float32)
        self._came: FloatArray = np.zeros((n_layers, n_experts), dtype=np.float32)
        self._top = np.full(n_layers, _TRUST_PULL)
        self._bottom = np.full(n_layers, _TRUST_PULL)
        self.trust: FloatArray = np.ones((n_layers, 1), dtype=np.float32)

    @property
    def n_tokens(self) -> int:
        """Tokens that have a row."""
        return len(self._row_of)

    @property
    def n_bytes(self) -> int:
        """Of the rows written so far, with their bookkeeping of about 100 bytes a token."""
        return len(self._row_of) * (int(self._rows.shape[1]) + 104)

    def expect(self, rate: FloatArray, tokens: Sequence[int], n_batch: float, out: FloatArray) -> FloatArray:
        """Expected activations [n] of a batch of `n_batch` tokens, of which `tokens` are known, in `out`.

        A token with w occurrences is believed w / (w + prior); what remains, and every token unknown, is expected to
        behave as history says: `rate` [n], activations per token.
        """
        rows = [row for row in map(self._row_of.get, tokens) if row is not None]
        self._expected_tokens = len(tokens)
        if not rows:
            self._share = 0.0
            return np.multiply(rate, n_batch, out=out)
        seen = self._seen[rows]
        weight = 1.0 / (seen + _PRIOR)
        self._share = float(seen @ weight)
        foreseen = np.dot(weight, self._rows[rows].astype(np.float32), out=self._foreseen)
        # batch * rate + trust * (foreseen - share * rate), arranged for three passes over the arrays
        shape = (self.n_layers, self.n_experts)
        np.multiply(rate.reshape(shape), n_batch - self._share * self.trust, out=out.reshape(shape))
        np.multiply(foreseen.reshape(shape), self.trust, out=self._above)
        return np.add(out, self._above.reshape(-1), out=out)

    def judge(self, rate: FloatArray, counts: NDArray[Any], n_tokens: int) -> None:
        """Compares the last `expect` with what came: `counts` [n_layers, n_experts]; call it before history moves."""
        if not self._judged or self._share == 0.0 or n_tokens != self._expected_tokens:
            return
        shape = (self.n_layers, self.n_experts)
        above, came = self._above, self._came
        np.multiply(rate, -self._share, out=above.reshape(-1))
        np.add(above, self._foreseen.reshape(shape), out=above)
        np.multiply(rate, -n_tokens, out=came.reshape(-1))
        np.add(came, counts, out=came, casting="unsafe")
        self._top *= _FORGET
        self._top += np.einsum("ij,ij->i", above, came)
        self._bottom *= _FORGET
        self._bottom += np.einsum("ij,ij->i", above, above)
        np.clip(self._top / np.maximum(self._bottom, 1e-9), 0.0, 1.0, out=self.trust[:, 0], casting="unsafe")
        self._share = 0.0

    def learn(self, tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Adds a batch: `tokens` [n_tokens], `ids` [n_layers, n_tokens, k], -1 where a layer did not see a token."""
        if self.n_rows == 0:
            return
        # in pieces, so that no count passes 255 and no token of a piece pushes out another
        piece = min(_HALVE_AT - 1, self.n_rows)
        for start in range(0, len(tokens), piece):
            self._learn(tokens[start : start + piece].tolist(), ids[:, start : start + piece])

    def _learn(self, names: list[int], ids: NDArray[np.int32]) -> None:
        rows = np.array([self._claim(token) for token in names], dtype=np.int64)
        cells = ids + self._layer_start  # int64 [n_layers, n_tokens, k]
        cells += (rows * self._rows.shape[1])[None, :, None]
        table = self._rows.reshape(-1)
        blank = ids.min(initial=0) < 0
        if blank:
            cells = cells[ids >= 0]
        once = len(set(names)) == len(names)
        if once:
            table[cells] += 1  # a token uses an expert once
            self._seen[rows] += 1.0
        else:
            np.add.at(table, cells.reshape(-1), np.uint8(1))
            np.add.at(self._seen, rows, np.float32(1.0))
        full = self._seen[rows] >= _HALVE_AT
        if full.any():
            self._halve(np.unique(rows[full]))

    def _claim(self, token: int) -> int:
        """The token's row, now the one seen last; a new token takes a free row or that of the oldest token."""
        row = self._row_of.pop(token, None)
        if row is None:
            row = len(self._row_of)
            if row >= self.n_rows:
                oldest = next(iter(self._row_of))
                row = self._row_of.pop(oldest)
                self._rows[row] = 0
                self._seen[row] = 0.0
        self._row_of[token] = row
        return row

    def _halve(self, rows: NDArray[np.int64]) -> None:
        self._rows[rows] >>= 1
        self._seen[rows] *= 0.5
