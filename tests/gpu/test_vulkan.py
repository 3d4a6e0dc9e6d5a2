"""A short slice of the Vulkan lane, where the driver and the prebuilt backend are found; the settings of its fuzz."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.gpu.vulkan_cases import ALL_LAYERS, MODELS, all_cases, fuzz_cases, slice_cases
from tests.gpu.vulkan_checks import SCHEMA, SKIPPED
from tests.support import vulkan
from tests.support.commands import run_script

script = partial(run_script, Path(__file__).parent / "run_vulkan_checks.sh")


def test_help_and_skip(tmp_path: Path) -> None:
    assert "--fuzz" in script("--help").stdout
    result = script("--folder", str(tmp_path), MOEEDGE_DATA=str(tmp_path / "none"), MOEEDGE_VULKAN_BACKEND="")
    assert result.returncode == SKIPPED and "skipped" in result.stdout


def test_the_list_covers_what_it_should() -> None:
    cases = all_cases()
    assert len({case.id for case in cases}) == len(cases)
    for model in MODELS:
        mine = [case for case in cases if case.model == model]
        values = {key: {case.settings[key] for case in mine if key in case.settings} for key in ("ratio", "gamma")}
        assert values == {"ratio": {0.17, 0.5, 1.0}, "gamma": {0, 4, 8}}
        assert {"calibrate", "profile", "chat", "bench"} < {case.kind for case in mine}
        assert {case.settings.get("prefill") for case in mine} >= {"cpu", "resident", "stream"}


def test_fuzz_is_reproducible_and_varied() -> None:
    cases = fuzz_cases(200)
    assert cases == fuzz_cases(200)
    assert {case.settings["seed"] for case in cases} == set(range(200))
    assert {case.model for case in cases} == set(MODELS)
    for key, n_values in (("ngl", 5), ("ratio", 6), ("gamma", 5), ("draft", 3), ("prompt", 6), ("prefill", 3)):
        assert len({case.settings[key] for case in cases}) == n_values
    assert len({case.settings["policy"] for case in cases}) > 10
    assert any(case.settings["ngl"] == ALL_LAYERS for case in cases)


@pytest.mark.skipif(vulkan.missing() is not None, reason=str(vulkan.missing()))
def test_slice(tmp_path: Path) -> None:
    """Attention and experts on another maker's device: the answers are stock's with the same layers there."""
    out = tmp_path / "record.json"
    result = script("--folder", str(tmp_path), "--slice", "--out", str(out), timeout_s=900)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(out.read_text())
    assert record["schema"] == SCHEMA
    assert len(record["cases"]) == len(slice_cases())
    assert sum(case["figures"].get("pairs_hit", 0) for case in record["cases"]) > 0
