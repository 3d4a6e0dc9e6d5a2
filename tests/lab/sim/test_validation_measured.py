"""Machines from calibrations, shapes from model files, and the comparison with the engine on a tiny model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.errors import InputError
from moeedge.lab.experiments.validation import median_cost_model
from moeedge.lab.sim.model_shape import shape_of_file
from moeedge.lab.sim.step_costs import calibrated_costs
from moeedge.llama import gguf_file
from moeedge.policies.cost_model import CostModel
from moeedge.scheduler.calibration import Calibration, measurement_file, write_measurement
from moeedge.scheduler.manager import PlacementManager
from tests.conftest import TinyFactory
from tests.support.commands import refused, run_json
from tests.support.costs import cost_model


def units(cpu_s: float) -> CostModel:
    more = {"draft_token_s": 1e-3, "block_overhead_s": 2e-6, "layer_rest_s": 3e-5}
    return cost_model(1.0, 1e-6, 5e-5, cpu_expert_s=np.array([0, cpu_s, 2 * cpu_s]), **more)


def calibration(cpu_s: float | None) -> Calibration:
    measured = None if cpu_s is None else units(cpu_s)
    return Calibration(units=measured, step_s={}, plain_step_s={}, prefill_ts={}, n_tokens=5, seconds=1.0)


def test_a_kept_calibration_gives_costs(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    write_measurement(file, calibration(1e-4))
    costs, name = calibrated_costs(str(file), "") or (None, "")
    assert name == "kept"
    assert costs.cpu_ns[:4].tolist() == [0, 100_000, 200_000, 300_000]  # beyond the curve in proportion
    assert (costs.transfer_ns, costs.draft_ns, costs.dense_ns, costs.block_ns) == (50_000, 10**6, 30_000, 2000)
    write_measurement(file, calibration(None))
    with pytest.raises(InputError, match="no times of experts"):
        calibrated_costs(str(file), "")


def test_a_disturbed_measurement_does_not_count() -> None:
    found = median_cost_model([units(1e-4), units(1.2e-4), units(5e-2)])
    assert found.cpu_expert_s.tolist() == [0, 1.2e-4, 2.4e-4] and found.draft_token_s == 1e-3


def test_the_newest_measurement_of_a_model_is_taken() -> None:
    with pytest.raises(InputError, match="No calibration is kept"):
        calibrated_costs("this", "model.gguf")
    for name, cpu_s in (("model.gguf", 1e-4), ("model.gguf", 2e-4), ("model.gguf-budget", 3e-4), ("other.gguf", 4e-4)):
        write_measurement(measurement_file(name, {"cpu_s": cpu_s}), calibration(cpu_s))
    found = calibrated_costs("this", "model.gguf")
    assert found[0].cpu_ns[1] == 200_000
    assert calibrated_costs("rtx3090", "model.gguf") is None


def test_the_shape_of_a_file_is_the_sum_of_its_tensors(tiny: TinyFactory) -> None:
    path = tiny("qwen3moe")
    shape = shape_of_file(path, 2)
    tensors = gguf_file.read_tensors(path)
    experts = sum(tensor.size_bytes for tensor in tensors if "_exps." in tensor.name)
    blocks = sum(tensor.size_bytes for tensor in tensors if tensor.name.startswith("blk.")) - experts
    assert shape.expert_bytes * shape.n_expert_layers * shape.n_experts == experts
    assert shape.dense_layer_bytes * shape.n_layers == pytest.approx(blocks)
    with pytest.raises(InputError, match="no experts"):
        shape_of_file(tiny("qwen3"), 2)


def measured(tiny: TinyFactory, gammas: str) -> list[dict[str, Any]]:
    arguments = ("-m", tiny("qwen3moe"), "-md", tiny("qwen3"), "--policy", "lru", "--cache-ratio", "0.5")
    more = ("--gamma", gammas, "-n", "12", "-c", "512", "-r", "1")
    return list(run_json("lab", "validate", "measured", *arguments, *more))


def test_the_engine_is_measured_and_simulated_in_one_go(tiny: TinyFactory) -> None:
    """Times of a model this small, next to other programs, are noise: both sides must have seen the same steps."""
    rows = measured(tiny, "0,3")
    assert [row["gamma"] for row in rows] == [0, 3]
    for row in rows:
        assert row["tokens"] >= 11 and row["measured_tpot_s"] > 0 and row["tpot_s"] > 0
        assert row["error"] == pytest.approx(row["tpot_s"] / row["measured_tpot_s"] - 1)
        assert row["hit_rate_pairs"] == pytest.approx(row["hit_rate_pairs_measured"], abs=0.25)


def test_a_simulated_step_takes_the_measured_time_of_scheduling(
    tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the decoding thread pays: plans of this policy are made in a thread of their own."""
    plan_s = 0.02  # far more than any other part of a step of this model
    after_verification = PlacementManager.after_verification

    def hand_over_slowly(self: PlacementManager, *arguments: Any) -> None:
        time.sleep(plan_s)
        after_verification(self, *arguments)

    monkeypatch.setattr(PlacementManager, "after_verification", hand_over_slowly)
    (row,) = measured(tiny, "3")
    assert row["measured_tpot_s"] * row["tokens"] >= plan_s * row["steps"]
    assert row["tpot_s"] * row["tokens"] >= 0.99 * plan_s * row["steps"]


def test_impossible_measurements_are_refused_before_anything_is_loaded(tiny_moe: Path, tiny_draft: Path) -> None:
    for model, policy, words in ((tiny_moe, "lru,magic", "'magic'"), (tiny_draft, "lru", "has no experts")):
        said = refused("lab", "validate", "measured", "-m", model, "-md", "none", "--policy", policy)
        assert words in said and "1 of" not in said
