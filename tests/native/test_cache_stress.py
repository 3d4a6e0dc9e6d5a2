"""Experts moved at random as fast as possible: a pinned expert always has the right bytes.

On the device that $MOEEDGE_TEST_DEVICE names, the emulated one unless it is set.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.hardware.devices import resolve
from moeedge.hardware.spec import DeviceSpec
from tests.support.cache_stress import MIN_CHECKED, churn, stress
from tests.support.experts import write_experts
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
