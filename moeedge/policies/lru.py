"""Policy lru: what was used last stays on the device, what was not used for longest makes room.

One pool for all layers, as llama.cpp's experts lie in the engine; Mixtral-Offloading's cache, with slots of each
layer's own and misses computed on the device, is policies/mixtral_offloading.py. The order of use is that of the
tokens: within a batch the later token's experts are the more recent, where the ids are known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.config import PolicyConfig
from moeedge.policies.recency import Recency
from moeedge.scheduler.plan import Planner
from moeedge.scheduler.policy import CacheShape, Hints, Observation, Plan, Resident, Traits

FloatArray = NDArray[np.float32]


class Lru:
    """Score: the number of the token that used the expert last."""

    name = "lru"
    traits = Traits()
    needs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        self._planner = Planner(shape, config.cap, evict=config.evicts)
        self._recency = Recency(shape.n_layers, shape.n_experts)
        self._utility: FloatArray = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)

    def observe(self, observation: Observation) -> None:
        """Notes what was used."""
        self._recency.observe(observation)
        np.copyto(self._utility, self._recency.used)

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: Hints | None = None) -> Plan:
        """Loads what was missed; what is coming plays no part."""
        recency = self._recency
        self._planner.fit(recency.last, resident, 0.0)
        return self._planner.moves(recency.last, self._utility, self._tau, resident, allowed=recency.used)

    def reset(self) -> None:
        """What was used last was used last in this conversation, too."""
