"""Experts moved at random as fast as possible: a pinned expert always has the right bytes.

On the device that $MOEEDGE_TEST_DEVICE names, the emulated one unless it is set.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.hardware.devices import resolve
from moeedge.hardware.spec import DeviceSpec
from moeedge.native.cache import ExpertCache
from tests.support.cache_stress import MIN_CHECKED, churn, stress
from tests.support.experts import ask, assert_balanced, assert_bytes, write_experts
from tests.support.hybrid import device_under_test


@pytest.fixture(scope="module")
def device() -> str:
    """As ggml names it."""
    return resolve(DeviceSpec.parse(device_under_test())).ggml_name


@pytest.mark.parametrize("width", [pytest.param(32, id="small"), pytest.param(320, id="large", marks=pytest.mark.slow)])
def test_no_expert_is_seen_half_written(tmp_path: Path, device: str, width: int) -> None:
    model = write_experts(tmp_path / "experts.bin", n_layers=6, n_experts=16, width=width, wide_layers=(1, 4))
    assert stress(model, 2.0, device=device) >= MIN_CHECKED
    churn(model, device=device)


def test_no_expert_is_half_written_on_a_paced_link(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "experts.bin", n_layers=6, n_experts=16, wide_layers=(1, 4))
    assert stress(model, 2.0, link_bytes_per_s=100e6) >= MIN_CHECKED


def test_experts_of_several_staging_chunks(tmp_path: Path, device: str) -> None:
    model = write_experts(tmp_path / "experts.bin", n_layers=2, n_experts=3, width=1200)  # 5.8 MB a matrix
    with ExpertCache(model.config(0.5, device=device)) as cache:
        for turn in range(4):
            ask(cache, model.everything[turn % 2 :], victims=model.everything[:: 1 + turn % 2])
            assert cache.drain(60)
            assert assert_bytes(cache, model) == 3
        assert_balanced(cache)
