"""Experts moved at random as fast as possible: every byte that could be computed with is the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge import native
from tests.support.cache_stress import MIN_CHECKED, churn, stress
from tests.support.experts import write_experts


@pytest.mark.parametrize("link_bytes_per_s", [0.0, 100e6])
def test_no_expert_is_seen_half_written(tmp_path: Path, link_bytes_per_s: float) -> None:
    native.attach()
    model = write_experts(tmp_path / "experts.bin", n_layers=6, n_experts=16, wide_layers=(1, 4))
    assert stress(model, 2.0, link_bytes_per_s=link_bytes_per_s) >= MIN_CHECKED
    churn(model)
