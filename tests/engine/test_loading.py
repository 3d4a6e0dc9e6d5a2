"""Where models are loaded to, and how a GPU is divided between whole layers and cache: no GPU is needed to see that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge import paths
from moeedge.engine import layer_search, loading
from moeedge.engine.layer_choice import LayerChoice, LayerSplit, choice_file, is_marked, mark, read_choice
from moeedge.engine.layer_search import CachedSteps, StepEstimate, has_choice
from moeedge.engine.session import Session
from moeedge.engine.types import MAX_N_CTX, EngineConfig
from moeedge.errors import EngineError
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama import library
from moeedge.llama.model import Model
from moeedge.llama.model_memory import ModelMemory
from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.run import Run
from moeedge.scheduler.calibration import write_measurement
from moeedge.scheduler.config import PlacementConfig
from tests.support.machine import GIB, gpu_of

SMALL_GPU = gpu_of(GIB // 4, total_bytes=GIB)
LARGE_GPU = gpu_of(24 * GIB)
NO_DEVICE = ResolvedDevice("none", llama_device="auto")
Asked = list[dict[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The options of every load that is no look at a header."""
    calls: Asked = []
    load = Model.load

    def remember(path: Path, **options: Any) -> Model:
        if not options.get("header_only"):
            calls.append({"name": path.name, **options})
        return load(path, **{key: value for key, value in options.items() if key == "header_only"})

    monkeypatch.setattr(Model, "load", remember)
    return calls


def config(model: Path, **changes: Any) -> EngineConfig:
    ratio = {"placement": PlacementConfig(cache_ratio=changes.pop("ratio"))} if "ratio" in changes else {}
    return EngineConfig(**{"model": model, "n_ctx": 256} | ratio | changes)


@pytest.mark.parametrize(
    ("device", "changes", "n_gpu_layers", "experts_on_cpu"),
    [
        (NO_DEVICE, {}, 0, False),
        (NO_DEVICE, {"n_gpu_layers": 7}, 7, False),
        (SMALL_GPU, {}, -1, True),
        (SMALL_GPU, {"n_gpu_layers": 2}, 2, True),
        (SMALL_GPU, {"n_cpu_moe": 1}, -1, True),
        (LARGE_GPU, {"n_cpu_moe": 1}, -1, True),
        (LARGE_GPU, {"n_cpu_moe": 0, "ratio": 0.0, "n_gpu_layers": 9}, 9, True),
        (NO_DEVICE, {"n_cpu_moe": 1, "n_gpu_layers": 9}, 9, True),
        (LARGE_GPU, {}, -1, False),  # all of it fits: nothing to place
        (LARGE_GPU, {"n_gpu_layers": 2}, 2, True),
        (LARGE_GPU, {"ratio": 0.5}, -1, True),
        (LARGE_GPU, {"ratio": 0.0}, -1, True),
        (LARGE_GPU, {"ratio": 0.0, "n_gpu_layers": 9}, 9, False),
    ],
)
def test_the_target(
    tiny_moe: Path,
    asked: Asked,
    device: ResolvedDevice,
    changes: dict[str, Any],
    n_gpu_layers: int,
    experts_on_cpu: bool,
) -> None:
    loading.load_target(config(tiny_moe, **changes), device).close()
    (options,) = asked
    assert options["n_gpu_layers"] == n_gpu_layers
    assert options["experts_on_cpu"] == experts_on_cpu
    assert options["device"] == device.llama_device
    assert options.get("n_cpu_moe") == changes.get("n_cpu_moe")


@pytest.mark.parametrize(
    ("is_draft", "device", "changes", "n_gpu_layers"),
    [
        *((False, SMALL_GPU, {}, 0), (False, SMALL_GPU, {"n_gpu_layers": 2}, 2), (False, LARGE_GPU, {}, -1)),
        *((True, NO_DEVICE, {}, 0), (True, SMALL_GPU, {}, -1), (True, SMALL_GPU, {"n_gpu_layers": 0}, 0)),
    ],
)
def test_a_dense_model_is_on_the_gpu_entirely_or_as_requested(
    pair: tuple[Path, Path], asked: Asked, is_draft: bool, device: ResolvedDevice, changes: Any, n_gpu_layers: int
) -> None:
    """A draft entirely on the GPU of the experts."""
    if is_draft:
        loading.load_draft(config(pair[0], draft=pair[1], **changes), device).close()
    else:
        loading.load_target(config(pair[1], **changes), device).close()
    (options,) = asked
    assert (options["name"], options["n_gpu_layers"]) == (pair[1].name, n_gpu_layers)
    assert not is_draft or "experts_on_cpu" not in options


def test_a_context_that_does_not_fit_the_gpu_keeps_experts_off_it(tiny_moe: Path, asked: Asked) -> None:
    """Nor does the default one: the tiny model's 4,096 tokens take a KV cache of three times 2**19 bytes."""
    tight = 256 * 2**20 + tiny_moe.stat().st_size + 2**19
    for n_ctx, free_bytes, fits in (
        *((512, 4 * GIB, True), (MAX_N_CTX, 4 * GIB, False)),  # the latter's KV cache takes 6 GiB
        *((0, tight, False), (512, tight, True), (0, tight + 2**21, True)),
    ):
        loading.load_target(config(tiny_moe, n_ctx=n_ctx), gpu_of(free_bytes, total_bytes=max(GIB, free_bytes))).close()
        assert asked[-1]["experts_on_cpu"] != fits


def test_the_bundled_model_is_emulated_only_where_that_is_asked_for(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "is_bundled", lambda path: path == tiny_moe)
    device = loading.resolve_device(config(tiny_moe, emulate_bundled=True))
    if device.kind == "gpu":
        pytest.skip("a GPU is here")
    assert device.kind == "emulated"
    assert any("emulated device" in note for note in device.notes)
    assert loading.resolve_device(config(tiny_moe)).kind == "none"
    assert loading.resolve_device(config(tiny_moe, emulate_bundled=True, device="none")).kind == "none"


def test_llama_cpp_gets_the_gpus_of_this_machine() -> None:
    """Whatever holds the experts; a remote worker is not among them."""
    library.start()
    for name in ("auto", "emulated:link=25GB/s", "rpc://127.0.0.1:50052"):
        assert len(library.device_list(name)) == len(library.local_gpus()) + 1
    for name in ("none", "CPU"):  # an empty list keeps GPUs out of large batches too
        assert list(library.device_list(name)) == [None]


def test_header_only_has_the_shape(tiny_moe: Path) -> None:
    with Model.load(tiny_moe, header_only=True) as header, Model.load(tiny_moe) as model:
        assert header.info == model.info
        assert ModelMemory.of(header) == ModelMemory.of(model)


GPU = gpu_of(8 * GIB, label="GPU0 (a card)", llama_device="GPU0", total_bytes=9 * GIB)
TINY_GPU = gpu_of(GIB // 4)
CACHE = LayerSplit(0, 48, 1900, 0.030)
BETWEEN = LayerSplit(6, 42, 1100, 0.025)
WHOLE = LayerSplit(14, 34, 0, 0.033)
CHOICE = LayerChoice(device="GPU0", n_layers=48, splits=(CACHE, WHOLE, BETWEEN), free_bytes=8 * GIB, seconds=31.0)


def test_the_fastest_is_chosen_and_compared_with_whole_layers() -> None:
    assert CHOICE.best is BETWEEN and CHOICE.whole_only is WHOLE
    decision = CHOICE.decision
    assert (decision.chosen, decision.over) == ("6 of 48 and 1,100 experts", "--n-cpu-moe 34")
    assert decision.gain == pytest.approx(33 / 25) and decision.basis == "measured in 31 s"
    stock = replace(CHOICE, splits=(CACHE, replace(WHOLE, step_s=0.020), BETWEEN))
    decision = stock.decision
    assert (decision.chosen, decision.gain, decision.over) == ("14 of 48", pytest.approx(1.25), "6 and 1,100")
    decision = replace(CHOICE, splits=(CACHE,)).decision
    assert (decision.chosen, decision.gain) == ("0 of 48 and 1,900 experts", None) and "did not fit" in decision.why


@pytest.mark.usefixtures("cache_folder")
def test_it_is_kept_for_this_configuration_and_memory(tiny_moe: Path) -> None:
    config = EngineConfig(model=tiny_moe)
    assert read_choice(config, GPU) is None
    write_measurement(choice_file(config, GPU), CHOICE)
    kept = read_choice(config, GPU)
    assert kept == CHOICE and kept.kept_from
    placements = [{"prefill": PrefillPath.CPU}, *({"device_path": path} for path in DevicePath)]
    others: list[dict[str, Any]] = [{"gamma": 8}, {"n_batch": 512}]
    others += [{"placement": PlacementConfig(**changes)} for changes in placements]
    files = {choice_file(replace(config, **change), GPU) for change in others}
    assert len(files) == len(others) and choice_file(config, GPU) not in files
    for change, found in ((-GIB // 16, True), (-GIB, False), (GIB // 16, True), (GIB, False)):
        device = replace(GPU, free_bytes=GPU.free_bytes + change)
        assert (read_choice(config, device) is not None) == found, change
    choice_file(config, GPU).write_text('{"schema": 1, "splits": []}')
    assert read_choice(config, GPU) is None


@pytest.mark.usefixtures("cache_folder")
def test_a_division_that_ended_a_process_is_left_out(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=tiny_moe)
    said: list[str] = []
    opened: list[LayerSplit] = []

    def fail(divided: EngineConfig, **_options: object) -> Session:
        split = next(each for each in (WHOLE, BETWEEN) if each.apply(divided) == divided)
        assert is_marked(split, config, GPU)
        opened.append(split)
        raise EngineError("There is no memory.")

    monkeypatch.setattr(Session, "open", fail)
    search = layer_search._Search(config, GPU, None, Run(said.append))
    assert search._measure(WHOLE) is None
    assert opened == [WHOLE] and len(said) == 1 and "There is no memory." in said[0]
    assert not is_marked(WHOLE, config, GPU), "the process lives"
    ended = [mark(split, config, GPU) for split in (WHOLE, CACHE)]  # as if the process ended within them
    ended[0].__enter__()
    assert is_marked(WHOLE, config, GPU) and not is_marked(BETWEEN, config, GPU)
    assert search._measure(WHOLE) is None and search._measure(BETWEEN) is None
    assert opened == [WHOLE, BETWEEN] and len(said) == 3
    anew = replace(config, placement=PlacementConfig(measure_anew=True))
    assert layer_search._Search(anew, GPU, None, Run(said.append))._measure(WHOLE) is None
    assert opened == [WHOLE, BETWEEN, WHOLE]
    ended[1].__enter__()
    assert search.run() is None and len(opened) == 3


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        (GPU, {}, False),  # the tiny model fits
        (GPU, {"placement": PlacementConfig(vram_bytes=10_000)}, True),
        (GPU, {"placement": PlacementConfig(cache_ratio=0.5)}, False),
        (GPU, {"placement": PlacementConfig(vram_bytes=0)}, False),
        (TINY_GPU, {}, True),
        (TINY_GPU, {"n_cpu_moe": 1}, False),
        (TINY_GPU, {"n_gpu_layers": 0}, False),
        (TINY_GPU, {"mode": "stock"}, False),
        (ResolvedDevice("emulated", ggml_name="emulated", label="emulated (CPU)"), {}, False),
    ],
)
def test_where_there_is_a_choice(
    pair: tuple[Path, Path], device: ResolvedDevice, changes: dict[str, Any], expected: bool
) -> None:
    target, dense = (EngineConfig(model=path, n_ctx=256, **changes) for path in pair)
    assert has_choice(target, device) == expected
    assert not has_choice(dense, device)


def estimate(**changes: object) -> StepEstimate:
    """48 layers of 128 experts; a layer on the CPU takes 0.5 ms more than a whole one."""
    values: dict[str, object] = {
        "n_layers": 48,
        "n_experts": 128,
        "n_slots": 1843,  # 30 %
        "cached": CachedSteps(0.020, 0.6),
        "plain_step_s": 0.030,
        "n_whole": 14,
        "whole_step_s": 0.023,
        "overhead_s": 20e-6,
    }
    return StepEstimate(**values | changes)  # type: ignore[arg-type]


def test_the_estimate_goes_through_what_was_measured() -> None:
    found = estimate()
    assert found.hit_rate(0) == pytest.approx(0.6, abs=1e-3)
    assert found.step_s(0) == pytest.approx(0.020, rel=1e-3)
    rates = [found.hit_rate(n) for n in range(15)]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.2


def test_the_estimate_prefers_whole_layers_where_hits_are_few() -> None:
    """With hits in proportion to the slots, each whole layer saves what a cached one costs in addition."""
    proportional = estimate(cached=CachedSteps(0.029, 0.3))
    assert proportional.best_between() == 14  # which leaves 34 layers 51 slots
    assert estimate(cached=CachedSteps(0.012, 0.9)).best_between() < 14


@given(
    n_slots=st.integers(0, 6144),
    hit_rate=st.floats(0, 1),
    n_whole=st.integers(0, 48),
    times=st.tuples(*[st.floats(1e-4, 1)] * 3),
)
def test_any_measurement_gives_an_estimate(
    n_slots: int, hit_rate: float, n_whole: int, times: tuple[float, float, float]
) -> None:
    steps = {"cached": CachedSteps(times[0], hit_rate), "plain_step_s": times[1], "whole_step_s": times[2]}
    found = estimate(n_slots=n_slots, n_whole=n_whole, **steps)
    best = found.best_between()
    assert best is None or (1 <= best <= n_whole and n_slots - 128 * best >= 48 - best)
    if best is not None:
        assert 0 <= found.hit_rate(best) <= 1
