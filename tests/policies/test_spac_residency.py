"""The residency of MoE-SpAc's section 3.4 and its Eq. 11, against loops over experts."""

from __future__ import annotations

import numpy as np
import pytest

from moeedge.lab.sim.policy_replay import Slots
from moeedge.policies.base import CacheShape, Observation, PolicyConfig, check_plan
from moeedge.policies.cost_model import CostModel
from moeedge.policies.registry import make_policy

GAMMA, CAP, N_LAYERS, N_EXPERTS = 8, 4, 3, 10
# the CPU is the slower side at every tau, and Eq. 10 always holds: Eq. 11 decides
FREE_TRANSFERS = CostModel(
    cpu_expert_s=np.array([0.0, 1.0, 2.0]),
    device_expert_s=np.array([0.0, 0.01, 0.01]),
    transfer_expert_s=0.0,
    draft_token_s=0.0,
    block_overhead_s=0.0,
    r_c=np.linspace(0.5, 1.0, CAP + 1),
    r_g=np.linspace(0.5, 0.0, CAP + 1),
)


def two_pools(size: int) -> CacheShape:
    return CacheShape(
        N_LAYERS, N_EXPERTS, np.array([0, 1, 0], dtype=np.int32), np.array([size, size // 2], dtype=np.int32)
    )


def one_pool(size: int) -> CacheShape:
    return CacheShape.uniform(N_LAYERS, N_EXPERTS, size)


def expected_tau(s: np.ndarray, layers: np.ndarray, capacity: int) -> int:
    """The lowest threshold at which all hot experts of the pool have a slot, else K."""
    return next((tau for tau in range(1, CAP + 1) if np.count_nonzero(s[layers] >= tau) <= capacity), CAP)


@pytest.mark.parametrize("shape", [one_pool(5), one_pool(9), two_pools(6)], ids=["tight", "wide", "pools"])
@pytest.mark.parametrize("cost_model", [None, FREE_TRANSFERS], ids=["replay", "measured"])
def test_hot_experts_stay_and_come_level_by_level(shape: CacheShape, cost_model: CostModel | None) -> None:
    rng = np.random.default_rng(3)
    policy = make_policy("spac-paper", shape, PolicyConfig(gamma=GAMMA, cap=CAP, cost_model=cost_model))
    slots = Slots(shape)
    n_evictions = 0
    for _ in range(150):
        counts = rng.integers(0, GAMMA + 2, (N_LAYERS, N_EXPERTS)).astype(np.uint32)
        policy.observe(Observation(counts, GAMMA + 1, GAMMA))
        before = slots.resident.copy()
        plan = policy.plan(before, [])
        check_plan(plan, shape, before, CAP)
        s = plan.utility
        for layers, capacity in shape.pools():
            assert set(plan.tau[layers]) == {expected_tau(s, layers, capacity)}
            tau = plan.tau[layers[0]]
            queue = [
                (layer, expert)
                for level in range(CAP, int(tau) - 1, -1)
                for layer in layers
                for expert in range(N_EXPERTS)
                if s[layer, expert] == level and not before[layer, expert]
            ]
            cold = int(np.count_nonzero((before[layers] > 0) & (s[layers] < tau)))
            room = capacity - int(before[layers].sum()) + cold
            uploads = [tuple(pair) for pair in plan.uploads.tolist() if pair[0] in layers]
            assert uploads == queue[:room]
        assert all(s[layer, expert] < plan.tau[layer] for layer, expert in plan.victims.tolist())
        slots.push(plan)
        n_evictions += int(np.count_nonzero(before & ~slots.resident))
        kept = before.astype(bool) & (s >= plan.tau[:, None])
        assert slots.resident[kept].all()
    assert n_evictions > 0


def test_a_plan_carries_its_most_useful_uploads() -> None:
    counts = np.zeros((1, 6), dtype=np.uint32)
    policy = make_policy("spac-program", CacheShape.uniform(1, 6, 4), PolicyConfig(cap=CAP, max_uploads=2.0))
    for _ in range(4):
        counts[0, 1] = counts[0, 4] = 9
        policy.observe(Observation(counts, GAMMA + 1, GAMMA))
    counts[0, 0] = 9
    policy.observe(Observation(counts, GAMMA + 1, GAMMA))
    assert policy.plan(np.zeros((1, 6), dtype=np.uint8), []).uploads[:, 1].tolist() == [1, 4]
