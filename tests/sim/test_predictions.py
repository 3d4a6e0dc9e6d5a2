"""Predictions for a run on GPUs: the break-even formula and the rows."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from moeedge.sim import predictions
from moeedge.sim.cases import Cases
from moeedge.sim.constants import frozen
from moeedge.sim.predictions import (
    CACHE_RATIOS,
    HARDWARE,
    MODEL,
    STOCK,
    SYSTEMS,
    BreakEven,
    Prediction,
    break_even_hit_rate,
    break_even_rows,
    predict,
)

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "predictions-gpu.json"


@pytest.mark.parametrize(("share", "expected"), [(0.17, 0.28), (0.3, 0.41), (0.6, 0.72)])
def test_the_break_even_hit_rate_of_a_worked_example(share: float, expected: float) -> None:
    """Per layer: 45 us round trip of stock, 85 of the engine, a token's experts 381 us on the CPU and 37 on the GPU."""
    assert break_even_hit_rate(share, 85e-6, 45e-6, 381e-6, 37e-6) == pytest.approx(expected, abs=0.01)


def test_each_step_of_the_lean_path_lowers_the_break_even_hit_rate() -> None:
    rows = [row for row in break_even_rows() if (row.hardware, row.cache_ratio) == ("rtx4090-pcie4", 0.3)]
    for side in ("fast", "chosen", "slow"):
        wanted = [row.break_even_hit_rate for row in rows if row.side == side]
        assert len(wanted) == 4 and wanted == sorted(wanted, reverse=True)
    assert {row.system for row in rows} <= {system.name for system in SYSTEMS}


def test_rows_compare_with_stock_at_the_same_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "_TOKENS", 24)
    monkeypatch.setattr(predictions, "HARDWARE", ("rtx4090-pcie4",))
    monkeypatch.setattr(predictions, "CACHE_RATIOS", (0.3,))
    before, after = (next(system for system in SYSTEMS if system.name == name) for name in ("moeedge 0.6", "moeedge"))
    whole = next(system for system in SYSTEMS if system.whole_share == 0.5)
    with Cases() as cases:
        asked = [STOCK, replace(before, has_range=False), after, whole]
        stock, before, after, mixed = predict(cases, systems=asked, gammas=(0,))
    assert (stock.n_whole_layers, after.n_whole_layers, mixed.n_whole_layers) == (14, 0, 7)
    assert stock.over_stock == stock.over_stock_low == 1 and stock.break_even_hit_rate is None
    assert stock.tg_low_ts is not None and stock.tg_high_ts is not None and after.over_stock_low is not None
    assert stock.tg_low_ts < stock.tg_ts < stock.tg_high_ts
    assert after.over_stock == pytest.approx(after.tg_ts / stock.tg_ts)
    assert after.over_stock_low <= after.over_stock
    assert after.host_s < before.host_s and after.tg_ts > before.tg_ts
    assert mixed.tg_low_ts is None


def test_the_kept_predictions_are_of_these_rows() -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert kept["model"] == MODEL and kept["constants_sha256"] == frozen().constants_sha256
    for name, kind in (("rows", Prediction), ("break_even", BreakEven)):
        assert {(row["hardware"], row["cache_ratio"]) for row in kept[name]} == {
            (hardware, ratio) for hardware in HARDWARE for ratio in CACHE_RATIOS
        }
        assert all(set(row) == {field.name for field in fields(kind)} for row in kept[name])
    for row in kept["rows"]:
        assert row["tg_low_ts"] is None or row["tg_low_ts"] <= row["tg_ts"] <= row["tg_high_ts"]


def test_a_whole_layer_costs_no_exchange_with_the_host() -> None:
    """Shares of the slots for whole layers: the simulation leaves the rest to the cache of fewer layers."""
    system = next(system for system in SYSTEMS if system.whole_share == 0.5)
    case = predictions._case("rtx4090-pcie4", 0, 0.3, replace(system, whole_share=1.0), "chosen", 0)
    assert case.config.n_whole_layers == 14
