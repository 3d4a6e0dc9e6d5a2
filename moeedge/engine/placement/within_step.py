"""Between the layers of a verification: missing experts are loaded, and the next layers' are planned for.

Our own rule is that the CPU computes what is missing. Most published systems compute on the device alone and load what
is missing when its layer comes ("on demand"); for comparisons the engine can do that, too. What makes room is what the
same layer used longest ago, and only where that is not enough, something of another layer.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.placement.foresight import GateForesight
from moeedge.engine.types import Phase
from moeedge.native import Block
from moeedge.native.cache import ExpertCache, Residency
from moeedge.scheduler.policy import LayerPolicy, Policy

_ABSENT, _RESIDENT = int(Residency.ABSENT), int(Residency.RESIDENT)
_PATIENCE_S = 10.0  # for experts that a layer needs; then the CPU computes those that have not come
_DECODING = (Phase.VERIFY, Phase.DECODE)


class WithinStep:
    """Called with each block of the target that is computed next, by the decoding thread."""

    def __init__(
        self, cache: ExpertCache, policy: Policy, *, gate: GateForesight | None = None, load_misses: bool = False
    ) -> None:
        self._cache = cache
        self._policy = policy if isinstance(policy, LayerPolicy) and policy.traits.prefetch_within_step else None
        self.gate = gate
        self._load_misses = load_misses
        shape = (cache.info.n_layers, cache.info.n_experts)
        self._used: NDArray[np.float32] = np.zeros(shape, dtype=np.float32)  # the block that used the expert last
        self._n_blocks = 0
        self._layer = np.repeat(np.arange(shape[0]), shape[1]).reshape(shape)
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
            self._cache.plan(plan.uploads, plan.levels, plan.victims, plan.victim_utility)

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
        utility[victims[:, 0] != layer] += self._n_blocks  # not before all of this layer's
        start_s = time.perf_counter()
        found = self._cache.demand(layer, experts, victims, utility, _PATIENCE_S)
        self.waited_s += time.perf_counter() - start_s
        self.stops += 1
        self.loaded += n_absent
        self.late += experts.size - n_there - n_absent
        self.uncached += experts.size - found

    def expect(self, foretold: NDArray[np.bool_]) -> None:
        """Those [n_layers, n_experts] come or stay as if they had been used just now, so that they last until they are.

        SP-MoE, section 4.4: what is prefetched goes to the end of the queue.
        """
        self._used[foretold] = self._n_blocks
