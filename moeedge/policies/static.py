"""Policies that move no expert once they are placed.

static   The most used experts of a profile, or, without one, of the first steps; then no expert moves.

none     No expert is moved; the CPU computes every expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeedge.policies.base import (
    CacheShape,
    ExpertPrediction,
    Observation,
    Plan,
    PolicyConfig,
    Resident,
    ScoringPolicy,
)
from moeedge.policies.planner import PooledPolicy

_N_STEPS = 16  # verifications that replace a profile


class Static(PooledPolicy):
    """Score: activations."""

    name = "static"

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config, evict=True)
        self._steps_left = _N_STEPS
        if config.profile is not None:
            self._score[:] = config.profile
            self._steps_left = 0

    def observe(self, observation: Observation) -> None:
        """Counts activations during the first steps."""
        if self._steps_left > 0:
            self._score += observation.counts.astype(np.float32)
            self._steps_left -= not observation.prefill

    def _set_utilities(self, marginal: list[float]) -> None:
        # the last is of layers without experts, whose group is -1
        least = np.array([*(max(value, 1e-30) for value in marginal), np.inf], dtype=np.float32)
        np.copyto(self._utility, self._score >= least[self.shape.group][:, None])


class NoCache(ScoringPolicy):
    """Plans no transfers."""

    name = "none"

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape)
        pairs = np.zeros((0, 2), dtype=np.int32)
        self._plan = Plan(
            tau=np.full(shape.n_layers, config.cap, dtype=np.float32),
            utility=self._utility,
            uploads=pairs,
            priority=np.zeros(0, dtype=np.uint8),
            victims=pairs,
            victim_utility=np.zeros(0, dtype=np.float32),
        )

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Returns the empty plan."""
        return self._plan
