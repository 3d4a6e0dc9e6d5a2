"""Predictions for a run on GPUs: the break-even formula and the rows."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from moeedge.sim import predictions
from moeedge.sim.cases import Cases
from moeedge.sim.constants import frozen
from moeedge.sim.model_shape import find_model
from moeedge.sim.predictions import CACHE_RATIOS, HARDWARE, MODEL, Prediction, break_even_hit_rate, predict
from moeedge.sim.step_costs import Framework, find_hardware

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "predictions-gpu.json"


@pytest.mark.parametrize(("share", "expected"), [(0.17, 0.28), (0.3, 0.41), (0.6, 0.72)])
def test_the_break_even_hit_rate_of_a_worked_example(share: float, expected: float) -> None:
    """Per layer: 45 us round trip of stock, 85 of the engine, a token's experts 381 us on the CPU and 37 on the GPU."""
    shape = find_model(MODEL)
    token_bytes = shape.k * shape.expert_bytes
    hardware = replace(
        find_hardware("rtx4090-pcie4"),
        cpu_bytes_per_s=token_bytes / 381e-6,
        gpu_bytes_per_s=token_bytes / 37e-6,
        sync_s=40e-6,
    )
    round_trip = Framework(round_trip_s=45e-6)
    assert break_even_hit_rate(shape, hardware, share, round_trip, round_trip) == pytest.approx(expected, abs=0.01)


def test_rows_compare_with_stock_at_the_same_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "_TOKENS", 24)
    monkeypatch.setattr(predictions, "HARDWARE", ("rtx4090-pcie4",))
    monkeypatch.setattr(predictions, "CACHE_RATIOS", (0.3,))
    with Cases() as cases:
        stock, lfu = predict(cases, policies=("llama-cpp", "lfu"))
    assert (stock.n_cpu_moe, lfu.n_cpu_moe) == (34, None)
    assert stock.over_stock == stock.over_stock_low == 1 and stock.break_even_hit_rate is None
    assert stock.tg_low_ts < stock.tg_ts < stock.tg_high_ts
    assert lfu.over_stock == pytest.approx(lfu.tg_ts / stock.tg_ts)
    assert lfu.over_stock_low <= lfu.over_stock <= lfu.over_stock_high


def test_the_kept_predictions_are_of_these_rows() -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert kept["model"] == MODEL and kept["constants_sha256"] == frozen().constants_sha256
    assert {(row["hardware"], row["cache_ratio"]) for row in kept["rows"]} == {
        (hardware, ratio) for hardware in HARDWARE for ratio in CACHE_RATIOS
    }
    for row in kept["rows"]:
        assert set(row) == {field.name for field in fields(Prediction)}
        assert row["tg_low_ts"] <= row["tg_ts"] <= row["tg_high_ts"]
