"""Policies that place experts once: static, fiddler and none.

static   The most used experts of a profile, or, without one, of the first steps; then no expert moves.

fiddler  The most popular experts of an offline profile stay on the GPU, the CPU computes the others. Fiddler (Kamahori
         et al., ICLR 2025, arXiv 2402.07033), by its abstract and its repository (efeslab/fiddler,
         src/fiddler/mixtral.py); the paper's text was not at hand. Experts are ranked by popularity on calibration
         data, over all layers, and fill the GPU memory that is left (set_expert_loc); nothing is cached or prefetched
         at run time. Without a profile the first steps serve as one. Left out: where a missing expert has so many
         tokens that the CPU would take longer than one transfer (10 tokens by the repository's constants, a prompt
         rather than a verification), Fiddler moves its weights for that one use.

none     No expert is moved; the CPU computes every expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeedge.policies.base import (
    CacheShape,
    ExecutionModel,
    ExpertPrediction,
    Observation,
    Plan,
    PolicyConfig,
    Resident,
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


class Fiddler(Static):
    """Placement as in static, without a draft model."""

    name = "fiddler"
    execution_model = ExecutionModel(speculation=False)


class NoCache:
    """Plans no transfers."""

    name = "none"
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        pairs = np.zeros((0, 2), dtype=np.int32)
        self._plan = Plan(
            tau=np.full(shape.n_layers, config.cap, dtype=np.float32),
            utility=np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32),
            uploads=pairs,
            priority=np.zeros(0, dtype=np.uint8),
            victims=pairs,
            victim_utility=np.zeros(0, dtype=np.float32),
        )

    def observe(self, observation: Observation) -> None:
        """Learns nothing."""

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """The empty plan."""
        return self._plan

    def reset(self) -> None:
        """Keeps no state."""
