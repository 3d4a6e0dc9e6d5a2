"""Policies spac-paper and spac-program: MoE-SpAc by its paper and by its published program.

spac-paper: utilities by Algorithm 1 as printed (utility.py), tau by Eq. 7-12 with the warm-up ratios of the cost model,
uploads of all hot experts (s >= tau) that are absent, by priority, and residency as in Appendix D: an expert in use
cannot be evicted (the native library pins it), and after use its tag drops, so that it is evicted before others. In the
paper it drops to 0, within a pass, for the layers to come. A plan between two passes that did so would evict experts
that the next pass needs again: on gpt-oss-20b pair-hit is 0.35 with 4.0 uploads per layer and step, 0.44 with 1.4 where
the tag drops half a level, so that only experts of at least the same utility replace a used one, and 0.46 with 0.8
where it stays. Here it drops half a level.

The paper's per-layer room (Eq. 11, VRAM_left) is here the layer's even share of the free slots of its group's pool and
of those that hold experts below tau.

spac-program: Algorithm 1 compares the activations of a step with those of the step before, d = f_t - f_{t-1}. The
program (repository lshAlgorithm/MoE-SpAc, ggml/src/ggml-backend.cpp, StateMachine::update) compares them with the
utility itself, d = f_t - s_t, and steps s up or down by it: s follows the frequency instead of summing the signs of its
changes. This alone makes the printed rule better than a binary estimator and gives Table 4 of the paper its order
(docs/simulation.md). All else is spac-paper: the paper's boundaries, K, tau and residency. The program has fixed
boundaries (5 up, 1 down), K = 5 and tau = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency
from moeedge.policies.base import (
    BoolArray,
    CacheShape,
    ExpertPrediction,
    FloatArray,
    IndexArray,
    Observation,
    Plan,
    PolicyConfig,
    Resident,
)
from moeedge.policies.planner import PooledPolicy
from moeedge.policies.spac import utility
from moeedge.policies.spac.balancer import Workload, thresholds

_AFTER_USE = 0.5  # how far a used expert's tag drops below its utility


class SpacPaper(PooledPolicy):
    """Score: the utility s of Algorithm 1, lower after use."""

    name = "spac-paper"

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        self.cap = config.effective_cap
        super().__init__(shape, config, cap=self.cap)
        self._config = config
        self._binary, self._used_only, self._fixed_tau = config.binary, config.used_only, config.fixed_tau
        self._algorithm = utility.UtilityConfig(
            gamma=config.gamma if config.gamma > 0 else 2,  # floor(0 / 2) = 0: every expert would rise at every step
            cap=self.cap,
            forgetting=config.forgetting,
            boundaries="fixed" if "no-ada-bc" in config.ablations else "floor",
        )
        self._state = utility.initial_state(self._score.shape, self._algorithm)
        self._last_used: BoolArray = np.zeros(self._score.shape, dtype=np.bool_)
        self._level_start = (np.arange(shape.n_layers) * (self.cap + 1))[:, None]
        self._n_pairs = np.zeros(shape.n_layers)

    def observe(self, observation: Observation) -> None:
        """One step of Algorithm 1. A prefill is not a step: it counts an entire text."""
        if observation.prefill or observation.n_tokens < 1:
            return
        self._state = utility.observe(self._state, observation.counts, self._algorithm)
        np.greater(observation.counts, 0, out=self._last_used)
        self._n_pairs = observation.counts.sum(axis=1, dtype=np.float64)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold the hot experts; neither tokens nor predictions are read."""
        s = self._last_used.astype(np.float32) if self._binary else self._state.utility.astype(np.float32)
        tau = self._thresholds(s, resident)
        score = self._score
        np.copyto(score, s)
        score -= _AFTER_USE * (self._last_used & (resident == Residency.RESIDENT) & (s > 0))
        self._planner.fit(score, resident, 0.0)
        hot = s >= tau[:, None]
        allowed = hot & self._last_used if self._used_only else hot
        return self._planner.moves(score, s, tau, resident, allowed=allowed)

    def reset(self) -> None:
        """Starts with no utilities (Algorithm 1, lines 2-3)."""
        self._state = utility.initial_state(self._state.utility.shape, self._algorithm)
        self._last_used[:] = False
        self._n_pairs[:] = 0.0

    def _thresholds(self, s: FloatArray, resident: Resident) -> FloatArray:
        if self._fixed_tau is not None:
            return np.full(self.shape.n_layers, self._fixed_tau, dtype=np.float32)
        cost = self._config.cost_model
        if cost is None or self._binary:
            return np.ones(self.shape.n_layers, dtype=np.float32)
        absent = np.asarray(resident == 0)
        bins = self._level_start + s.astype(np.intp)  # by layer and level
        size = (self.shape.n_layers, self.cap + 1)
        n_absent = np.bincount(bins[absent], minlength=size[0] * size[1]).reshape(size)
        n_held = np.bincount(bins[~absent], minlength=size[0] * size[1]).reshape(size)
        # [n_layers, K]: absent experts at or above tau = j + 1, and resident ones below it
        n_uploads = n_absent[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        n_cold = n_held.cumsum(axis=1)[:, :-1]
        n_distinct = np.count_nonzero(self._last_used, axis=1).astype(np.float64)
        tokens = float(self._n_pairs.sum() / max(n_distinct.sum(), 1.0))  # per expert, at which the unit times are read
        index = np.minimum(np.arange(1, self.cap + 1), cost.cap)
        work = Workload.of_ratios(
            cost.r_c[index],
            cost.r_g[index],
            self._n_pairs,
            n_distinct,
            cost.cpu_s(max(tokens, 1.0)) / max(tokens, 1.0),  # per pair
            cost.device_s(max(tokens, 1.0)),  # per distinct expert
            n_uploads,
            self._room(n_cold, n_held.sum(axis=1)),
        )
        draft_share_s = self._config.gamma * cost.draft_token_s / self.shape.n_layers
        return thresholds(work, cost.transfer_expert_s, draft_share_s)

    def _room(self, n_cold: IndexArray, n_held: IndexArray) -> NDArray[np.float64]:
        """Slots that may be filled at each tau, [n_layers, K]; n_cold [n_layers, K], n_held [n_layers]: experts."""
        room = np.zeros(n_cold.shape)
        for layers, capacity in self.shape.pools():
            free = capacity - int(n_held[layers].sum())
            room[layers] = (max(free, 0) + n_cold[layers].sum(axis=0)) / layers.size
        return room


class SpacProgram(SpacPaper):
    """Score: the utility of the published program, lower after use."""

    name = "spac-program"

    def observe(self, observation: Observation) -> None:
        """One step, with the utility in place of the last step's activations."""
        self._state = replace(self._state, counts=self._state.utility.astype(np.int32))
        super().observe(observation)
