"""Policies spac-paper and spac-program: MoE-SpAc by its paper and by its published program.

spac-paper: utilities s by Algorithm 1 as printed (utility.py), tau by Eq. 9-12, residency by section 3.4:
- prefetch: the queues of absent experts from level K down to tau, first in, first out within a level, which is the
  order of layers, as far as there are slots.
- eviction: of the resident experts only those with s < tau, lowest first. A hot expert (s >= tau) stays, also where an
  absent one has a higher utility.
- tau: Eq. 9 and 10 need unit times. Without a cost model Eq. 11 decides alone, and tau is the lowest threshold that
  satisfies it, so that as many experts are hot as the slots hold. Where none does, tau is K (Appendix C.2).

Eq. 11, W_e * n(tau) <= VRAM_left, in bytes: all experts of a pool have W_e bytes, so both sides are divided by W_e and
counted in slots. VRAM_left is the memory of the pool's free slots and of the resident experts that tau makes cold,
which the evictor frees. All layers of a pool share it: a layer has what the other layers leave at the same tau, so that
the constraint says that all hot experts of the pool fit its slots.

Appendix D: experts in use have score K + 1 (frozen); after use it drops to 0, "quickly recycled and refilled by other
weights". As in the published program (evict_layer), all experts of a layer that has been computed drop to 0 until the
next plan between passes. Before each layer the hot experts of the layers to come are planned for again with the room
that came free, at which Eq. 11 allows lower thresholds.

Eq. 9 and 10 with a cost model: what arrived for a layer since the last pass counts towards its n(tau), so that a pass
moves no more for a layer than its window carries. Departures: docs/lab/policies.md.

spac-program: the published program (repository lshAlgorithm/MoE-SpAc, ggml/src/ggml-backend.cpp). StateMachine::update
compares the activations of a step with the utility itself, d = f_t - s_t, so that s follows the frequency; up 5, down
1, both fixed, K = 5 (TOP_STAT). SpAc_Prefetcher has tau = 1, and no balancer. All else is spac-paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, FloatArray, IndexArray, Resident
from moeedge.policies import utility
from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, PolicyConfig
from moeedge.policies.cost_model import expert_seconds
from moeedge.policies.planner import PooledPolicy
from moeedge.policies.utility import thresholds


class SpacPaper(PooledPolicy):
    """Hot experts stay, absent hot ones come by the utility of Algorithm 1, cold ones leave by it."""

    name = "spac-paper"
    execution_model = ExecutionModel(refills_within_step=True)
    fixed_boundaries = (3, 1)  # Table 4, without adaptive boundaries
    has_adaptive_boundaries = has_balancer = True

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        self.cap = config.effective_cap
        super().__init__(shape, config, cap=self.cap)
        self._config = config
        self._binary, self._used_only = config.binary, config.used_only
        self._fixed_tau = config.fixed_tau if self.has_balancer else 1.0
        self._algorithm = utility.UtilityConfig(
            gamma=max(config.gamma, 2),  # floor(1 / 2) = 0: every expert would rise at every step
            cap=self.cap,
            forgetting=config.forgetting,
            boundaries="fixed" if not self.has_adaptive_boundaries or "no-ada-bc" in config.ablations else "floor",
            fixed=self.fixed_boundaries,
        )
        self._state = utility.initial_state(self._score.shape, self._algorithm)
        self._last_used: BoolArray = np.zeros(self._score.shape, dtype=np.bool_)
        self._level_start = (np.arange(shape.n_layers) * (self.cap + 1))[:, None]
        self._n_pairs = np.zeros(shape.n_layers)
        self._before: BoolArray | None = None  # [n_layers, n_experts], resident at the first plan since the last pass

    def observe(self, observation: Observation) -> None:
        """One step of Algorithm 1. A prefill is not a step: it counts an entire text."""
        if observation.prefill or observation.n_tokens < 1:
            return
        self._state = utility.observe(self._state, observation.counts, self._algorithm)
        np.greater(observation.counts, 0, out=self._last_used)
        self._n_pairs = observation.counts.sum(axis=1, dtype=np.float64)
        self._before = None

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold the hot experts; neither tokens nor predictions are read."""
        if self._before is None:
            self._before = np.asarray(resident != 0)
        return self._plan_for(self._utilities(), resident)

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        """Plans for the layers after `layer`, whose experts are in use; those of the layers before it count 0."""
        s = self._utilities()
        s[:layer] = 0.0
        s[layer] = np.where(resident[layer] != 0, np.float32(self.cap), np.float32(0.0))
        return self._plan_for(s, resident)

    def _utilities(self) -> FloatArray:
        return (self._last_used if self._binary else self._state.utility).astype(np.float32)

    def _plan_for(self, s: FloatArray, resident: Resident) -> Plan:
        tau = self._thresholds(s, resident)
        hot, held = s >= tau[:, None], np.asarray(resident != 0)
        # in ascending order: absent cold experts, 0; resident cold ones, below 1; absent hot ones; resident hot ones
        score = self._score
        np.multiply(s, held / np.float32(self.cap + 1), out=score)
        score[hot] = 1.0 + s[hot]
        score[hot & held] += self.cap
        self._utility, self._tau = s, tau
        self._fit(resident)
        allowed = hot & self._last_used if self._used_only else hot
        return self._moves(resident, self._max_uploads, allowed)

    def reset(self) -> None:
        """Starts with no utilities (Algorithm 1, lines 2-3)."""
        self._state = utility.initial_state(self._state.utility.shape, self._algorithm)
        self._last_used[:] = False
        self._n_pairs[:] = 0.0
        self._before = None

    def _thresholds(self, s: FloatArray, resident: Resident) -> FloatArray:
        if self._fixed_tau is not None:
            return np.full(self.shape.n_layers, self._fixed_tau, dtype=np.float32)
        cost = self._config.cost_model
        if self._binary:
            return np.ones(self.shape.n_layers, dtype=np.float32)
        absent = np.asarray(resident == 0)
        bins = self._level_start + s.astype(np.intp)  # by layer and level
        size = (self.shape.n_layers, self.cap + 1)
        n_absent = np.bincount(bins[absent], minlength=size[0] * size[1]).reshape(size)
        n_held = np.bincount(bins[~absent], minlength=size[0] * size[1]).reshape(size)
        # [n_layers, K]: absent experts at or above tau = j + 1, and resident ones below it
        n_uploads = n_absent[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        n_cold = n_held.cumsum(axis=1)[:, :-1]
        room = self._room(n_uploads, n_cold, n_held.sum(axis=1))
        if cost is None:
            fits = n_uploads <= room
            return np.where(fits.any(axis=1), fits.argmax(axis=1) + 1, self.cap).astype(np.float32)
        n_distinct = np.count_nonzero(self._last_used, axis=1).astype(np.float64)
        # tokens per expert, at which the unit times are read
        tokens = max(float(self._n_pairs.sum() / max(n_distinct.sum(), 1.0)), 1.0)
        index = np.minimum(np.arange(1, self.cap + 1), cost.cap)
        pair_s = float(expert_seconds(cost.cpu_expert_s, tokens)) / tokens
        expert_s = float(expert_seconds(cost.device_expert_s, tokens))
        cpu_s = cost.r_c[index] * (self._n_pairs * pair_s)[:, None]  # Eq. 7
        device_s = cost.r_g[index] * (n_distinct * expert_s)[:, None]  # Eq. 8
        window_s = np.maximum(cpu_s, device_s) + self._config.gamma * cost.draft_token_s / self.shape.n_layers
        arrived = np.count_nonzero(~absent & ~self._before, axis=1) if self._before is not None else np.zeros(size[0])
        in_time = (n_uploads + arrived[:, None]) * cost.transfer_expert_s <= window_s  # Eq. 10
        return thresholds(cpu_s, device_s, in_time & (n_uploads <= room))  # and 11

    def _room(self, n_uploads: IndexArray, n_cold: IndexArray, n_held: IndexArray) -> NDArray[np.float64]:
        """VRAM_left in slots [n_layers, K]: what is free at each tau, less the uploads of the other layers of the pool.

        n_uploads, n_cold: experts [n_layers, K]. n_held: [n_layers].
        """
        room = np.zeros(n_uploads.shape)
        for layers, capacity in self.shape.pools():
            free = max(capacity - int(n_held[layers].sum()), 0)
            left = free + n_cold[layers].sum(axis=0) - n_uploads[layers].sum(axis=0)
            room[layers] = left + n_uploads[layers]
        return room


class SpacProgram(SpacPaper):
    """The published program's utilities, boundaries, K and tau, with the residency of spac-paper."""

    name = "spac-program"
    fixed_boundaries = (5, 1)
    has_adaptive_boundaries = has_balancer = False
    CAP = 5  # K

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, replace(config, cap=self.CAP))

    def observe(self, observation: Observation) -> None:
        """One step, with the utility in place of the last step's activations."""
        self._state = replace(self._state, counts=self._state.utility.astype(np.int32))
        super().observe(observation)
