"""Whole layers next to a GPU, on the counting device: memory, layers, output on the mode's own split, and passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench import arms
from moeedge.bench.config import DEFAULT_MODES, GPU_MODES, BenchPlan, Sweep
from moeedge.bench.records import BenchRow
from moeedge.cli.bench_options import synthetic_tests
from moeedge.cli.bench_run import make_bench_plan
from moeedge.engine.types import EngineConfig
from moeedge.records import as_dict
from moeedge.scheduler.config import PlacementConfig
from tests.bench.recording import RecordedBench, Recorder, run, write_conversations
from tests.support.counting import DEVICE, CountingDevice
from tests.support.tiny import make_tiny

_MODES = f"{DEFAULT_MODES},{GPU_MODES}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 11 MB in 8 layers, more than the compute buffers."""
    return make_tiny("qwen3moe", tmp_path_factory.mktemp("model"), layers=8, experts=32, expert_ff=512)


def _plan(model: Path, draft: Path, folder: Path, ratios: tuple[float, ...] = (0.25,)) -> BenchPlan:
    base = EngineConfig(
        model=model,
        draft=draft,
        gamma=3,
        n_threads=1,
        device=DEVICE,
        placement=PlacementConfig(calibrate=False),
    )
    plan, _ = make_bench_plan(
        base, _MODES, write_conversations(folder), n_predict=8, repetitions=1, sweep=Sweep((), ratios)
    )
    return plan


def _check(rows: list[BenchRow]) -> None:
    """Every row is right on its split, and the modes with whole layers fill moeedge's memory, but take no more."""
    records = {row.mode: as_dict(row) for row in rows}
    assert list(records) == _MODES.split(",")
    for row in rows:
        assert row.output is not None
        assert row.output.passed, row.output.different
    ours = records["moeedge"]
    parts = ("weights", "kv", "compute", "cache")
    assert ours["device_bytes"] == sum(ours[f"device_{part}_bytes"] for part in parts)
    assert ours["device_cache_bytes"] > ours["pool_bytes"]
    for name in GPU_MODES.split(","):
        layered = records[name]
        layer_bytes = ours["pool_bytes"] / 0.25 / 8
        assert 0 < layered["whole_layers"] < 8
        assert ours["device_bytes"] - 2 * layer_bytes < layered["device_bytes"] <= ours["device_bytes"]
        assert layered["n_gpu_layers"] == -1
        assert layered["device_cache_bytes"] is None
    assert records["stock-ncmoe"]["whole_layers"] >= records["stock-ncmoe-sd"]["whole_layers"]
    best = max(records[name]["ratio"] for name in GPU_MODES.split(","))
    assert ours["ratio_ncmoe"] == pytest.approx(ours["ratio"] / best)


def test_whole_layers_fill_the_same_memory(
    tmp_path: Path, model: Path, tiny_draft: Path, counting: CountingDevice
) -> None:
    rows, recorder = run(_plan(model, tiny_draft, tmp_path))
    _check(rows)
    assert len(recorder.samples) == recorder.total == 5 * 3
    assert sum("whole layers on the GPU" in note for note in recorder.notes) == 2


@pytest.mark.slow
def test_what_does_not_fit_at_once_is_measured_one_by_one(
    tmp_path: Path, model: Path, tiny_draft: Path, counting: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "_USABLE", 0.0)
    rows, recorder = run(_plan(model, tiny_draft, tmp_path))
    _check(rows)
    assert len(recorder.samples) == recorder.total == (3 + 2 + 2) * 3  # stock-ar with each of the last two
    assert any("one by one" in note for note in recorder.notes)


def test_synthetic_tests_have_whole_layers_too(model: Path, tiny_draft: Path, counting: CountingDevice) -> None:
    base = replace(_plan(model, tiny_draft, model.parent).base, draft=None)
    plan, _ = make_bench_plan(
        base,
        "stock-ar,moeedge,stock-ncmoe",
        None,
        tests=synthetic_tests([24], [8]),
        repetitions=1,
        sweep=Sweep((), (0.5,)),
    )
    rows, _ = run(plan)
    assert [(row.test, row.mode) for row in rows] == [
        (test, mode) for test in ("pp24", "tg8") for mode in ("stock-ar", "moeedge", "stock-ncmoe")
    ]
    assert rows[1].ratio_pp_ncmoe is not None
    assert rows[4].ratio_ncmoe is not None


def test_whole_layers_alone_need_no_reference(
    tmp_path: Path, model: Path, tiny_draft: Path, counting: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "_USABLE", 0.0)  # one by one, with nothing that stays open
    base = replace(
        _plan(model, tiny_draft, tmp_path).base, placement=PlacementConfig(cache_ratio=0.25, calibrate=False)
    )
    plan, _ = make_bench_plan(base, GPU_MODES, write_conversations(tmp_path, n=1), n_predict=4, repetitions=1)
    rows, _ = run(plan)
    assert [(row.mode, row.output) for row in rows] == [(mode, None) for mode in GPU_MODES.split(",")]


def test_a_mode_that_divides_the_gpu_itself_is_checked_on_its_own_split(
    tmp_path: Path,
    model: Path,
    counting: CountingDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without --cache-ratio moeedge chooses its whole layers: it loads its own target."""
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path))
    base = EngineConfig(
        model=model, n_ctx=512, n_threads=1, device=DEVICE, placement=PlacementConfig(vram_bytes=6_000_000)
    )
    modes = "stock-ar,moeedge,stock-ncmoe"
    plan, _ = make_bench_plan(base, modes, write_conversations(tmp_path, n=1), n_predict=8, repetitions=1)
    with RecordedBench(plan, Recorder()) as bench:
        assert bench.measure()
        rows = bench.rows()
        assert [row.mode for row in rows] == ["stock-ar", "moeedge", "stock-ncmoe"]
        assert all(row.output is not None and row.output.passed for row in rows)
        assert [arm.own_target for arm in bench.arms.passes[0].arms] == [False, True, True]
