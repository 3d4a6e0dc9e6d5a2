"""Benchmark, run with -m bench: what a step pays for scheduling at 48 layers of 128 experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import engine_cost

LIMIT_US = 300.0


@pytest.mark.bench
def test_a_step_pays_at_most_300_us(bundled_pair: tuple[Path, Path]) -> None:
    """Processor time of the decoding thread in an engine, with the default policy."""
    (cost,) = engine_cost.measure(*bundled_pair, ["spac"], ratio=0.17, gamma=8, prompts=4, warm_up=8, n_predict=64)
    assert cost.cpu_us < LIMIT_US, f"{cost.cpu_us:.0f} us: {cost.parts_cpu_us}"
