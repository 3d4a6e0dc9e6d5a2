"""Between the layers of a verification: load missing experts on demand, plan for the next layers.

In moeedge the CPU computes missing experts. Most published systems load them when their layer is computed ("on demand")
and compute on the device alone; the engine can do that, too, for comparisons.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency
from moeedge.native.cache import ExpertCache
from moeedge.policies.base import CacheShape, ExpertPrediction, Plan
from moeedge.policies.planner import even_shares, predicted_counts
from moeedge.scheduler.native_io import cache_shape

_TIMEOUT_S = 10.0  # for the experts that a layer waits for; the CPU computes those that have not arrived by then


class OnDemandLoader:
    """Loads a layer's missing experts before the layer is computed.

    Every layer has an even share of the slots. The least recently used expert of the same layer makes room; a layer
    below its share takes slots from layers above theirs, and one that needs more than its share at once from any layer.
    Counters since the session began: loaded, the experts that were absent before their layer; uncached, those of a
    layer without room.
    """

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        shape = cache_shape(cache)
        self._last_use: NDArray[np.float32] = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        self._n_blocks = 0
        self.resize()
        self.loaded = self.uncached = 0

    def resize(self) -> None:
        """The cache has other slots now."""
        self._share = even_shares(cache_shape(self._cache))

    def load(self, layer: int, experts: NDArray[np.int32]) -> None:
        """Returns when `experts` [n] of `layer` are resident, or cannot be."""
        self._n_blocks += 1
        self._last_use[layer, experts] = self._n_blocks
        resident = self._cache.residency()
        here = resident[layer, experts]
        if (here == Residency.RESIDENT).all():
            return
        victims = np.argwhere(resident == Residency.RESIDENT).astype(np.int32)
        utility = self._last_use[tuple(victims.T)]
        held = np.count_nonzero(resident, axis=1)
        evict_first = held > self._share if held[layer] < self._share[layer] else np.arange(held.size) == layer
        utility[~evict_first[victims[:, 0]]] += self._n_blocks  # after all of those
        self.loaded += int(np.count_nonzero(here == Residency.ABSENT))
        self.uncached += experts.size - self._cache.demand(layer, experts, victims, utility, _TIMEOUT_S)

    def make_room(self, predicted: NDArray[np.bool_], uploads: NDArray[np.int32]) -> NDArray[np.int32]:
        """Victims int32 [m, 2] for `uploads` [n, 2], none of them predicted, the least recently used first.

        Experts `predicted`, bool [n_layers, n_experts], count as used just now (SP-MoE, section 4.4).
        """
        self._last_use[predicted] = self._n_blocks
        resident = self._cache.residency()
        coming = np.bincount(uploads[:, 0], minlength=len(resident))
        # of each layer the experts above its share, but no more in all than `uploads`
        n_evicted = np.maximum(np.count_nonzero(resident, axis=1) + coming - self._share, 0)
        last_use = np.where((resident == Residency.RESIDENT) & ~predicted, self._last_use, np.inf)
        rank = last_use.argsort(axis=1, kind="stable").argsort(axis=1)
        leaves = (rank < n_evicted[:, None]) & (last_use < np.inf)
        order = last_use[leaves].argsort(kind="stable")
        return np.asarray(np.argwhere(leaves)[order][: len(uploads)], dtype=np.int32)


def predicted_uploads(
    shape: CacheShape,
    loader: OnDemandLoader | None,
    plan: Plan,
    prediction: ExpertPrediction | None,
    layers: slice | None,
) -> Plan:
    """Keeps the uploads of a plan that were predicted, and in the layers that are planned for: a `PlanFilter`.

    A policy also brings back experts that were used, since in moeedge no transfer is waited for during a step. Where
    `loader` loads misses on demand those are resident already. loader: None where the CPU computes misses.
    """
    if loader is None and layers is None:
        return plan
    predicted = predicted_counts(prediction, shape) > 0
    keep = predicted[plan.uploads[:, 0], plan.uploads[:, 1]]
    if layers is not None:
        keep &= (plan.uploads[:, 0] >= layers.start) & (plan.uploads[:, 0] < layers.stop)
    uploads, needed = plan.uploads[keep], slice(None if keep.any() else 0)
    victims, victim_utility = plan.victims[needed], plan.victim_utility[needed]
    if loader is not None:
        victims = loader.make_room(predicted, uploads)
        victim_utility = np.arange(len(victims), dtype=np.float32)
    return replace(plan, uploads=uploads, priority=plan.priority[keep], victims=victims, victim_utility=victim_utility)
