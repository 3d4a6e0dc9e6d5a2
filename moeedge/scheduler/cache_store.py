"""The native expert cache as the store of a StepDriver."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.native.cache import ExpertCache
from moeedge.policies.base import CacheShape, Plan


class CacheStore:
    """Plans go to the native queue; a thread of the cache moves the experts."""

    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache
        self.residency = cache.residency

    def push(self, plan: Plan) -> None:
        """Replaces what is queued by `plan`."""
        self.cache.plan(plan.uploads, plan.priority, plan.victims, plan.victim_utility)

    def push_uploads(self, uploads: NDArray[np.int32]) -> None:
        """Replaces what is queued by `uploads`, int32 [n, 2] (layer, expert), for which no expert is evicted."""
        priority = np.ones(len(uploads), dtype=np.uint8)
        self.cache.plan(uploads, priority, np.zeros((0, 2), dtype=np.int32), np.zeros(0, dtype=np.float32))

    def drain(self, timeout_s: float, in_flight_timeout_s: float) -> None:
        """Waits until all that is queued has arrived.

        After `timeout_s` it drops the rest of the queue and waits for the transfers under way, `in_flight_timeout_s`
        at most.
        """
        if not self.cache.drain(timeout_s):
            self.push_uploads(np.zeros((0, 2), dtype=np.int32))
            self.cache.drain(in_flight_timeout_s)


def cache_shape(cache: ExpertCache) -> CacheShape:
    """The slots of an open cache."""
    group, capacity, _ = cache.groups()
    return CacheShape(cache.info.n_layers, cache.info.n_experts, group, capacity)
