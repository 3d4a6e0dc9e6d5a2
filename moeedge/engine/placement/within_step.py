"""Between the layers of a verification: missing experts are loaded, and the next layers' are planned for.

Our own rule is that the CPU computes what is missing. Most published systems compute on the device alone and load what
is missing when its layer comes ("on demand"); for comparisons the engine can do that, too. What makes room is what the
same layer used longest ago, and only where that is not enough, something of another layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.placement.foresight import GateForesight
from moeedge.engine.types import Phase
from moeedge.native import Block
from moeedge.native.cache import ExpertCache
from moeedge.scheduler.policy import LayerPolicy, Policy

_RESIDENT = 1
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
        self.loaded = 0  # experts that a layer had to wait for
        self.uncached = 0  # and for which there was no room

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
        missing = int(np.count_nonzero(resident[layer, experts] != _RESIDENT))
        if missing == 0:
            return
        victims = np.argwhere(resident == _RESIDENT).astype(np.int32)
        utility = self._used[tuple(victims.T)]
        utility[victims[:, 0] != layer] += self._n_blocks  # not before all of this layer's
        found = self._cache.demand(layer, experts, victims, utility, _PATIENCE_S)
        self.loaded += missing
        self.uncached += experts.size - found
