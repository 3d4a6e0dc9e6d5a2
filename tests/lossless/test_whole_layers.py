"""Whole layers on a GPU with an expert cache for the others: the tokens are stock's, and the memory is the planned one.

The counting device is the GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.engine import layer_search
from moeedge.engine.layer_choice import read_choice
from moeedge.engine.layer_search import open_session
from moeedge.engine.loading import resolve_device
from moeedge.engine.session import Session
from moeedge.engine.types import ALL_ON_CPU, EngineConfig
from moeedge.hardware import devices
from moeedge.native.abi import PrefillPath
from moeedge.planning.memory_map import this_machine
from moeedge.planning.planner import Planner
from moeedge.scheduler.calibration import Calibration
from moeedge.scheduler.config import PlacementConfig
from tests.conftest import TinyFactory
from tests.lossless.conftest import LONG_PROMPT
from tests.support.cases import ATTENTION_CASES, SLOW_CASES, case_model
from tests.support.counting import DEVICE, CountingDevice
from tests.support.hybrid import MANY_EXPERTS, assert_answers, hit_stats, hybrid_config
from tests.support.stock import StockContext

GIB = 2**30
pytestmark = pytest.mark.usefixtures("counting")


def check(
    path: Path,
    draft: Path,
    n_cpu_moe: int = 2,
    ratio: float = 0.3,
    *,
    prefill: str = "auto",
    **changes: object,
) -> None:
    """Two answers of a session with whole layers; `ratio` of all experts in the cache."""
    config = hybrid_config(path, draft, ratio, gamma=4, device=DEVICE, prefill=prefill)
    config = replace(config, n_cpu_moe=n_cpu_moe, **changes)  # type: ignore[arg-type]
    with StockContext(path, n_ctx=512, gpu=DEVICE, n_gpu_layers=99, experts_on_cpu=True) as stock:
        stock.answer(LONG_PROMPT, 24)
        with Session.open(config) as session:
            info = session.info
            in_host_memory = [layer for layer in session.model.info.expert_layers if layer < n_cpu_moe]
            assert info.n_whole_layers == info.n_expert_layers - len(in_host_memory)
            assert_answers(session, stock, LONG_PROMPT, 24, 2)
            if not in_host_memory or ratio == 0:
                assert session.placement_stats() is None
                return
            assert hit_stats(session).pairs % len(in_host_memory) == 0
            n_slots = min(round(ratio * info.n_expert_layers * info.n_experts), len(in_host_memory) * info.n_experts)
            assert info.cache_slots == pytest.approx(n_slots, abs=2)


def test_half_of_the_layers(many: Path, tiny_draft: Path) -> None:
    check(many, tiny_draft)


@pytest.mark.slow
@pytest.mark.parametrize(("n_cpu_moe", "ratio"), [(2, 0.0), *((n, ratio) for n in range(4) for ratio in (0.17, 1.0))])
def test_every_number_of_layers(n_cpu_moe: int, ratio: float, many: Path, tiny_draft: Path) -> None:
    check(many, tiny_draft, n_cpu_moe, ratio)


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in ATTENTION_CASES if name not in ("qwen3moe", *SLOW_CASES[1:])])
def test_every_architecture(case: str, tiny: TinyFactory, tiny_draft: Path) -> None:
    """test_counting_gpu.py has every architecture's experts in a cache on a GPU."""
    check(case_model(tiny, case, experts=MANY_EXPERTS), tiny_draft)


@pytest.mark.slow
def test_fewer_layers_on_the_gpu(many: Path, tiny_draft: Path) -> None:
    """With -ngl 3 of 4 (the output counts), the first layer's experts stay in host memory although -ncmoe is 0."""
    config = replace(hybrid_config(many, tiny_draft, 0.3, device=DEVICE), n_cpu_moe=0, n_gpu_layers=3)
    with Session.open(config) as session:
        assert session.model.host_expert_layers == (0,)
    check(many, tiny_draft, n_gpu_layers=3)


@pytest.mark.slow
def test_streamed_prompts_without_llama_cpps_offload(many: Path, tiny_draft: Path) -> None:
    check(many, tiny_draft, prefill="stream", n_ubatch=2048, op_offload=False)


@pytest.mark.slow
@pytest.mark.usefixtures("cache_folder")
def test_streamed_prompts_get_larger_graphs(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if streaming were the fastest path, and faster with larger graphs."""
    monkeypatch.setattr(Calibration, "prefill_path", PrefillPath.STREAM)
    monkeypatch.setattr(layer_search, "_FASTER", 0.0)
    placement = PlacementConfig(vram_bytes=many.stat().st_size // 3)
    config = EngineConfig(model=many, n_ctx=4096, n_threads=1, device=DEVICE, placement=placement)
    with open_session(config) as session:
        choice = session.layer_choice
        assert choice is not None
        cached = [split for split in choice.splits if split.n_slots]
        assert cached and all((split.n_ubatch, split.op_offload) == (2048, False) for split in cached)
        assert choice.whole_only is not None and choice.whole_only.op_offload
        assert session.target.n_ubatch == (2048 if choice.best in cached else 512)


@pytest.mark.parametrize("n_cpu_moe", [0, 2, ALL_ON_CPU])
def test_the_memory_is_the_planned_one(many: Path, n_cpu_moe: int) -> None:
    config = replace(hybrid_config(many, None, 0.25, device=DEVICE), n_cpu_moe=n_cpu_moe)
    with Planner(config, this_machine(config)) as planner:
        planned = planner.default_map()
    with Session.open(config) as session:
        uses = [use for use in session.target.memory_uses() if use.on_gpu]
        info = session.info
    lines = {line.what.split(":")[0].split(",")[0]: line.n_bytes for line in planned.places[0].lines}
    weights = lines["dense weights"] + lines.get("experts", 0)
    assert weights == sum(use.weights_bytes for use in uses)
    assert lines["KV cache"] == sum(use.memory_bytes for use in uses)
    assert lines["compute buffers"] == sum(use.compute_bytes for use in uses)
    assert planned.budget.n_slots == pytest.approx(info.cache_slots, abs=2)
    assert planned.n_whole_layers == info.n_whole_layers
    assert planned.device_ratio == pytest.approx(
        (info.n_whole_layers + (0.25 * 3 if n_cpu_moe else 0)) / info.n_expert_layers, abs=0.01
    )


@pytest.mark.slow
def test_the_fastest_division_is_measured_and_kept(
    bundled_pair: tuple[Path, Path], counting: CountingDevice, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = bundled_pair
    placement = PlacementConfig(vram_bytes=8_000_000, governed=True)
    config = EngineConfig(model=target, draft=draft, auto_gamma=True, n_ctx=512, device=DEVICE, placement=placement)
    free = devices.read_memory(resolve_device(config))
    opened, open_one = list[EngineConfig](), Session.open
    with monkeypatch.context() as patch:
        patch.setattr(Session, "open", lambda config, **given: opened.append(config) or open_one(config, **given))
        with open_session(config) as session:
            choice, info = session.layer_choice, session.info
    *measured, last = opened  # with drafts of one length and the cache as it is said; the chat as it was asked for
    assert {(each.auto_gamma, each.gamma, each.placement.governed) for each in measured} == {(False, 4, False)}
    assert last.auto_gamma and last.placement.governed
    assert free == devices.read_memory(resolve_device(config))  # all sessions are closed
    assert choice is not None and not choice.kept_from
    whole = choice.whole_only
    assert whole is not None and whole.n_whole == 18  # 420 KiB each
    assert {0, whole.n_whole} < {split.n_whole for split in choice.splits}  # and one in between
    assert choice.best.step_s == min(split.step_s for split in choice.splits)
    for split in choice.splits:  # the same memory for each
        assert 0.9 * 8e6 < split.n_whole * 128 * 3456 + split.n_slots * 3456 <= 8e6
    assert (info.n_whole_layers, info.cache_slots) == (choice.best.n_whole, choice.best.n_slots)
    assert choice.decision.sentence() in info.notes
    with open_session(replace(config, placement=replace(placement, calibrate=False))) as again:
        assert again.layer_choice == choice and again.layer_choice.kept_from
        assert again.info.n_whole_layers == choice.best.n_whole
    counting.set("other_bytes", 7 * GIB)  # another program
    try:
        assert read_choice(config, resolve_device(config)) is None
    finally:
        counting.set("other_bytes", 0)
