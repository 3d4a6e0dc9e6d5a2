"""Benchmark, run with -m bench: the scheduler's time per step at 48 layers of 128 experts."""

from __future__ import annotations

import pytest

from tests.benchmarks.scheduler_cost import COST_MODEL, PARTS, Text, Workload, measure

LIMIT_US = 300.0


@pytest.mark.bench
def test_the_default_policy_schedules_a_step_in_300_us() -> None:
    """Processor time in cold caches; plans obey the mover's rules, and the hit rate is above a fixed choice's."""
    text = Text(Workload())
    spac, static = (measure(name, text) for name in ("spac", "static"))
    assert spac.pair_hit > static.pair_hit
    assert spac.cold.cpu_us < LIMIT_US, f"{spac.cold.cpu_us:.0f} us: {spac.cold.parts_cpu_us}"


def test_a_short_run_keeps_the_rules() -> None:
    """The same with small shapes and no time limit, in every run of the suite: better than chance."""
    text = Text(
        Workload(n_layers=6, n_experts=16, n_used=2, gamma=4, n_embd=64, n_vocabulary=300, warm_up=20, steps=20)
    )
    for name in ("spac", "lru", "static"):
        for cost_model in (None, COST_MODEL):
            cost = measure(name, text, cost_model=cost_model, n_buffer=1 << 16)
            assert cost.pair_hit > 0.17  # that of random experts
            assert set(cost.cold.parts_cpu_us) == set(PARTS)
            assert cost.cold.cpu_us > 0.0
