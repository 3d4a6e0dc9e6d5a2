"""What every vocabulary token activated before: P(expert | layer, token), learned as the model runs (pure NumPy).

The draft's tokens are known before verification, so their experts can be foretold. A row per token seen holds, for
every layer and expert, how many of the token's last occurrences used it: one byte each, halved when the row has
counted 128 occurrences, so that it follows the text. Rows exist for tokens that occurred, never for a vocabulary;
when the table is full the token that was not seen for longest gives up its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

# Chosen on recorded runs of the bundled pair (pair-hit at ratio 0.17, share of the one-step oracle): all occurrences
# 0.92, only the last 8 0.91, 4 0.90, 2 0.86. The prior, in occurrences, hardly matters between 0.3 and 1.
_PRIOR = 0.5
_HALVE_AT = 128  # occurrences
_ONE = np.uint8(1)
_TOKEN_BYTES = 136  # bookkeeping of a token: its entry in a dictionary and the number of its occurrences


class TokenTable:
    """`expect` adds what rows say, `learn` what a batch showed."""

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int) -> None:
        n = n_layers * n_experts
        self.n_rows = n_bytes // (n + _TOKEN_BYTES)
        # zeroed pages cost no memory before they are written
        self._rows: NDArray[np.uint8] = np.zeros((self.n_rows, n), dtype=np.uint8)
        self._cells = self._rows.reshape(-1)  # the same bytes
        self._seen: list[int] = []  # occurrences in each row that was ever used
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
        """Of the rows written so far, with their bookkeeping."""
        return len(self._row_of) * (int(self._rows.shape[1]) + _TOKEN_BYTES)

    def expect(self, tokens: Sequence[int], weight: FloatArray, out: FloatArray) -> float:
        """Adds to `out` [n] what `tokens` activated before, each with its `weight` [n_tokens]; the sum of their shares.

        A token with w occurrences is believed w / (w + prior) of its weight, an unknown one not at all.
        """
        rows = map(self._row_of.get, tokens)
        found = [(row, part) for row, part in zip(rows, weight.tolist(), strict=True) if row is not None]
        if not found:
            return 0.0
        each = [part / (self._seen[row] + _PRIOR) for row, part in found]
        read = self._read([row for row, _ in found])
        out += np.einsum("i,ij->j", np.array(each, dtype=np.float32), read)
        return float(sum(part for _, part in found) - _PRIOR * sum(each))

    def _read(self, rows: list[int]) -> FloatArray:
        """The rows as float32 [len(rows), n]."""
        if len(self._bytes) < len(rows):
            self._bytes = np.empty((len(rows), self._rows.shape[1]), dtype=np.uint8)
            self._floats = np.empty(self._bytes.shape, dtype=np.float32)
        floats = self._floats[: len(rows)]
        np.copyto(floats, self._rows.take(rows, axis=0, out=self._bytes[: len(rows)], mode="clip"))
        return floats

    def learn(self, tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Adds a batch: `tokens` [n_tokens], `ids` [n_layers, n_tokens, k], -1 where a layer did not see a token."""
        if self.n_rows == 0:
            return
        # in pieces, so that no count passes 255 and no token of a piece pushes out another
        piece = min(_HALVE_AT - 1, self.n_rows)
        for start in range(0, len(tokens), piece):
            self._learn(tokens[start : start + piece].tolist(), ids[:, start : start + piece])

    def _learn(self, names: list[int], ids: NDArray[np.int32]) -> None:
        places = [self._claim(token) for token in names]
        width = self._rows.shape[1]
        starts = self._layer_start + np.array([row * width for row in places])
        cells = ids + starts[:, :, None]  # int64 [n_layers, n_tokens, k]
        flat = cells.reshape(-1) if ids.min() >= 0 else cells[ids >= 0]
        np.add.at(self._cells, flat, _ONE)
        seen, full = self._seen, False
        for row in places:
            seen[row] += 1
            full = full or seen[row] >= _HALVE_AT
        if full:
            self._halve({row for row in places if seen[row] >= _HALVE_AT})

    def _claim(self, token: int) -> int:
        """The token's row, now the one seen last; a new token takes a free row or that of the oldest token."""
        row = self._row_of.pop(token, None)
        if row is None:
            row = len(self._row_of)
            if row >= self.n_rows:
                oldest = next(iter(self._row_of))
                row = self._row_of.pop(oldest)
                self._rows[row] = 0
                self._seen[row] = 0
            else:
                self._seen.append(0)
        self._row_of[token] = row
        return row

    def _halve(self, rows: set[int]) -> None:
        for row in rows:
            self._rows[row] >>= 1
            self._seen[row] >>= 1
