"""Policy static: the most used experts, for good. Of a profile where one is given, else of the first steps.

Until the first steps are over, the most used so far; from then on nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.config import PolicyConfig
from moeedge.scheduler.plan import Planner
from moeedge.scheduler.policy import CacheShape, Hints, Observation, Plan, Resident, Traits

FloatArray = NDArray[np.float32]
N_STEPS = 16  # verifications, without a profile


class Static:
    """Score: activations per token, summed up."""

    name = "static"
    traits = Traits()
    needs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        cells = (shape.n_layers, shape.n_experts)
        self._planner = Planner(shape, config.cap)
        self._score: FloatArray = np.zeros(cells, dtype=np.float32)
        self._utility: FloatArray = np.zeros(cells, dtype=np.float32)
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)
        self._steps_left = N_STEPS
        if config.profile is not None:
            self._score[:] = config.profile
            self._steps_left = 0

    def observe(self, observation: Observation) -> None:
        """Counts, during the first steps."""
        if self._steps_left > 0:
            self._score += observation.counts.astype(np.float32)
            self._steps_left -= not observation.prefill

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: Hints | None = None) -> Plan:
        """Loads what belongs there and is missing; nothing, once it is all there."""
        marginal = self._planner.fit(self._score, resident, 0.0)
        np.copyto(self._utility, self._score >= _of_layers(marginal, self._planner.shape))
        return self._planner.moves(self._score, self._utility, self._tau, resident)

    def reset(self) -> None:
        """What was learned stays."""


def _of_layers(marginal: list[float], shape: CacheShape) -> FloatArray:
    """The least score that fits, [n_layers, 1]; nothing fits without a group."""
    least = np.array([*(max(value, 1e-30) for value in marginal), np.inf], dtype=np.float32)
    return np.asarray(least[shape.group][:, None])
