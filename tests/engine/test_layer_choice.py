"""The division of a GPU between whole layers and cache: what is chosen, kept and said, and the estimate of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.engine import layer_search
from moeedge.engine.layer_choice import (
    LayerChoice,
    LayerSplit,
    choice_file,
    is_marked,
    mark,
    read_choice,
)
from moeedge.engine.layer_search import CachedSteps, StepEstimate, has_choice
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError
from moeedge.hardware.devices import ResolvedDevice
from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.run import Run
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.measurement import write_measurement

GIB = 2**30
GPU = ResolvedDevice(
    "gpu", ggml_name="GPU0", label="GPU0 (a card)", llama_device="GPU0", free_bytes=8 * GIB, total_bytes=9 * GIB
)
CACHE = LayerSplit(0, 48, 1900, 0.030)
BETWEEN = LayerSplit(6, 42, 1100, 0.025)
WHOLE = LayerSplit(14, 34, 0, 0.033)
CHOICE = LayerChoice(device="GPU0", n_layers=48, splits=(CACHE, WHOLE, BETWEEN), free_bytes=8 * GIB, seconds=31.0)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "cache"))


def test_the_fastest_is_chosen_and_compared_with_whole_layers() -> None:
    assert CHOICE.best is BETWEEN and CHOICE.whole_only is WHOLE
    said = CHOICE.sentence()
    assert "6 of 48 layers" in said and "1,100 experts" in said and "1.32 times" in said and "--n-cpu-moe 34" in said
    stock = replace(CHOICE, splits=(CACHE, replace(WHOLE, step_s=0.020), BETWEEN))
    assert stock.best.n_slots == 0
    assert "0.80 times the speed of 6 entire layers" not in stock.sentence()  # the other way round
    assert "without a cache" in stock.sentence() and "1.25 times" in stock.sentence()
    alone = replace(CHOICE, splits=(CACHE,))
    assert alone.whole_only is None and "times" not in alone.sentence()
    assert "did not fit" in alone.sentence() and "did not fit" not in CHOICE.sentence()


def test_it_is_kept_for_this_configuration_and_memory(tiny_moe: Path) -> None:
    config = EngineConfig(model=tiny_moe)
    assert read_choice(config, GPU) is None
    write_measurement(choice_file(config, GPU), CHOICE)
    assert read_choice(config, GPU) == replace(CHOICE, from_file=True)
    others: list[dict[str, object]] = [{"gamma": 8}, {"n_batch": 512}]
    others += [{"placement": PlacementConfig(prefill=PrefillPath.CPU)}]
    others += [{"placement": PlacementConfig(device_path=path)} for path in DevicePath]
    files = {choice_file(replace(config, **change), GPU) for change in others}  # type: ignore[arg-type]
    assert len(files) == len(others) and choice_file(config, GPU) not in files
    for change, found in ((-GIB // 16, True), (-GIB, False), (GIB // 16, True), (GIB, False)):
        device = replace(GPU, free_bytes=GPU.free_bytes + change)
        assert (read_choice(config, device) is not None) == found, change
    choice_file(config, GPU).write_text('{"schema": 1, "splits": []}')
    assert read_choice(config, GPU) is None


def test_only_streamed_prompts_have_a_speed() -> None:
    speeds = {PrefillPath.STREAM: 90.0, PrefillPath.CPU: 50.0}
    for path, expected in ((PrefillPath.STREAM, 90.0), (PrefillPath.CPU, 0.0)):
        session = SimpleNamespace(calibration=SimpleNamespace(prefill_ts=speeds, prefill_path=path))
        assert layer_search._streams_ts(session) == expected  # type: ignore[arg-type]
    assert layer_search._streams_ts(SimpleNamespace(calibration=None)) == 0.0  # type: ignore[arg-type]


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
    monkeypatch.setattr(Path, "unlink", lambda *_a, **_b: None)  # as if the process ended
    with mark(WHOLE, config, GPU):
        pass
    assert is_marked(WHOLE, config, GPU) and not is_marked(BETWEEN, config, GPU)
    assert search._measure(WHOLE) is None and search._measure(BETWEEN) is None
    assert opened == [WHOLE, BETWEEN] and len(said) == 3
    anew = replace(config, placement=PlacementConfig(measure_anew=True))
    assert layer_search._Search(anew, GPU, None, Run(said.append))._measure(WHOLE) is None
    assert opened == [WHOLE, BETWEEN, WHOLE]
    with mark(CACHE, config, GPU):
        pass
    assert search.run() is None and len(opened) == 3


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        (GPU, {}, False),  # the tiny model fits
        (GPU, {"placement": PlacementConfig(vram_bytes=10_000)}, True),
        (GPU, {"placement": PlacementConfig(cache_ratio=0.5)}, False),
        (GPU, {"placement": PlacementConfig(vram_bytes=0)}, False),
        (replace(GPU, free_bytes=GIB // 4, total_bytes=GIB // 4), {}, True),
        (replace(GPU, free_bytes=GIB // 4, total_bytes=GIB // 4), {"n_cpu_moe": 1}, False),
        (replace(GPU, free_bytes=GIB // 4, total_bytes=GIB // 4), {"n_gpu_layers": 0}, False),
        (replace(GPU, free_bytes=GIB // 4, total_bytes=GIB // 4), {"mode": "stock"}, False),
        (ResolvedDevice("emulated", ggml_name="emulated", label="emulated (CPU)"), {}, False),
    ],
)
def test_where_there_is_a_choice(
    tiny_moe: Path, device: ResolvedDevice, changes: dict[str, object], expected: bool
) -> None:
    config = EngineConfig(**{"model": tiny_moe, "n_ctx": 256} | changes)  # type: ignore[arg-type]
    assert has_choice(config, device) == expected


def test_a_dense_model_has_none(tiny_draft: Path) -> None:
    small = replace(GPU, free_bytes=GIB // 4, total_bytes=GIB // 4)
    assert not has_choice(EngineConfig(model=tiny_draft), small)


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
    concentrated = estimate(cached=CachedSteps(0.012, 0.9))
    best = concentrated.best_between()
    assert best is not None and best < 14


@given(
    n_slots=st.integers(0, 6144),
    hit_rate=st.floats(0, 1),
    cached_s=st.floats(1e-4, 1),
    plain_s=st.floats(1e-4, 1),
    whole_s=st.floats(1e-4, 1),
    n_whole=st.integers(0, 48),
)
def test_any_measurement_gives_an_estimate(
    n_slots: int, hit_rate: float, cached_s: float, plain_s: float, whole_s: float, n_whole: int
) -> None:
    found = estimate(
        n_slots=n_slots,
        cached=CachedSteps(cached_s, hit_rate),
        plain_step_s=plain_s,
        whole_step_s=whole_s,
        n_whole=n_whole,
    )
    best = found.best_between()
    assert best is None or (1 <= best <= n_whole and n_slots - 128 * best >= 48 - best)
    if best is not None:
        assert 0 <= found.hit_rate(best) <= 1
