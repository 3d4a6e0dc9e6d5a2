"""Whole layers, placed for good: what llama.cpp's split and the offload of vLLM and Accelerate share.

Slots that do not make a whole layer stay empty. What a system brings for one pass does not stay: no plan speaks of it,
the traits do (`layerwise` and `device_only`: of an absent layer, what is used crosses the link, in every step).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.config import PolicyConfig
from moeedge.scheduler.policy import CacheShape, Hints, Observation, Plan, Resident, Traits
from moeedge.scheduler.shares import Shares

FloatArray = NDArray[np.float32]


class Layers:
    """Holds as many whole layers as fit, from the last one or from the first one."""

    name: str
    traits: Traits
    needs: frozenset[str] = frozenset()
    from_last = True

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        score: FloatArray = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        shares = np.zeros(shape.n_layers, dtype=np.intp)
        for group, capacity in enumerate(shape.capacity.tolist()):
            layers = np.flatnonzero(shape.group == group)
            n_whole = min(capacity // shape.n_experts, layers.size)
            chosen = layers[layers.size - n_whole :] if self.from_last else layers[:n_whole]
            score[chosen] = 1.0
            shares[chosen] = shape.n_experts
        self._score = score
        self._planner = Shares(shape, config.cap, shares)

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: Hints | None = None) -> Plan:
        """Loads the layers that belong there and are missing: once."""
        keep = self._planner.best(self._score, resident)
        return self._planner.plan(keep, self._score, self._score, resident)

    def reset(self) -> None:
        """Nothing to forget."""
