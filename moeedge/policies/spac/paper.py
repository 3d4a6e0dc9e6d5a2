"""Policy spac-paper: MoE-SpAc's rules, Algorithm 1 as printed, eviction after use softened.

Utilities by Algorithm 1 (scheduler/utility.py), tau by Eq. 7-12 with the warm-up ratios of the units, uploads of all
hot experts (s >= tau) that are absent, level by level, and residency as in Appendix D: an expert in use cannot be
evicted (the native library pins it), and after use its tag drops, so that it is recycled before others. In the paper
it drops to 0, within a pass, for the layers to come. A plan between two passes that did so would throw out what the
next pass needs again: on gpt-oss-20b pair-hit is 0.35 with 4.0 uploads per layer and step, 0.44 with 1.4 where the tag
drops half a level, so that only experts of at least the same utility replace a used one, and 0.46 with 0.8 where it
stays. The half level is what is used here.

The paper's per-layer room (Eq. 11, VRAM_left) is here the layer's even share of what its group's pool could give: the
free slots and the experts below tau.

Policy spac-program: MoE-SpAc as its published program updates utilities, which is not as Algorithm 1 is printed.

Algorithm 1 compares the activations of a step with those of the step before, d = f_t - f_{t-1}. The program (repository
lshAlgorithm/MoE-SpAc, ggml/src/ggml-backend.cpp, StateMachine::update) compares them with the utility itself,
d = f_t - s_t, and steps s up or down by it: s follows the frequency instead of summing the signs of its changes. This
alone takes the printed rule past a binary estimator, and Table 4 of the paper into its order (docs/simulation.md).

All else is spac-paper: the paper's boundaries, K, tau and residency. The program has fixed boundaries (5 up, 1 down),
K = 5 and tau = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import (
    RESIDENT,
    CacheShape,
    ExecutionModel,
    ExpertPrediction,
    Observation,
    Plan,
    PolicyConfig,
    Resident,
)
from moeedge.policies.planner import Planner
from moeedge.policies.spac import utility
from moeedge.policies.spac.balancer import Workload, thresholds

FloatArray = NDArray[np.float32]

_RECYCLED = 0.5  # how far a used expert's tag falls below its utility


class SpacPaper:
    """See the module."""

    name = "spac-paper"
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        self._binary = config.binary
        self._used_only = config.used_only
        self._fixed_tau = config.fixed_tau
        self.shape = shape
        self._gamma = config.gamma
        self._units = config.cost_model
        self.cap = config.effective_cap
        self._config = utility.UtilityConfig(
            gamma=config.gamma if config.gamma > 0 else 2,  # floor(0 / 2) = 0: every expert would rise at every step
            cap=self.cap,
            forgetting=config.forgetting,
            boundaries="fixed" if "no-ada-bc" in config.ablations else "floor",
        )
        cells = (shape.n_layers, shape.n_experts)
        self._state = utility.initial_state(cells, self._config)
        self._planner = Planner(shape, self.cap, evict=config.evicts)
        self._used = np.zeros(cells, dtype=np.bool_)
        self._first_level = (np.arange(shape.n_layers) * (self.cap + 1))[:, None]
        self._n_pairs = np.zeros(shape.n_layers)
        self._score: FloatArray = np.zeros(cells, dtype=np.float32)

    def observe(self, observation: Observation) -> None:
        """One step of Algorithm 1. A prefill is none: it counts a whole text."""
        if observation.prefill or observation.n_tokens < 1:
            return
        self._state = utility.observe(self._state, observation.counts, self._config)
        np.greater(observation.counts, 0, out=self._used)
        self._n_pairs = observation.counts.sum(axis=1, dtype=np.float64)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """What to move; what is coming plays no part."""
        s = self._used.astype(np.float32) if self._binary else self._state.utility.astype(np.float32)
        tau = self._thresholds(s, resident)
        score = self._score
        np.copyto(score, s)
        score -= _RECYCLED * (self._used & (resident == RESIDENT) & (s > 0))
        self._planner.fit(score, resident, 0.0)
        hot = s >= tau[:, None]
        allowed = hot & self._used if self._used_only else hot
        return self._planner.moves(score, s, tau, resident, allowed=allowed)

    def reset(self) -> None:
        """A new conversation starts with no utilities (Algorithm 1, lines 2-3)."""
        self._state = utility.initial_state(self._state.utility.shape, self._config)
        self._used[:] = False
        self._n_pairs[:] = 0.0

    def _thresholds(self, s: FloatArray, resident: Resident) -> FloatArray:
        if self._fixed_tau is not None:
            return np.full(self.shape.n_layers, self._fixed_tau, dtype=np.float32)
        units = self._units
        if units is None or self._binary:
            return np.ones(self.shape.n_layers, dtype=np.float32)
        absent = np.asarray(resident == 0)
        priority = self._first_level + s.astype(np.intp)
        n_cells, cells = self.shape.n_layers * (self.cap + 1), (self.shape.n_layers, self.cap + 1)
        # [n_layers, K]: experts at or above tau = j + 1 that are absent, and those below it that are there
        absent_at = np.bincount(priority[absent], minlength=n_cells).reshape(cells)
        there_at = np.bincount(priority[~absent], minlength=n_cells).reshape(cells)
        n_uploads = absent_at[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        cold_there = there_at.cumsum(axis=1)[:, :-1]
        n_distinct = np.count_nonzero(self._used, axis=1).astype(np.float64)
        tokens = float(self._n_pairs.sum() / max(n_distinct.sum(), 1.0))  # per expert, where the unit times are read
        index = np.minimum(np.arange(1, self.cap + 1), units.cap)
        work = Workload.of_ratios(
            units.r_c[index],
            units.r_g[index],
            self._n_pairs,
            n_distinct,
            units.cpu_s(max(tokens, 1.0)) / max(tokens, 1.0),  # per pair
            units.device_s(max(tokens, 1.0)),  # per distinct expert
            n_uploads,
            self._room(cold_there, there_at.sum(axis=1)),
        )
        draft_share_s = self._gamma * units.draft_token_s / self.shape.n_layers
        return thresholds(work, units.transfer_expert_s, draft_share_s)

    def _room(self, cold_there: NDArray[np.intp], n_there: NDArray[np.intp]) -> NDArray[np.float64]:
        """Slots that may be filled at each tau, [n_layers, K]."""
        room = np.zeros(cold_there.shape)
        for group, capacity in enumerate(self.shape.capacity.tolist()):
            layers = self.shape.group == group
            if layers.any():
                free = capacity - int(n_there[layers].sum())
                room[layers] = (max(free, 0) + cold_there[layers].sum(axis=0)) / np.count_nonzero(layers)
        return room


class SpacProgram(SpacPaper):
    """See the module."""

    name = "spac-program"

    def observe(self, observation: Observation) -> None:
        """One step, in which the utility stands where Algorithm 1 has the last step's activations."""
        self._state = replace(self._state, counts=self._state.utility.astype(np.int32))
        super().observe(observation)
