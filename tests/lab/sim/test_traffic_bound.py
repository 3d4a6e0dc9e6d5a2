"""The bound of hits at limited traffic, against all schedules of a small trace and against policies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeedge.lab.sim.batches import cache_shape
from moeedge.lab.sim.curves import pairs_found_at_most
from moeedge.lab.sim.replay import ReplayArm, ReplayConfig, replay_arms
from moeedge.lab.traces.schedule import cut_schedule
from tests.lab.sim.test_replay import walk


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), ratio=st.sampled_from([0.25, 0.5]))
def test_no_schedule_of_a_small_trace_finds_more(seed: int, ratio: float) -> None:
    """All residencies of one layer of four experts in each of six steps."""
    schedule = cut_schedule(walk(10, seed, n_layers=1, n_experts=4), gamma=1, acceptance_chance=0.5, seed=seed)
    n_slots = int(cache_shape(schedule.trace, ratio).capacity[0])
    best = {(frozenset[int](), 0): 0}  # residency and uploads so far -> pairs
    for chunk in schedule.chunks():
        for counts in chunk.counts[chunk.counted]:
            following: dict[tuple[frozenset[int], int], int] = {}
            for (resident, uploads), pairs in best.items():
                for size in range(n_slots + 1):
                    for kept in map(frozenset, itertools.combinations(range(4), size)):
                        state = (kept, uploads + len(kept - resident))
                        found = pairs + int(counts[0, list(kept)].sum())
                        following[state] = max(following.get(state, 0), found)
            best = following
    limits = (0.0, 0.2, 0.5, 1.0, 4.0)
    for limit, bound in zip(limits, pairs_found_at_most(schedule, ratio, limits), strict=True):
        reached = max(pairs for (_, uploads), pairs in best.items() if uploads <= limit * schedule.n_steps + 1e-9)
        assert reached <= bound + 1e-6
        assert limit > 0 or bound == 0  # the prices of an upload reach high enough


@pytest.mark.parametrize("limit", [0.1, 0.5, 2.0])
def test_no_policy_finds_more(limit: float) -> None:
    schedule = cut_schedule(walk(60, 1, n_texts=3), gamma=3, acceptance_chance=0.7)
    bound = pairs_found_at_most(schedule, 0.3, [limit])[0]
    arms = [ReplayArm(name, 0.3, limit) for name in ("spac", "lfu", "lru", "static")]
    found = [stats.hits.pairs_hit for stats in replay_arms(schedule, arms, ReplayConfig(policies=(), ratios=(0.3,)))]
    pairs = sum(int(chunk.counts[chunk.counted].sum()) for chunk in schedule.chunks())
    assert max(found) <= bound <= pairs
    assert np.isfinite(bound)
    assert limit < 2 or bound < 0.9 * pairs_found_at_most(schedule, 1.0, [limit])[0]  # slots have a price
