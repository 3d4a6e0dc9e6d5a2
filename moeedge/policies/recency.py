"""The order of use, as several caches need it: the token that used each expert last."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.scheduler.policy import Observation

FloatArray = NDArray[np.float32]
_RENUMBER_AT = float(1 << 16)  # tokens: below it float32 resolves a hundredth of one


class Recency:
    """`last` [n_layers, n_experts]: the number of the token, from 1, that used the expert last; 0: never."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.last: FloatArray = np.zeros((n_layers, n_experts), dtype=np.float32)
        self.used = np.zeros((n_layers, n_experts), dtype=np.bool_)  # in the last step
        self._layers = np.arange(n_layers)[:, None]
        self.now = 0.0

    def observe(self, observation: Observation) -> None:
        """Notes what was used; within a batch the later token's experts are the more recent, where ids are known."""
        np.greater(observation.counts, 0, out=self.used)
        self.last[self.used] = self.now + 1.0
        if observation.ids is not None:
            self._observe_tokens(observation.ids)
        self.now += max(observation.n_tokens, 1)
        if self.now > _RENUMBER_AT:
            self.now -= _RENUMBER_AT / 2
            self.last -= np.float32(_RENUMBER_AT / 2)
            np.maximum(self.last, 0.0, out=self.last)

    def ahead(self, counts: FloatArray, cells: NDArray[np.bool_], out: FloatArray) -> FloatArray:
        """`last` with `cells` in front, as used by the next token; `counts` orders them. All [n_layers, n_experts]."""
        np.copyto(out, self.last)
        front = counts[cells]
        out[cells] = self.now + 0.5 + 0.4 * front / max(float(front.max(initial=0.0)), 1.0)
        return out

    def _observe_tokens(self, ids: NDArray[np.int32]) -> None:
        for token in range(ids.shape[1]):
            now = ids[:, token]
            if now.min(initial=0) >= 0:
                self.last[self._layers, now] = self.now + 1.0 + token
            else:
                known = now >= 0
                layers = np.broadcast_to(self._layers, now.shape)[known]
                self.last[layers, now[known]] = self.now + 1.0 + token
