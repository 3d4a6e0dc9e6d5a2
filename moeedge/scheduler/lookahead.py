"""What the tokens of the next batch will activate, as far as it can be told from what is known of them (pure NumPy).

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

from moeedge.scheduler.recall import Recall
from moeedge.scheduler.token_table import TokenTable

FloatArray = NDArray[np.float32]

_FORGET = 0.98  # of trust, per step
_TRUST_PULL = 1.0  # squared activations per layer that speak for full trust at the start


class Lookahead:
    """`expect` mixes what is known of tokens into history's rates, `learn` adds what a batch showed.

    n_bytes: of memory, for the table and for recall each; 0: no lookahead.
    """

    def __init__(self, n_layers: int, n_experts: int, n_bytes: int, *, judged: bool = True) -> None:
        self._judged = judged  # False: full trust, whatever comes
        self.n_layers, self.n_experts = n_layers, n_experts
        n = n_layers * n_experts
        self.table = TokenTable(n_layers, n_experts, n_bytes)
        self.recall = Recall(n_layers, n_experts, n_bytes)
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
        self, rate: FloatArray, tokens: Sequence[int], n_batch: float, out: FloatArray, states: FloatArray | None = None
    ) -> FloatArray:
        """Expected activations [n] of a batch of `n_batch` tokens, of which `tokens` are known, in `out`.

        What memory does not tell is expected to behave as history says: `rate` [n], activations per token.
        states: float32 [n_states, n_embd], the draft's for the first of `tokens`.
        """
        foreseen, share = self._foreseen, 0.0
        foreseen.fill(0.0)
        open_part: FloatArray = np.ones(len(tokens), dtype=np.float32)
        if states is not None:
            told = self.recall.expect(tokens, states, foreseen)
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
