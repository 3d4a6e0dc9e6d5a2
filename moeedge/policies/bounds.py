"""Policy oracle: knows the next step's counts and holds the experts that it uses most (a bound, not a system).

No policy that moves between steps can hit more pairs than this residency; it counts no transfer and looks one step
ahead. Its constructor takes the steps to come (`PolicyConfig.future`, [n_steps, n_layers, n_experts]).

Policy belady: what is used again last makes room (a bound, not a system).

Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal 5(2), 1966): MIN. Of
what is there and what was just used, what is used soonest stays. No cache that is filled by what was used hits more
distinct (layer, expert) cells; a policy that brings experts before their first use may. A step's cells are used at
once, and what was used need not stay, so that the choice is one of intervals between two uses, at most as many at a
time as there are slots: keeping the ones that end first is optimal. Its constructor takes the steps to come
(`PolicyConfig.future`, [n_steps, n_layers, n_experts]).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.planner import Planner

FloatArray = NDArray[np.float32]


class Oracle:
    """Score: activations of the next step."""

    name = "oracle"
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        self._future = steps_to_come(shape, config, self.name)
        self._planner = Planner(shape, config.cap, evict=config.evicts)
        self._next = 0  # step that the next plan is for
        self._score: FloatArray = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        self._utility: FloatArray = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        self._cap = np.float32(config.cap)
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)

    def observe(self, observation: Observation) -> None:
        """A step is over; prefills are no steps of the future."""
        self._next += not observation.prefill

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """What the next step uses most."""
        if self._next < len(self._future):
            np.copyto(self._score, self._future[self._next], casting="unsafe")
        else:
            self._score[:] = 0.0
        np.minimum(self._score, self._cap, out=self._utility)
        self._planner.fit(self._score, resident, 0.0)
        return self._planner.moves(self._score, self._utility, self._tau, resident)

    def reset(self) -> None:
        """The future goes on."""


def steps_to_come(shape: CacheShape, config: PolicyConfig, name: str) -> NDArray[np.integer]:
    """The future that a clairvoyant policy was given. Raises ValueError where there is none."""
    if config.future is None:
        raise ValueError(f'policy "{name}" needs to know the steps to come: it runs in a replay or simulation only')
    future = np.asarray(config.future)
    if future.ndim != 3 or future.shape[1:] != (shape.n_layers, shape.n_experts):
        raise ValueError(f"the future has shape {future.shape}, not steps x {shape.n_layers} x {shape.n_experts}")
    return future


class Belady:
    """Score: the sooner the next use, the higher; 0 for what is never used again."""

    name = "belady"
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        cells = (shape.n_layers, shape.n_experts)
        self._next_use = next_uses(steps_to_come(shape, config, self.name) > 0)
        self._planner = Planner(shape, config.cap, evict=config.evicts)
        self._step = 0
        self._used = np.zeros(cells, dtype=np.bool_)
        self._score: FloatArray = np.zeros(cells, dtype=np.float32)
        self._utility: FloatArray = np.zeros(cells, dtype=np.float32)
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)

    def observe(self, observation: Observation) -> None:
        """A step is over; prefills are no steps of the future, but what they used may stay."""
        np.greater(observation.counts, 0, out=self._used)
        self._step += not observation.prefill

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """Of what is there and what was used, what is used soonest."""
        n_steps = len(self._next_use)
        if self._step < n_steps:
            wait = self._next_use[self._step] - self._step  # 0: in the next step
            # the reciprocal orders by the wait and keeps its order in float32 for far more steps than traces have
            np.divide(np.float32(1.0), 1.0 + wait, out=self._score, casting="unsafe")
            self._score[self._next_use[self._step] >= n_steps] = 0.0
        else:
            self._score[:] = 0.0
        self._score *= self._used | (np.asarray(resident) != 0)  # nothing else may come
        np.copyto(self._utility, self._score)
        self._planner.fit(self._score, resident, 0.0)
        return self._planner.moves(self._score, self._utility, self._tau, resident, allowed=self._used)

    def reset(self) -> None:
        """The future goes on."""


def next_uses(used: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The next step, from each step on, that uses a cell; [n_steps, n_layers, n_experts], n_steps: none."""
    n_steps = len(used)
    found = np.empty(used.shape, dtype=np.int32)
    coming = np.full(used.shape[1:], n_steps, dtype=np.int32)
    for step in range(n_steps - 1, -1, -1):
        coming[used[step]] = step
        found[step] = coming
    return found
