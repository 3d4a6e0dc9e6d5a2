"""Between the layers of a verification: missing experts are loaded, and the next layers' are planned for.

Our own rule is that the CPU computes what is missing. Most published systems compute on the device alone and load what
is missing when its layer comes ("on demand"); for comparisons the engine can do that, too. Every layer has an even
share of the slots. What makes room is what the same layer used longest ago; a layer below its share takes from those
above theirs, and one that needs more at once than its share from others.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from moeedge.native import Block
from moeedge.native.abi import Phase, Residency
from moeedge.native.cache import ExpertCache
from moeedge.policies.base import CacheShape, LayerPolicy, Policy
from moeedge.policies.per_layer import even_shares
from moeedge.scheduler.prediction import NextGatePredictor

_ABSENT, _RESIDENT = int(Residency.ABSENT), int(Residency.RESIDENT)
_PATIENCE_S = 10.0  # for experts that a layer needs; then the CPU computes those that have not come
_DECODING = (Phase.VERIFY, Phase.DECODE)


class LayerHook:
    """Called with each block of the target that is computed next, by the decoding thread."""

    def __init__(
        self, cache: ExpertCache, policy: Policy, *, gate: NextGatePredictor | None = None, load_misses: bool = False
    ) -> None:
        self._cache = cache
        self._policy = (
            policy if isinstance(policy, LayerPolicy) and policy.execution_model.prefetch_within_step else None
        )
        self.gate = gate
        self._load_misses = load_misses
        shape = (cache.info.n_layers, cache.info.n_experts)
        self._used: NDArray[np.float32] = np.zeros(shape, dtype=np.float32)  # the block that used the expert last
        self._n_blocks = 0
        group, capacity, _ = cache.groups()
        self._share = even_shares(CacheShape(*shape, group, capacity))
        self.on = False
        self.needed = 0  # experts of the layers computed so far, distinct ones per layer
        self.loaded = 0  # of these absent when the layer came, so that it brought them and waited
        self.late = 0  # on their way already, so that it waited
        self.stops = 0  # layers that waited
        self.waited_s = 0.0
        self.uncached = 0  # experts for which there was no room

    @property
    def loads_misses(self) -> bool:
        """Whether what is missing is loaded when its layer comes, and only then."""
        return self._load_misses

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do at a block."""
        return self._load_misses or self._policy is not None

    def __call__(self, block: Block) -> None:
        """See the module."""
        if not self.on or block.phase not in _DECODING:
            return
        if self._load_misses and block.ids is not None:
            self._load(block.layer, np.unique(block.ids[block.ids >= 0]))
        if self._policy is not None:
            hints = self.gate.look(block) if self.gate is not None else None
            plan = self._policy.plan_layer(block.layer, self._cache.residency(), hints)
            self._cache.plan(plan.uploads, plan.priority, plan.victims, plan.victim_utility)

    def _load(self, layer: int, experts: NDArray[np.int32]) -> None:
        self._n_blocks += 1
        self._used[layer, experts] = self._n_blocks
        resident = self._cache.residency()
        here = resident[layer, experts]
        n_there, n_absent = int(np.count_nonzero(here == _RESIDENT)), int(np.count_nonzero(here == _ABSENT))
        self.needed += experts.size
        if n_there == experts.size:
            return
        victims = np.argwhere(resident == _RESIDENT).astype(np.int32)
        utility = self._used[tuple(victims.T)]
        held = np.count_nonzero(resident, axis=1)
        first = held > self._share if held[layer] < self._share[layer] else np.arange(held.size) == layer
        utility[~first[victims[:, 0]]] += self._n_blocks  # behind all of those
        start_s = time.perf_counter()
        found = self._cache.demand(layer, experts, victims, utility, _PATIENCE_S)
        self.waited_s += time.perf_counter() - start_s
        self.stops += 1
        self.loaded += n_absent
        self.late += experts.size - n_there - n_absent
        self.uncached += experts.size - found

    def make_room(self, foretold: NDArray[np.bool_], uploads: NDArray[np.int32]) -> NDArray[np.int32]:
        """What goes for `uploads` [n, 2]: victims [m, 2] that nobody foretold, the least recently used first.

        What is foretold [n_layers, n_experts] comes or stays as if it had been used just now, so that it is there when
        it is (SP-MoE, section 4.4: what is prefetched goes to the end of the queue).
        """
        self._used[foretold] = self._n_blocks
        resident = self._cache.residency()
        coming = np.bincount(uploads[:, 0], minlength=len(resident))
        # of each layer what is above its share, but not more in all than comes
        n_go = np.maximum(np.count_nonzero(resident, axis=1) + coming - self._share, 0)
        age = np.where((resident == _RESIDENT) & ~foretold, self._used, np.inf)
        victims = []
        for layer in np.flatnonzero(n_go):
            oldest = np.argsort(age[layer], kind="stable")[: n_go[layer]]
            victims += [(age[layer, expert], layer, expert) for expert in oldest if age[layer, expert] < np.inf]
        victims.sort()
        return np.array([victim[1:] for victim in victims], dtype=np.int32).reshape(-1, 2)[: len(uploads)]
