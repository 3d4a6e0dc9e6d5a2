"""Stock modes with whole layers on a GPU: how many fill which memory, why they are left out elsewhere, and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench import arms
from moeedge.bench.config import DEFAULT_MODES, GPU_MODES, MODES, BenchPlan, Sweep, parse_modes
from moeedge.bench.records import BenchRow, compare_with_whole_layers
from moeedge.bench.whole_layers import DeviceUse, SplitPlanner, missing_reason
from moeedge.cli.bench_run import make_bench_plan, synthetic_tests
from moeedge.engine.types import EngineConfig
from moeedge.hardware.devices import DeviceKind, ResolvedDevice
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.native.backends import DRY_RUN_GPU
from moeedge.records import as_dict
from moeedge.scheduler.config import PlacementConfig
from tests.bench.recording import RecordedBench, Recorder, make_plan, run, write_conversations
from tests.support.counting import DEVICE, CountingDevice
from tests.support.tiny import make_tiny

PLAIN, DRAFTED = MODES["stock-ncmoe"], MODES["stock-ncmoe-sd"]
_GPU = ResolvedDevice("gpu", ggml_name=DRY_RUN_GPU, llama_device=DRY_RUN_GPU, label="a GPU", free_bytes=2**30)
_MODES = f"{DEFAULT_MODES},{GPU_MODES}"


def _planner(tiny_moe: Path, draft: Model | None = None, **options: object) -> SplitPlanner:
    base = EngineConfig(model=tiny_moe, draft=None if draft is None else draft.path, n_ctx=256, n_threads=1)
    return SplitPlanner(replace(base, **options), _GPU, draft)  # type: ignore[arg-type]


def test_the_most_layers_that_fit(tiny_moe: Path) -> None:
    planner = _planner(tiny_moe)
    least = planner.least_bytes(PLAIN)
    assert planner.for_budget(PLAIN, least - 1) is None
    tensors, _ = expert_tensors(tiny_moe)
    splits = [planner.for_budget(PLAIN, least), planner.for_budget(PLAIN, 2**40)]
    assert [split and split.layers.n_whole for split in splits] == [0, 3]
    everything = splits[1]
    assert everything.layers.expert_bytes == expert_bytes(tensors)
    assert everything.use.total_bytes > least + expert_bytes(tensors)  # larger compute buffers, too
    for budget in range(least, everything.use.total_bytes + 2, (everything.use.total_bytes - least) // 7):
        split = planner.for_budget(PLAIN, budget)
        assert split.use.total_bytes <= budget
        tries = [planner._tried(n, False).use.total_bytes for n in range(4)]
        assert split.layers.n_whole == max(n for n in range(4) if tries[n] <= budget)


def test_a_draft_takes_memory_that_layers_then_lack(tiny_moe: Path, tiny_draft: Path) -> None:
    with Model.load(tiny_draft, header_only=True) as draft:
        planner = _planner(tiny_moe, draft)
        plain, drafted = planner.least_bytes(PLAIN), planner.least_bytes(DRAFTED)
    assert drafted > plain + 100_000


def test_the_memory_to_fill(tiny_moe: Path) -> None:
    planner = _planner(tiny_moe)
    others = [
        (MODES["moeedge"], DeviceUse(weights_bytes=5_000_000, cache_bytes=1)),
        (MODES["moeedge-ar"], DeviceUse(weights_bytes=4_000_000)),
        (replace(MODES["moeedge"], cache_ratio=0.5), DeviceUse(weights_bytes=9_000_000)),
    ]
    assert planner.budget_bytes(DRAFTED, others) == 5_000_001
    assert planner.budget_bytes(PLAIN, others) == 4_000_000
    assert planner.budget_bytes(PLAIN, others[:1]) == 5_000_001  # better the memory with a draft than none
    assert planner.budget_bytes(replace(PLAIN, cache_ratio=0.5), others) == 9_000_000
    experts = expert_bytes(expert_tensors(tiny_moe)[0])
    least = planner.least_bytes(PLAIN)
    assert planner.budget_bytes(replace(PLAIN, cache_ratio=0.25), others) == least + experts // 4
    given = _planner(tiny_moe, placement=PlacementConfig(vram_bytes=1000))
    assert given.budget_bytes(PLAIN, []) == least + 1000


@pytest.mark.parametrize("kind", ["none", "emulated", "rpc"])
def test_there_are_no_layers_without_a_gpu(kind: DeviceKind, tiny_moe: Path) -> None:
    with Model.load(tiny_moe, header_only=True) as target:
        reasons = [missing_reason(mode, ResolvedDevice(kind), target) for mode in MODES.values()]
        assert [mode for mode, reason in zip(MODES, reasons, strict=True) if reason is not None] == [
            "stock-ncmoe", "stock-ncmoe-sd",
        ]  # fmt: skip
        assert missing_reason(PLAIN, _GPU, target) is None


def test_dense_models_have_no_experts_to_keep(tiny_draft: Path) -> None:
    with Model.load(tiny_draft, header_only=True) as target:
        assert missing_reason(PLAIN, _GPU, target) is not None


def test_modes_that_cannot_run_are_left_out_by_name(tmp_path: Path, tiny_moe: Path) -> None:
    modes = "stock-ar,stock-ncmoe,moeedge-ar"
    plan = make_plan(tiny_moe, None, modes=modes, dataset=write_conversations(tmp_path, n=1), n_predict=2)
    rows, recorder = run(plan)
    assert [row.mode for row in rows] == ["stock-ar", "moeedge-ar"]
    assert sum(note.startswith("stock-ncmoe is left out") for note in recorder.notes) == 1
    record = as_dict(rows[0])
    assert record["whole_layers"] == 0
    assert record["device_bytes"] is record["ratio_ncmoe"] is None


def test_a_sweep_has_whole_layers_for_each_ratio() -> None:
    modes = Sweep(("spac", "lru"), (0.17, 0.5)).modes(parse_modes("stock-ar,moeedge,stock-ncmoe"))
    assert [mode.label for mode in modes if mode.method == "ncmoe"] == ["stock-ncmoe 0.17", "stock-ncmoe 0.5"]
    assert not any(mode.is_swept for mode in modes if mode.method == "ncmoe")


def test_the_fastest_mode_with_whole_layers_is_the_measure(tmp_path: Path, tiny_moe: Path) -> None:
    plan = make_plan(tiny_moe, None, dataset=write_conversations(tmp_path, n=1), n_predict=2, repetitions=1)
    stock, ours = run(plan)[0]
    layered = [
        replace(stock, mode="stock-ncmoe", ratio=1.5, ratio_pp=0.5),
        replace(stock, mode="stock-ncmoe-sd", ratio=2.0, ratio_pp=0.4),
        replace(stock, mode="stock-ncmoe", ratio=9.0, ratio_pp=9.0, asked_ratio=0.5),  # another amount of memory
        replace(stock, mode="stock-ncmoe", ratio=9.0, ratio_pp=9.0, test="other"),
    ]
    compared = compare_with_whole_layers([ours, *layered])
    assert compared[0].ratio_ncmoe == ours.ratio / 2.0
    assert compared[0].ratio_pp_ncmoe == ours.ratio_pp / 0.5
    assert [row.ratio_ncmoe for row in compared[1:]] == [0.75, 1, 1, 1]
    assert compare_with_whole_layers([ours])[0].ratio_ncmoe is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 11 MB in 8 layers, more than the compute buffers."""
    return make_tiny("qwen3moe", tmp_path_factory.mktemp("model"), layers=8, experts=32, expert_ff=512)


def _plan(model: Path, draft: Path, folder: Path) -> BenchPlan:
    placement = PlacementConfig(calibrate=False)
    base = EngineConfig(model=model, draft=draft, gamma=3, n_threads=1, device=DEVICE, placement=placement)
    dataset, sweep = write_conversations(folder), Sweep((), (0.25,))
    plan, _ = make_bench_plan(base, _MODES, dataset, n_predict=8, repetitions=1, sweep=sweep)
    return plan


def _check(rows: list[BenchRow]) -> None:
    """Every row is right on its split, and the modes with whole layers fill moeedge's memory, but take no more."""
    records = {row.mode: as_dict(row) for row in rows}
    assert list(records) == _MODES.split(",")
    for row in rows:
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
    modes, tests = "stock-ar,moeedge,stock-ncmoe", synthetic_tests([24], [8])
    plan, _ = make_bench_plan(base, modes, None, tests=tests, repetitions=1, sweep=Sweep((), (0.5,)))
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
    tmp_path: Path, model: Path, counting: CountingDevice, cache_folder: Path
) -> None:
    """Without --cache-ratio moeedge chooses its whole layers: it loads its own target."""
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
