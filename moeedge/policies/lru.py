"""The order of use, as several caches need it: the token that used each expert last.

Policy lru: what was used last stays on the device, what was not used for longest makes room.

One pool for all layers, as llama.cpp's experts lie in the engine; Mixtral-Offloading's cache, with slots of each
layer's own and misses computed on the device, is policies/mixtral_offloading.py. The order of use is that of the
tokens: within a batch the later token's experts are the more recent, where the ids are known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.planner import Planner

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


class Lru:
    """Score: the number of the token that used the expert last."""

    name = "lru"
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        self._planner = Planner(shape, config.cap, evict=config.evicts)
        self._recency = Recency(shape.n_layers, shape.n_experts)
        self._utility: FloatArray = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)

    def observe(self, observation: Observation) -> None:
        """Notes what was used."""
        self._recency.observe(observation)
        np.copyto(self._utility, self._recency.used)

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """Loads what was missed; what is coming plays no part."""
        recency = self._recency
        self._planner.fit(recency.last, resident, 0.0)
        return self._planner.moves(recency.last, self._utility, self._tau, resident, allowed=recency.used)

    def reset(self) -> None:
        """What was used last was used last in this conversation, too."""
