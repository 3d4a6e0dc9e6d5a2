"""Policy lfu: least frequently used with decay; what is used often lately stays, and only what was used comes.

Not of one paper: the decayed frequency is the classic compromise between LFU and LRU (LRFU: Lee et al., IEEE
Transactions on Computers 50(12), 2001, section 2: every use weighs (1/2)^(lambda * age)). One pool for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.planner import Planner

FloatArray = NDArray[np.float32]

_KEPT = np.float32(0.9)  # of a frequency, per step: the half-life is 6.6 steps
_CAP = 4.0  # uses per utility level, so that what was used most comes first


class Lfu:
    """Score: decayed number of uses."""

    name = "lfu"
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        cells = (shape.n_layers, shape.n_experts)
        self._planner = Planner(shape, config.cap, evict=config.evicts)
        self._count: FloatArray = np.zeros(cells, dtype=np.float32)
        self._used = np.zeros(cells, dtype=np.bool_)
        self._utility: FloatArray = np.zeros(cells, dtype=np.float32)
        self._cap = np.float32(config.cap)
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)

    def observe(self, observation: Observation) -> None:
        """Counts; a prefill as what its mean token used, or one prompt would outweigh every later step."""
        self._count *= _KEPT
        weight = 1.0 / max(observation.n_tokens, 1) if observation.prefill else 1.0
        self._count += observation.counts * np.float32(weight)
        np.greater(observation.counts, 0, out=self._used)
        np.minimum(self._count / np.float32(_CAP), self._cap, out=self._utility)

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """Loads what was missed and is used more often than something there."""
        self._planner.fit(self._count, resident, 0.0)
        return self._planner.moves(self._count, self._utility, self._tau, resident, allowed=self._used)

    def reset(self) -> None:
        """What was used often stays likely."""
