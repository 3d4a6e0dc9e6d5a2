"""The clairvoyant bounds hold: no policy beats the one-step oracle in pairs, nor a demand-filled cache Belady."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeedge.lab.sim.policy_replay import NEVER, BoundReplay, HitStats, next_uses
from moeedge.lab.traces.schedule import Batch
from moeedge.policies.base import CacheShape, ExecutionModel
from moeedge.policies.registry import POLICIES, SIMULATED, make_policy
from tests.support.plans import CheckedReplay

# without predictions, these upload only experts that were just used
DEMAND_FILLED = ("lru", "lfu", "fate", "adapmoe", "hybrimoe", "sp-moe", "mixtral-offloading")


def batches_of(counts: NDArray[np.int32], n_prompts: int = 0) -> list[Batch]:
    """Batches of one text from counts [n, n_layers, n_experts]; the first ones are prompts, which no figure counts."""
    return [
        Batch(counts=each, ids=None, n_tokens=4, n_accepted=3, is_first=at == 0, prefill=at < n_prompts)
        for at, each in enumerate(counts)
    ]


@st.composite
def routings(draw: st.DrawFn, n_batches: int = 14, n_layers: int = 3, n_experts: int = 7) -> list[Batch]:
    """At most so many batches, most experts unused, some popular; the first may be a prompt."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    shape = (draw(st.integers(2, n_batches)), draw(st.integers(1, n_layers)), draw(st.integers(2, n_experts)))
    popular = rng.random(shape[1:]) ** 2
    counts = (rng.random(shape) < popular) * rng.integers(1, 5, shape)
    return batches_of(counts.astype(np.int32), draw(st.integers(0, 1)))


def replayed(name: str, batches: list[Batch], n_slots: int) -> HitStats:
    """Under a policy that plans between steps alone; every plan is checked."""
    shape = CacheShape.uniform(*batches[0].counts.shape, n_slots)
    policy = make_policy(name, shape)
    policy.execution_model = ExecutionModel()
    replay = CheckedReplay(policy, shape)
    for batch in batches:
        replay.run(batch)
    assert np.count_nonzero(replay.slots.resident) <= n_slots
    return replay.stats.hits


def bounded(name: str, batches: list[Batch], n_slots: int) -> HitStats:
    uses = next_uses(batches, batches[0].counts.size) if name == "belady" else None
    replay = BoundReplay(CacheShape.uniform(*batches[0].counts.shape, n_slots), uses)
    for batch in batches:
        replay.run(batch)
    return replay.stats.hits


def best_demand_filled(batches: list[Batch], n_slots: int) -> int:
    """The most distinct experts that a cache filled by use can find, by trying every choice."""
    found = {frozenset[int](): 0}
    for batch in batches:
        used = frozenset(np.flatnonzero(batch.counts).tolist())
        after: dict[frozenset[int], int] = {}
        for held, n_found in found.items():
            n_found += 0 if batch.prefill else len(held & used)
            for kept in _choices(held | used, n_slots):
                after[kept] = max(after.get(kept, -1), n_found)
        found = after
    return max(found.values())


def _choices(flat_ids: frozenset[int], n: int) -> list[frozenset[int]]:
    return [frozenset(kept) for kept in combinations(sorted(flat_ids), min(n, len(flat_ids)))]


@settings(max_examples=40, deadline=None)
@given(batches=routings(), n_slots=st.integers(0, 12))
def test_no_cache_filled_by_use_beats_belady(batches: list[Batch], n_slots: int) -> None:
    bound = bounded("belady", batches, n_slots).unique_hit
    for name in DEMAND_FILLED:
        assert replayed(name, batches, n_slots).unique_hit <= bound, name


@settings(max_examples=30, deadline=None)
@given(batches=routings(7, 1, 5), n_slots=st.integers(0, 3))
def test_belady_equals_the_best_of_all_choices(batches: list[Batch], n_slots: int) -> None:
    assert bounded("belady", batches, n_slots).unique_hit == best_demand_filled(batches, n_slots)


@settings(max_examples=10, deadline=None)
@given(batches=routings(), n_slots=st.integers(0, 12))
def test_the_oracle_finds_most_pairs(batches: list[Batch], n_slots: int) -> None:
    steps = [batch.counts for batch in batches if not batch.prefill]
    best = sum(int(np.sort(counts.reshape(-1))[::-1][:n_slots].sum()) for counts in steps)
    assert bounded("oracle", batches, n_slots).pairs_hit == best
    for name in POLICIES | SIMULATED:
        assert replayed(name, batches, n_slots).pairs_hit <= best, name


def test_a_classic_reference_string() -> None:
    """2 3 2 1 5 2 4 5 3 2 5 2 on three frames (Stallings, Operating Systems, Figure 8.14): OPT finds 6, LRU 5.

    OPT there must keep what it loads; passing by what is not used again finds one more.
    """
    string = [2, 3, 2, 1, 5, 2, 4, 5, 3, 2, 5, 2]
    counts = np.zeros((len(string), 1, 6), dtype=np.int32)
    counts[np.arange(len(string)), 0, string] = 1
    batches = batches_of(counts)
    assert bounded("belady", batches, 3).unique_hit == best_demand_filled(batches, 3) == 7
    assert replayed("lru", batches, 3).unique_hit == replayed("mixtral-offloading", batches, 3).unique_hit == 5


def test_next_use_skips_prompts() -> None:
    uses = next_uses(batches_of(np.array([[[2, 0]], [[1, 0]], [[0, 0]], [[1, 1]]], dtype=np.int32), 1), 2)
    found = [(used.tolist(), following.tolist()) for used, following in uses]
    assert found == [([0], [1]), ([0], [3]), ([], []), ([0, 1], [NEVER, NEVER])]
