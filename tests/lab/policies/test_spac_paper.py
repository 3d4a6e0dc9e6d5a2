"""MoE-SpAc as printed and as published: its residency (section 3.4), its program, and Appendix D, in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.lab.sim.policy_replay import Slots
from moeedge.policies.base import CacheShape, Observation, PolicyConfig
from moeedge.policies.cost_model import CostModel
from moeedge.policies.registry import make_policy
from tests.support.costs import cost_model
from tests.support.plans import check_plan

GAMMA, CAP, UP, DOWN = 8, 5, 5, 1  # of the program, whatever the configuration says
SHAPE = CacheShape.uniform(2, 6, 12)
PAPERS_CAP, N_LAYERS, N_EXPERTS = 4, 3, 10
POOLS, SLOTS = np.array([0, 1, 0], dtype=np.int32), np.array([6, 3], dtype=np.int32)
SHAPES = [CacheShape.uniform(N_LAYERS, N_EXPERTS, n_slots) for n_slots in (5, 9)]
SHAPES.append(CacheShape(N_LAYERS, N_EXPERTS, POOLS, SLOTS))
# the CPU is the slower side at every tau, and Eq. 10 always holds: Eq. 11 decides
FREE_TRANSFERS = cost_model(1.0, 0.01, 0.0, r_c=np.linspace(0.5, 1.0, 5), r_g=np.linspace(0.5, 0.0, 5))


def observation(counts: NDArray[np.uint32]) -> Observation:
    return Observation(counts, GAMMA + 1, GAMMA)


def expected_tau(s: np.ndarray, layers: np.ndarray, capacity: int) -> int:
    """The lowest threshold at which all hot experts of the pool have a slot, else K."""
    return next((tau for tau in range(1, PAPERS_CAP + 1) if np.count_nonzero(s[layers] >= tau) <= capacity), PAPERS_CAP)


@pytest.mark.parametrize("shape", SHAPES, ids=["tight", "wide", "pools"])
@pytest.mark.parametrize("units", [None, FREE_TRANSFERS], ids=["replay", "measured"])
def test_hot_experts_stay_and_come_level_by_level(shape: CacheShape, units: CostModel | None) -> None:
    rng = np.random.default_rng(3)
    policy = make_policy("spac-paper", shape, PolicyConfig(gamma=GAMMA, cap=PAPERS_CAP, cost_model=units))
    slots = Slots(shape)
    n_evictions = 0
    for _ in range(150):
        counts = rng.integers(0, GAMMA + 2, (N_LAYERS, N_EXPERTS)).astype(np.uint32)
        policy.observe(observation(counts))
        before = slots.resident.copy()
        plan = policy.plan(before, [])
        check_plan(plan, shape, before, PAPERS_CAP)
        s = plan.utility
        for layers, capacity in shape.pools():
            assert set(plan.tau[layers]) == {expected_tau(s, layers, capacity)}
            tau = plan.tau[layers[0]]
            queue = [
                (layer, expert)
                for level in range(PAPERS_CAP, int(tau) - 1, -1)
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


def test_the_utility_follows_the_counts_and_not_their_changes() -> None:
    """StateMachine::update with its constants; a count that stays high keeps raising the utility."""
    rng = np.random.default_rng(1)
    policy = make_policy("spac-program", SHAPE, PolicyConfig(gamma=GAMMA, cap=4))
    expected = np.zeros((2, 6), dtype=int)
    for _ in range(200):
        counts = rng.integers(0, GAMMA + 2, (2, 6)).astype(np.uint32)
        counts[:, 0] = GAMMA + 1
        policy.observe(observation(counts))
        for expert in np.ndindex(2, 6):
            difference = int(counts[expert]) - expected[expert]
            if difference >= UP:
                expected[expert] = min(CAP, expected[expert] + 1)
            elif -difference >= DOWN:
                expected[expert] = max(0, expected[expert] - 1)
        plan = policy.plan(np.zeros((2, 6), dtype=np.uint8), [])
        assert np.array_equal(plan.utility, expected)
        assert (plan.tau == 1).all()
    assert expected[:, 0].tolist() == [CAP, CAP]


def test_a_computed_layer_makes_room_for_those_to_come() -> None:
    """Appendix D on three layers with as many slots as one layer has hot experts: the slots go from layer to layer."""
    shape = CacheShape.uniform(3, 4, 2)
    policy = make_policy("spac-program", shape, PolicyConfig(gamma=GAMMA))
    counts = np.zeros((3, 4), dtype=np.uint32)
    counts[:, :2] = GAMMA + 1
    policy.observe(observation(counts))
    slots = Slots(shape)
    slots.push(policy.plan(slots.resident, []))
    found = []
    for layer in range(3):
        plan = policy.plan_layer(layer, slots.resident)
        check_plan(plan, shape, slots.resident, CAP)
        assert all(victim[0] < layer < upload[0] for victim, upload in zip(plan.victims, plan.uploads, strict=False))
        slots.push(plan)
        found.append(np.flatnonzero(slots.resident[layer]).tolist())
    # layer 0 has both; as layer 1 is computed its own are too late, and layer 2's take the slots of layer 0
    assert found == [[0, 1], [], [0, 1]]


def test_equation_10_counts_what_has_arrived_for_a_layer_since_the_last_pass() -> None:
    """A layer's window, 24 pairs on the CPU at 1 s, carries three transfers of 7.9 s, however often is planned."""
    curves = {"cpu_expert_s": np.array([0.0, 1.0]), "r_c": np.linspace(0.99, 1.0, 5), "r_g": np.zeros(5)}
    cost = cost_model(1.0, 0.1, 7.9, draft_token_s=0.0, block_overhead_s=0.0, **curves)
    shape = CacheShape.uniform(2, 10, 20)
    config = PolicyConfig(gamma=GAMMA, cost_model=cost, ablations=frozenset({"no-ada-bc"}))  # 3 up
    policy, slots = make_policy("spac-paper", shape, config), Slots(shape)
    for counts in ([3, 3, 3, 0, 0], [6, 6, 6, 3, 3]):  # utilities 2 and 1
        policy.observe(observation(np.array([counts + [0] * 5] * 2, dtype=np.uint32)))
    plan = policy.plan(slots.resident, [])
    assert plan.tau.tolist() == [2, 2] and plan.uploads[:, 1].tolist() == [0, 1, 2] * 2
    slots.push(plan)
    assert len(policy.plan(slots.resident, []).uploads) == len(policy.plan_layer(0, slots.resident).uploads) == 0
    policy.reset()
    for counts in ([3, 3, 3, 0, 0], [6, 6, 6, 3, 3]):
        policy.observe(observation(np.array([counts + [0] * 5] * 2, dtype=np.uint32)))
    assert policy.plan(slots.resident, []).uploads[:, 1].tolist() == [3, 4] * 2  # in the next pass


def test_a_plan_carries_its_most_useful_uploads() -> None:
    counts = np.zeros((1, 6), dtype=np.uint32)
    policy = make_policy("spac-program", CacheShape.uniform(1, 6, 4), PolicyConfig(cap=4, max_uploads=2.0))
    for _ in range(4):
        counts[0, 1] = counts[0, 4] = 9
        policy.observe(observation(counts))
    counts[0, 0] = 9
    policy.observe(observation(counts))
    assert policy.plan(np.zeros((1, 6), dtype=np.uint8), []).uploads[:, 1].tolist() == [1, 4]


def test_unused_experts_stay_cold_with_one_draft() -> None:
    """floor(1 / 2) is 0, and with boundaries of 0 no change would count as a rise."""
    policy = make_policy("spac-paper", SHAPES[0], PolicyConfig(gamma=1, cap=PAPERS_CAP))
    counts = np.zeros((N_LAYERS, N_EXPERTS), dtype=np.uint32)
    counts[:, 0] = 2
    for _ in range(6):
        policy.observe(observation(counts))
    assert not policy.plan(np.zeros((N_LAYERS, N_EXPERTS), dtype=np.uint8), []).utility[:, 1:].any()
