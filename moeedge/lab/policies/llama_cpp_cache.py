"""Policy llama-cpp-cache: stock llama.cpp's cache of experts on the GPU (`--moe-cache-mib N`, since b11480).

By its authors' and users' reports; the code was not at hand:
- an LRU that all layers of equal layout share, that is one for each pool of slots.
- misses are uploaded before the op, into the slots of the experts used longest ago; no prefetch. The GPU computes all
  experts, the CPU none.
- batches of up to 32 tokens use the cache, verifications therefore, too; larger ones do not.
- the host waits once per layer, for the routing that says what to upload.

All experts of a layer count as used at the same time, so none of them makes room for another one. Where a layer uses
more experts than its pool has slots, the rest passes through without a slot.

An LRU over layers that are computed in turn finds little once a step uses more experts than there are slots: what it
evicts is what the next layers need.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import (
    CacheShape,
    ExecutionModel,
    ExpertPrediction,
    IndexArray,
    Observation,
    Plan,
    PolicyConfig,
    Resident,
    ScoringPolicy,
)

_TOKENS_MAX = 32  # of a batch that uses the cache
_NONE = np.zeros((0, 2), dtype=np.int32)


class LlamaCppCache(ScoringPolicy):
    """One LRU for all layers of a pool; plans move nothing between the layers."""

    name = "llama-cpp-cache"
    execution_model = ExecutionModel(device_only=True, keeps_loads=True, cached_tokens_max=_TOKENS_MAX)

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape)
        self._last_use = np.zeros(self._score.shape, dtype=np.int64)  # number of the layer's computation, 0: never
        self._now = 0
        self._pool = shape.group[:, None] == np.arange(shape.n_groups)  # [n_layers, n_groups]
        self._tau = np.ones(shape.n_layers, dtype=np.float32)

    def observe(self, observation: Observation) -> None:
        """Takes in which experts the step used, which predicts those of the next one as any LRU does."""
        np.copyto(self._utility, observation.counts > 0)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans no transfers."""
        return self._plan(_NONE, _NONE)

    def plan_load(self, layer: int, experts: IndexArray, resident: Resident) -> Plan:
        """Gives the missing ones of `experts`, which `layer` uses now, the slots used longest ago."""
        self._now += 1
        self._last_use[layer, experts] = self._now
        pool = self.shape.group[layer]
        held = np.asarray(resident != 0) & self._pool[:, pool, None]
        missing = experts[~held[layer, experts]]
        n_free = max(int(self.shape.capacity[pool]) - int(np.count_nonzero(held)), 0)
        held[layer, experts] = False
        victims = np.flatnonzero(held)
        missing = missing[: n_free + victims.size]
        age = self._last_use.reshape(-1)[victims]
        victims = victims[np.argsort(age, kind="stable")[: max(missing.size - n_free, 0)]]
        layers = np.full(missing.size, layer)
        return self._plan(_pairs(layers, missing), _pairs(*np.divmod(victims, self.shape.n_experts)))

    def _plan(self, uploads: NDArray[np.int32], victims: NDArray[np.int32]) -> Plan:
        return Plan(
            tau=self._tau,
            utility=self._utility,
            uploads=uploads,
            priority=np.ones(len(uploads), dtype=np.uint8),
            victims=victims,
            victim_utility=np.zeros(len(victims), dtype=np.float32),
        )


def _pairs(layers: IndexArray, experts: IndexArray) -> NDArray[np.int32]:
    return np.stack((layers, experts), axis=1).astype(np.int32)
