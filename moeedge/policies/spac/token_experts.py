"""What every vocabulary token activated before: P(expert | layer, token), learned as the model runs (pure NumPy).

The draft's tokens are known before verification, so their experts can be foretold. A row per token seen holds, for
every layer and expert, how many of the token's last occurrences used it: one byte each, halved when the row has
counted 128 occurrences, so that it follows the text. Rows exist for tokens that occurred, never for a vocabulary;
when the table is full the token that was not seen for longest gives up its row.

What the tokens of the next batch will activate, as far as it can be told from what is known of them (pure NumPy).

The draft's tokens are known before verification, and where a draft model made them, its hidden states. Two memories
speak about them, learned as the model runs: where states are known, tokens in contexts alike (scheduler/recall.py),
and for what these leave open, the same words wherever they stood (scheduler/token_table.py).

Against history alone (scheduler/history.py) their word is worth what the layer says: `trust` [n_layers] in 0..1 is the
regression, kept as the model runs, of what came beyond the history on what was said beyond it. A model whose routing
follows neither the context nor the token drives it to 0, and lookahead is without effect.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.spac.hidden_state_knn import HiddenStateKNN

FloatArray = NDArray[np.float32]

# Chosen on recorded runs of the bundled pair (pair-hit at ratio 0.17, share of the one-step oracle): all occurrences
# 0.92, only the last 8 0.91, 4 0.90, 2 0.86. The prior, in occurrences, hardly matters between 0.3 and 1.
_PRIOR = 0.5
_HALVE_AT = 128  # occurrences
_ONE = np.uint8(1)
_TOKEN_BYTES = 136  # bookkeeping of a token: its entry in a dictionary and the number of its occurrences


class TokenExpertTable:
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


_FORGET = 0.98  # of trust, per step
_TRUST_PULL = 1.0  # squared activations per layer that speak for full trust at the start


class NextBatchPredictor:
    """`expect` mixes what is known of tokens into history's rates, `learn` adds what a batch showed.

    n_bytes: of memory, for the table and for recall each; 0: no lookahead.
    """

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int, *, judged: bool = True) -> None:
        self._judged = judged  # False: full trust, whatever comes
        self.n_layers, self.n_experts = n_layers, n_experts
        n = n_layers * n_experts
        self.table = TokenExpertTable(n_layers, n_experts, n_bytes)
        self.recall = HiddenStateKNN(n_layers, n_experts, n_bytes)
        self._foreseen: FloatArray = np.zeros(n, dtype=np.float32)  # by the last `expect`
        self._share = 0.0  # of how many tokens that was
        self._expected_tokens = 0
        self._above: FloatArray = np.zeros(n, dtype=np.float32)
        self._came: FloatArray = np.zeros(n, dtype=np.float32)
        self._top = np.full(n_layers, _TRUST_PULL)
        self._bottom = np.full(n_layers, _TRUST_PULL)
        self.trust: FloatArray = np.ones(n_layers, dtype=np.float32)
        self._trust_of: FloatArray = np.ones(n, dtype=np.float32)  # the same for every cell
        self._trusted = True  # in full, by all layers

    def expect(
        self,
        rate: FloatArray,
        tokens: Sequence[int],
        n_batch: float,
        out: FloatArray,
        hidden_states: FloatArray | None = None,
    ) -> FloatArray:
        """Expected activations [n] of a batch of `n_batch` tokens, of which `tokens` are known, in `out`.

        What memory does not tell is expected to behave as history says: `rate` [n], activations per token.
        states: float32 [n_states, n_embd], the draft's for the first of `tokens`.
        """
        foreseen, share = self._foreseen, 0.0
        foreseen.fill(0.0)
        open_part: FloatArray = np.ones(len(tokens), dtype=np.float32)
        if hidden_states is not None:
            told = self.recall.expect(tokens, hidden_states, foreseen)
            share = float(told.sum())
            open_part -= told
        share += self.table.expect(tokens, open_part, foreseen)
        self._expected_tokens = len(tokens)
        self._share = share
        np.multiply(rate, np.float32(n_batch), out=out)
        if share == 0.0:
            return out
        # batch * rate + trust * (foreseen - share * rate)
        above = np.multiply(rate, np.float32(-share), out=self._above)
        above += foreseen
        if not self._trusted:
            above *= self._trust_of
        out += above
        return np.maximum(out, 0.0, out=out)  # rounding

    def judge(self, rate: FloatArray, now: FloatArray, n_tokens: int) -> None:
        """Compares the last `expect` with what came: `now` [n] activations per token; before history moves on."""
        if not self._judged or self._share == 0.0 or n_tokens != self._expected_tokens:
            return
        shape = (self.n_layers, self.n_experts)
        above = np.multiply(rate, np.float32(-self._share), out=self._above)
        above += self._foreseen
        came = np.subtract(now, rate, out=self._came)
        self._top *= _FORGET
        self._top += n_tokens * np.einsum("ij,ij->i", above.reshape(shape), came.reshape(shape))
        self._bottom *= _FORGET
        self._bottom += np.einsum("ij,ij->i", above.reshape(shape), above.reshape(shape))
        ratio = self._top / self._bottom
        self._trusted = bool(ratio.min() >= 1.0)
        if self._trusted:
            self.trust.fill(1.0)
        else:
            np.copyto(self.trust, np.minimum(np.maximum(ratio, 0.0), 1.0), casting="unsafe")
            self._trust_of.reshape(shape)[:] = self.trust[:, None]
        self._share = 0.0

    def learn(self, tokens: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """Adds a batch: `tokens` [n_tokens], `ids` [n_layers, n_tokens, k], -1 where a layer did not see a token."""
        self.recall.learn(tokens, ids)
        self.table.learn(tokens, ids)
