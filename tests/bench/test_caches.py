"""Sweeps over expert caches with real sessions on the emulated device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeedge.bench import arms
from moeedge.bench.config import BenchPlan, Sweep
from moeedge.records import as_dict
from moeedge.scheduler.config import PlacementConfig
from tests.bench.recording import make_plan, run, write_conversations


def _plan(tiny_moe: Path, tiny_draft: Path, sweep: Sweep, **options: Any) -> BenchPlan:
    plan = make_plan(tiny_moe, tiny_draft, **options)
    base = replace(plan.base, device="emulated", placement=PlacementConfig(calibrate=False))
    return replace(plan, base=base, modes=sweep.modes(plan.modes))


def test_a_row_per_policy_and_ratio_and_stock(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    sweep = Sweep(("spac", "lru"), (0.25, 1))
    rows, recorder = run(_plan(tiny_moe, tiny_draft, sweep, dataset=write_conversations(tmp_path)))
    assert [(row.mode, row.policy, row.cache_ratio) for row in rows] == [
        ("stock-ar", "none", None),
        ("stock-sd", "none", None),
        *(("moeedge", policy, ratio) for policy in ("spac", "lru") for ratio in (0.25, 1)),
    ]
    assert len(recorder.samples) == recorder.total == 6 * 3 * 2  # modes x turns x repetitions
    for row in rows:
        record = json.loads(json.dumps(as_dict(row)))
        assert row.output is not None
        assert row.output.passed, row.output.different
        assert record["warm"] is True
        counters = [sample["placement"] for sample in record["samples"]]
        if row.mode != "moeedge":
            assert counters == [None] * 6
            assert record["device"] == record["policy"] == "none"
            keys = (
                "cache_slots",
                "pool_bytes",
                "hit_rate_pairs",
                "hit_rate_experts",
                "uploads_per_layer_step",
                "bytes_moved",
            )
            assert [record[key] for key in keys] == [None] * 6
            continue
        assert record["device"].startswith("emulated")
        assert record["cache_slots"] == 48 * row.cache_ratio  # 3 layers of 16 experts
        assert record["pool_bytes"] > 0

        def total(key: str, counters: list[dict[str, float]] = counters) -> float:
            return sum(sample[key] for sample in counters)

        # rates are those of the sums over the samples, and the counters of each sample add up
        assert record["hit_rate_pairs"] == total("pairs_hit") / total("pairs")
        assert record["hit_rate_experts"] == total("unique_hit") / total("unique")
        assert record["uploads_per_layer_step"] == total("uploads") / (total("steps") * record["n_expert_layers"])
        assert record["bytes_moved"] == total("bytes_moved")
        for sample in record["samples"]:
            assert sample["placement"]["steps"] == sample["steps"]
            verified = sample["steps"] + sample["drafted"]
            assert sample["placement"]["pairs"] == verified * record["n_experts_used"] * record["n_expert_layers"]
    # all experts have a slot, and the warm-up has filled those that it used
    assert rows[3].cache.hit_rate_pairs is not None and rows[3].cache.hit_rate_pairs > 0.9
    assert rows[5].cache.hit_rate_pairs is not None and rows[5].cache.hit_rate_pairs > 0.9


def test_caches_that_do_not_fit_are_measured_one_by_one(
    tmp_path: Path, tiny_moe: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "_USABLE", 0.0)
    sweep = Sweep(("spac", "lru", "static"), (0.25,))
    rows, recorder = run(_plan(tiny_moe, tiny_draft, sweep, dataset=write_conversations(tmp_path, n=1)))
    assert [(row.mode, row.policy) for row in rows] == [
        ("stock-ar", "none"), ("stock-sd", "none"), ("moeedge", "spac"), ("moeedge", "lru"), ("moeedge", "static"),
    ]  # fmt: skip
    assert any("one after the other" in note for note in recorder.notes)
    assert len(recorder.samples) == recorder.total == (3 + 2 + 2) * 2 * 2  # stock-ar with each of them
    for row in rows:
        assert len(row.samples) == 4
        assert row.ratio is not None
        assert row.output is not None
        assert row.output.passed, row.output.different


def test_without_a_warm_up_the_first_repetition_is_cold(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    plan = _plan(tiny_moe, tiny_draft, Sweep(("lru",), (1,)), dataset=write_conversations(tmp_path, n=1))
    rows, _ = run(replace(plan, warm_up=False))
    swept = rows[-1]
    assert [(sample.repetition, sample.warm) for sample in swept.samples] == [
        (0, False), (0, False), (1, True), (1, True),
    ]  # fmt: skip
    assert as_dict(swept)["warm"] is False
    cold, warm = swept.samples[0].placement, swept.samples[2].placement
    assert cold is not None
    assert warm is not None
    assert warm["pairs_hit"] == warm["pairs"]
    assert cold["uploads"] > 0 == warm["uploads"]


def test_a_cache_of_no_size_is_reported_as_asked(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    plan = _plan(tiny_moe, tiny_draft, Sweep(("spac",), (0,)), dataset=write_conversations(tmp_path, n=1))
    rows, recorder = run(replace(plan, repetitions=1))
    record = as_dict(rows[-1])
    assert (record["policy"], record["cache_ratio"], record["cache_slots"]) == ("spac", 0, 0)
    assert record["hit_rate_pairs"] is None
    assert any("off" in note for note in recorder.notes)


def test_the_policy_works_in_synthetic_tests(tiny_moe: Path, tiny_draft: Path) -> None:
    rows, _ = run(_plan(tiny_moe, tiny_draft, Sweep(("lru",), (1,)), n_prompt=24, n_gen=36))
    by_test = {(row.test, row.policy): row for row in rows}
    decoding = by_test["tg36", "lru"]
    assert decoding.cache.hit_rate_pairs is not None
    assert decoding.cache.hit_rate_pairs > 0.9
    counted = [sample.placement for sample in decoding.samples]
    assert [counters and counters["steps"] for counters in counted] == [16, 16, 4] * 2
    prefill = by_test["pp24", "lru"]
    assert prefill.cache.hit_rate_pairs is None
    assert all(sample.prefill_placement is not None for sample in prefill.samples)
