"""The clairvoyant bounds hold: no policy beats the one-step oracle in pairs, nor a demand-filled cache Belady."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeedge.lab.sim.policy_replay import NEVER, NextUse, Slots, belady_residency, oracle_residency
from moeedge.policies.base import CacheShape, Observation, PolicyConfig, check_plan
from moeedge.policies.registry import POLICIES, SIMULATED, make_policy

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
    policy = make_policy(name, shape, PolicyConfig())
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


def bounded(name: str, steps: Counts, n_slots: int) -> tuple[int, int]:
    """Pairs and distinct experts found resident under a bound."""
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
    _, bound = bounded("belady", steps, n_slots)
    for name in DEMAND_FILLED:
        assert hits(name, steps, n_slots)[1] <= bound, name


@settings(max_examples=30, deadline=None)
@given(steps=routings(), n_slots=st.integers(0, 3))
def test_belady_equals_the_best_of_all_choices(steps: Counts, n_slots: int) -> None:
    steps = steps[:7, :1, :5]
    assert bounded("belady", steps, n_slots)[1] == best_demand_filled(steps, n_slots)


@settings(max_examples=10, deadline=None)
@given(steps=routings(), n_slots=st.integers(0, 12))
def test_the_oracle_finds_most_pairs(steps: Counts, n_slots: int) -> None:
    best = sum(int(np.sort(counts.reshape(-1))[::-1][:n_slots].sum()) for counts in steps)
    assert bounded("oracle", steps, n_slots)[0] == best
    for name in POLICIES | SIMULATED:
        assert hits(name, steps, n_slots)[0] <= best, name


def test_a_classic_reference_string() -> None:
    """2 3 2 1 5 2 4 5 3 2 5 2 on three frames (Stallings, Operating Systems, Figure 8.14): OPT finds 6, LRU 5.

    OPT there must keep what it loads; passing by what is not used again finds one more.
    """
    string = [2, 3, 2, 1, 5, 2, 4, 5, 3, 2, 5, 2]
    steps = np.zeros((len(string), 1, 6), dtype=np.uint32)
    steps[np.arange(len(string)), 0, string] = 1
    assert bounded("belady", steps, 3)[1] == best_demand_filled(steps, 3) == 7
    assert hits("lru", steps, 3)[1] == 5
    assert hits("mixtral-offloading", steps, 3)[1] == 5


def test_next_use_skips_batches_that_do_not_count() -> None:
    counts = np.array([[[1, 0]], [[2, 0]], [[0, 0]], [[1, 1]]])
    next_use = NextUse([(counts[:2], np.array([True, False])), (counts[2:], np.array([True, True]))])
    assert next_use.first.tolist() == [0, 3]
    assert [tuple(array.tolist() for array in next_use.of(batch)) for batch in range(4)] == [
        ([0], [3]),
        ([0], [3]),
        ([], []),
        ([0, 1], [NEVER, NEVER]),
    ]
