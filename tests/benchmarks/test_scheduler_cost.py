"""Benchmark, run with -m bench: what a step pays for scheduling at 48 layers of 128 experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import engine_cost
from tests.benchmarks.scheduler_cost import COST_MODEL, PARTS, Text, Workload, measure

LIMIT_US = 300.0


@pytest.mark.bench
def test_a_step_pays_at_most_300_us(bundled_pair: tuple[Path, Path]) -> None:
    """Processor time of the decoding thread in an engine, with the default policy."""
    (cost,) = engine_cost.measure(*bundled_pair, ["spac"], ratio=0.17, gamma=8, prompts=4, warm_up=8, n_predict=64)
    assert cost.cpu_us < LIMIT_US, f"{cost.cpu_us:.0f} us: {cost.parts_cpu_us}"


@pytest.mark.bench
def test_the_default_is_better_than_a_fixed_choice() -> None:
    """With plans that obey the mover's rules."""
    text = Text(Workload())
    spac, static = (measure(name, text) for name in ("spac", "static"))
    assert spac.pair_hit > static.pair_hit


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
