"""Benchmark, run with -m bench: the scheduler's time per step at 48 layers of 128 experts."""

from __future__ import annotations

import pytest

from moeedge.policies.base import CacheShape
from tests.benchmarks.scheduler_cost import COST_MODEL, make_batches, measure

LIMIT_US = 150.0


@pytest.mark.bench
def test_the_default_policy_schedules_a_step_in_150_us() -> None:
    """All plans obey the mover's rules, and the hit rate is better than that of simpler policies."""
    batches = make_batches(48, 128, 8, 9, 240, seed=1)
    shape = CacheShape.uniform(48, 128, int(0.17 * 48 * 128))
    spac, lru, static = (measure(name, batches, shape, COST_MODEL) for name in ("spac", "lru", "static"))
    assert spac.pair_hit > max(lru.pair_hit, static.pair_hit)
    assert spac.step_us < LIMIT_US, f"{spac.step_us:.0f} us: {spac}"


def test_a_short_run_keeps_the_rules() -> None:
    """The same with small shapes and no time limit, in every run of the suite: better than chance."""
    batches = make_batches(6, 16, 2, 5, 60, seed=1)
    shape = CacheShape.uniform(6, 16, 20)
    for name in ("spac", "spac-paper", "lru", "static"):
        for cost_model in (None, COST_MODEL):
            assert measure(name, batches, shape, cost_model, n_runs=1).pair_hit > 20 / (
                6 * 16
            )  # that of 20 random experts
