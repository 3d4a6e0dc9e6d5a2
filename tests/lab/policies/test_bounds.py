"""The clairvoyant bounds hold: no policy beats the one-step oracle in pairs, nor a demand-filled cache Belady."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeedge.lab.policies.bounds import NEVER, NextUse, belady_residency, oracle_residency
from moeedge.lab.sim.policy_replay import Slots
from moeedge.lab.sim.replay import pairs_kept_at_most
from moeedge.policies.base import CacheShape, Observation, PolicyConfig, check_plan
from moeedge.policies.registry import ALL_POLICIES, BOUNDS, make_policy

# without predictions, these upload only experts that were just used
DEMAND_FILLED = ("lru", "lfu", "fate", "adapmoe", "hybrimoe", "sp-moe", "mixtral-offloading")
Counts = NDArray[np.uint32]  # [n_steps, n_layers, n_experts]


@st.composite
def routings(draw: st.DrawFn) -> Counts:
    """A few steps, most experts unused, some popular."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    shape = (draw(st.integers(2, 14)), draw(st.integers(1, 3)), draw(st.integers(2, 7)))
    popular = rng.random(shape[1:]) ** 2
    return (rng.random(shape) < popular).astype(np.uint32) * rng.integers(1, 5, shape, dtype=np.uint32)


def hits(name: str, steps: Counts, n_slots: int) -> tuple[int, int]:
    """Pairs and distinct experts found resident, over all steps; every plan is checked."""
    shape = CacheShape.uniform(*steps.shape[1:], n_slots)
    policy = make_policy(name, shape, PolicyConfig(future=steps))
    slots = Slots(shape)
    pairs = unique = 0
    for counts in steps:
        plan = policy.plan(slots.resident, [])
        check_plan(plan, shape, slots.resident, 4)
        slots.push(plan)
        assert np.count_nonzero(slots.resident) <= n_slots
        there = slots.resident > 0
        pairs += int(counts[there].sum())
        unique += int(np.count_nonzero(counts[there]))
        policy.observe(Observation(counts, 4, 3))
    return pairs, unique


def best_demand_filled(steps: Counts, n_slots: int) -> int:
    """The most distinct experts that a cache filled by use can find, by trying every choice."""
    found = {frozenset[int](): 0}
    for counts in steps:
        used = frozenset(np.flatnonzero(counts.reshape(-1)).tolist())
        after: dict[frozenset[int], int] = {}
        for held, n_found in found.items():
            n_found += len(held & used)
            for kept in _choices(held | used, n_slots):
                after[kept] = max(after.get(kept, -1), n_found)
        found = after
    return max(found.values())


def _choices(flat_ids: frozenset[int], n: int) -> list[frozenset[int]]:
    return [frozenset(kept) for kept in combinations(sorted(flat_ids), min(n, len(flat_ids)))]


@settings(max_examples=40, deadline=None)
@given(steps=routings(), n_slots=st.integers(0, 12))
def test_no_cache_filled_by_use_beats_belady(steps: Counts, n_slots: int) -> None:
    _, bound = hits("belady", steps, n_slots)
    for name in DEMAND_FILLED:
        assert hits(name, steps, n_slots)[1] <= bound, name


@settings(max_examples=30, deadline=None)
@given(steps=routings(), n_slots=st.integers(0, 3))
def test_belady_equals_the_best_of_all_choices(steps: Counts, n_slots: int) -> None:
    steps = steps[:7, :1, :5]
    assert hits("belady", steps, n_slots)[1] == best_demand_filled(steps, n_slots)


@settings(max_examples=10, deadline=None)
@given(steps=routings(), n_slots=st.integers(0, 12))
def test_the_oracle_finds_most_pairs(steps: Counts, n_slots: int) -> None:
    best = sum(int(np.sort(counts.reshape(-1))[::-1][:n_slots].sum()) for counts in steps)
    assert hits("oracle", steps, n_slots)[0] == best
    for name in ALL_POLICIES:
        assert hits(name, steps, n_slots)[0] <= best, name


def test_a_classic_reference_string() -> None:
    """2 3 2 1 5 2 4 5 3 2 5 2 on three frames (Stallings, Operating Systems, Figure 8.14): OPT finds 6, LRU 5.

    OPT there must keep what it loads; passing by what is not used again finds one more.
    """
    string = [2, 3, 2, 1, 5, 2, 4, 5, 3, 2, 5, 2]
    steps = np.zeros((len(string), 1, 6), dtype=np.uint32)
    steps[np.arange(len(string)), 0, string] = 1
    assert hits("belady", steps, 3)[1] == best_demand_filled(steps, 3) == 7
    assert hits("lru", steps, 3)[1] == 5
    assert hits("mixtral-offloading", steps, 3)[1] == 5


def test_next_use_skips_batches_that_do_not_count() -> None:
    counts = np.array([[[1, 0]], [[2, 0]], [[0, 0]], [[1, 1]]])
    next_use = NextUse([(counts[:2], np.array([True, False])), (counts[2:], np.array([True, True]))])
    assert next_use.first.tolist() == [0, 3]
    assert len(next_use) == 4
    assert [tuple(array.tolist() for array in next_use.of(batch)) for batch in range(4)] == [
        ([0], [3]),
        ([0], [3]),
        ([], []),
        ([0, 1], [NEVER, NEVER]),
    ]


def test_the_future_ends() -> None:
    """After it, plans still keep the rules."""
    shape = CacheShape.uniform(2, 4, 3)
    steps = np.ones((2, 2, 4), dtype=np.uint32)
    for name in BOUNDS:
        policy = make_policy(name, shape, PolicyConfig(future=steps))
        slots = Slots(shape)
        for counts in (*steps, *steps):
            plan = policy.plan(slots.resident, [])
            check_plan(plan, shape, slots.resident, 4)
            slots.push(plan)
            policy.observe(Observation(counts, 4, 3))
        assert len(policy.plan(slots.resident, []).uploads) == 0


def replayed(name: str, steps: Counts, n_slots: int) -> tuple[int, int]:
    """Pairs and distinct experts found resident by the array functions, as the replay uses them."""
    flat = steps.reshape(len(steps), -1).astype(np.int32)
    next_use = NextUse([(steps, np.ones(len(steps), dtype=np.bool_))])
    resident, coming = np.zeros(flat.shape[1], dtype=np.bool_), next_use.first.copy()
    pairs = unique = 0
    for step, counts in enumerate(flat):
        if name == "oracle":
            resident = oracle_residency(counts, resident, n_slots)
        assert np.count_nonzero(resident) <= n_slots
        pairs += int(counts[resident].sum())
        unique += int(np.count_nonzero(counts[resident]))
        if name == "belady":
            used, following = next_use.of(step)
            coming[used] = following
            resident = belady_residency(resident, used, coming, n_slots)
    return pairs, unique


@pytest.mark.parametrize("name", sorted(BOUNDS))
@settings(max_examples=30, deadline=None)
@given(steps=routings(), n_slots=st.integers(0, 12))
def test_policies_and_array_functions_reach_the_same_bound(name: str, steps: Counts, n_slots: int) -> None:
    bounded = 0 if name == "oracle" else 1
    assert replayed(name, steps, n_slots)[bounded] == hits(name, steps, n_slots)[bounded]


def best_pairs_kept(steps: Counts, n_slots: int) -> int:
    """The most pairs that a cache filled by use can find, by trying every choice."""
    found = {frozenset[int](): 0}
    for counts in steps:
        flat = counts.reshape(-1)
        used = frozenset(np.flatnonzero(flat).tolist())
        after: dict[frozenset[int], int] = {}
        for held, n_found in found.items():
            n_found += int(sum(flat[i] for i in held & used))
            for kept in _choices(held | used, n_slots):
                after[kept] = max(after.get(kept, -1), n_found)
        found = after
    return max(found.values())


def pairs_bound(steps: Counts, n_slots: int) -> float:
    counted = np.ones(len(steps), dtype=np.bool_)
    middle = len(steps) // 2  # in two chunks
    chunks = [(steps[:middle], counted[:middle]), (steps[middle:], counted[middle:])]
    return pairs_kept_at_most(chunks, len(steps), n_slots)


@settings(max_examples=40, deadline=None)
@given(steps=routings(), n_slots=st.integers(0, 12))
def test_no_cache_filled_by_use_beats_the_bound_of_pairs(steps: Counts, n_slots: int) -> None:
    bound = pairs_bound(steps, n_slots) + 1e-6
    for name in (*DEMAND_FILLED, "belady"):
        assert hits(name, steps, n_slots)[0] <= bound, name


@settings(max_examples=30, deadline=None)
@given(steps=routings(), n_slots=st.integers(0, 3))
def test_the_bound_of_pairs_is_near_the_best_of_all_choices(steps: Counts, n_slots: int) -> None:
    steps = steps[:7, :1, :5]
    best, bound = best_pairs_kept(steps, n_slots), pairs_bound(steps, n_slots)
    assert best <= bound + 1e-6
    unlimited = pairs_bound(steps, steps[0].size)
    assert bound <= unlimited + 1e-6 and best_pairs_kept(steps, 5) == pytest.approx(unlimited)
    if n_slots == 0:
        assert bound == pytest.approx(0.0, abs=1e-6)


def test_min_is_no_bound_of_pairs() -> None:
    """One slot: MIN keeps the expert that is used sooner, by one token; the other is used by nine."""
    steps = np.array([[[1, 9]], [[1, 0]], [[0, 9]]], dtype=np.uint32)
    assert hits("belady", steps, 1) == (1, 1)
    assert best_pairs_kept(steps, 1) == 9
    assert pairs_bound(steps, 1) >= 9


def test_a_prompts_uses_keep_experts_and_are_no_hits() -> None:
    steps = np.array([[[3, 0]], [[2, 1]], [[1, 1]]], dtype=np.uint32)
    assert pairs_kept_at_most([(steps, np.array([False, True, True]))], 3, 2) == pytest.approx(2 + 1 + 1)
    assert pairs_kept_at_most([(steps, np.array([False, False, True]))], 3, 2) == pytest.approx(2)
