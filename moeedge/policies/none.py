"""Policy none: nothing is moved, every expert is computed on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeedge.policies.config import PolicyConfig
from moeedge.scheduler.policy import CacheShape, Hints, Observation, Plan, Resident, Traits


class Nothing:
    """Plans nothing, whatever it sees."""

    name = "none"
    traits = Traits()
    needs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        nobody = np.zeros((0, 2), dtype=np.int32)
        self._plan = Plan(
            tau=np.full(shape.n_layers, config.cap, dtype=np.float32),
            utility=np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32),
            uploads=nobody,
            levels=np.zeros(0, dtype=np.uint8),
            victims=nobody,
            victim_utility=np.zeros(0, dtype=np.float32),
        )

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: Hints | None = None) -> Plan:
        """The empty plan."""
        return self._plan

    def reset(self) -> None:
        """Nothing to forget."""
