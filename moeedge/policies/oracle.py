"""Policy oracle: knows the next step's counts and holds the experts that it uses most (a bound, not a system).

No policy that moves between steps can hit more pairs than this residency; it counts no transfer and looks one step
ahead. Its constructor takes the steps to come (`PolicyConfig.future`, [n_steps, n_layers, n_experts]).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.config import PolicyConfig
from moeedge.scheduler.plan import Planner
from moeedge.scheduler.policy import CacheShape, Hints, Observation, Plan, Resident, Traits

FloatArray = NDArray[np.float32]


class Oracle:
    """Score: activations of the next step."""

    name = "oracle"
    traits = Traits()
    needs: frozenset[str] = frozenset()

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

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: Hints | None = None) -> Plan:
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
