"""Policy static: the most used experts, for good. Of a profile where one is given, else of the first steps.

Until the first steps are over, the most used so far; from then on nothing moves.

Policy fiddler: the most popular experts of an offline profile are on the GPU for good, the CPU computes the rest.

Fiddler (Kamahori et al., ICLR 2025, arXiv 2402.07033), by its abstract and its repository (efeslab/fiddler,
src/fiddler/mixtral.py); the paper's text was not at hand. Experts are ranked by popularity on calibration data, over
all layers, and the first of them fill the GPU memory that is left (set_expert_loc); at run time nothing is cached or
prefetched. An expert that is missing is computed on the CPU.

Not here: where so many tokens want a missing expert that the CPU would take longer than one transfer (10 tokens by the
repository's constants, a prompt rather than a verification), its weights are moved for that once. Without a profile
the first steps serve as one, as for policy static.

Policy none: nothing is moved, every expert is computed on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.planner import Planner

FloatArray = NDArray[np.float32]
N_STEPS = 16  # verifications, without a profile


class Static:
    """Score: activations per token, summed up."""

    name = "static"
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()

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

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
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


class Fiddler(Static):
    """Placement as policy static."""

    name = "fiddler"
    execution_model = ExecutionModel(speculation=False)


class Nothing:
    """Plans nothing, whatever it sees."""

    name = "none"
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        nobody = np.zeros((0, 2), dtype=np.int32)
        self._plan = Plan(
            tau=np.full(shape.n_layers, config.cap, dtype=np.float32),
            utility=np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32),
            uploads=nobody,
            priority=np.zeros(0, dtype=np.uint8),
            victims=nobody,
            victim_utility=np.zeros(0, dtype=np.float32),
        )

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """The empty plan."""
        return self._plan

    def reset(self) -> None:
        """Nothing to forget."""
