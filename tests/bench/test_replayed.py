"""The row of llama.cpp's own expert cache: replayed on the run's routing, and never taken for a measured one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench.config import Sweep, parse_modes
from moeedge.bench.harness import record_answers, recorded_mode
from moeedge.bench.records import BenchRow
from moeedge.bench.replayed import POLICY
from moeedge.bench.runner import Bench
from moeedge.scheduler.config import PlacementConfig
from moeedge.sim.replay import ReplayConfig, replay
from moeedge.trace.format import Trace
from moeedge.trace.schedule import as_computed
from moeedge.ui.bench_views import render
from tests.bench.recording import Recorder, make_plan, write_conversations

Run = tuple[list[BenchRow], list[BenchRow], Trace]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path, tiny_draft: Path) -> Run:
    """Measured rows, replayed rows and the trace of one run."""
    dataset = write_conversations(tmp_path_factory.mktemp("talk"))
    plan = make_plan(tiny_moe, tiny_draft, dataset=dataset, repetitions=1)
    base = replace(plan.base, device="emulated", placement=PlacementConfig(calibrate=False))
    modes = Sweep((), (0.25, 0.75)).modes(parse_modes(f"stock-ar,moeedge,{POLICY}"))
    plan = replace(plan, base=base, modes=modes)
    with Bench(plan, Recorder()) as run:
        assert run.run()
        rows = run.rows()
        mode = recorded_mode(plan.modes)
        with run.arms.recorder(mode) as arm:
            trace = record_answers(arm, run.prompts, plan)
        return rows, run.replayed(mode, trace), trace


def test_it_is_the_replay_of_the_recorded_routing(finished: Run) -> None:
    measured, replayed, trace = finished
    assert [row.mode for row in measured] == ["stock-ar", "moeedge", "moeedge"]
    assert [(row.mode, row.policy, row.cache_ratio) for row in replayed] == [
        (POLICY, POLICY, 0.25), (POLICY, POLICY, 0.75),
    ]  # fmt: skip
    schedule = as_computed(trace)
    expected = replay(schedule, ReplayConfig(policies=(POLICY,), ratios=(0.25, 0.75)))
    for row, reference in zip(replayed, [row for row in expected if row.policy == POLICY], strict=True):
        assert row.cache.hit_rate_pairs == pytest.approx(reference.hit_rate_pairs, abs=1e-6)
        assert row.cache.hit_rate_experts == pytest.approx(reference.hit_rate_experts, abs=1e-6)
        per_layer = row.cache.uploads_per_layer_step or 0
        assert per_layer == pytest.approx(reference.uploads_per_layer_step, abs=1e-6)
    # what the sensor counted while the mode was measured
    ours = measured[1]
    assert replayed[0].experts_per_verification == pytest.approx(ours.experts_per_verification, rel=0.2)


def test_nothing_in_it_was_measured(finished: Run) -> None:
    measured, replayed, _ = finished
    records = [row.as_dict() for row in (*measured, *replayed)]
    assert all(list(record) == list(records[0]) for record in records)
    assert [record["source"] for record in records] == ["measured"] * 3 + ["replayed"] * 2
    for record in records[3:]:
        for key in ("pp_ts", "tg_ts", "ttft_s", "ratio", "ratio_pp", "ratio_cpu", "output_check", "vram_bytes"):
            assert record[key] is None, key
        assert record["samples"] == []
    table, _, other = render([*measured, *replayed], "md").partition("Not run")
    assert POLICY not in table
    assert "stock-ar" not in other
