"""What a plan says is what a session then does."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.hardware.devices import ResolvedDevice
from moeedge.hardware.host import default_reserve
from moeedge.native.backends import DRY_RUN_GPU
from moeedge.planning.memory_map import PlannedMachine, this_machine
from moeedge.planning.planner import Planner
from moeedge.planning.session_plan import make_session_plan
from moeedge.scheduler.config import PlacementConfig
from tests.conftest import TinyFactory
from tests.support.machine import GIB, MIB, gpu_of
from tests.support.recurrent import make_mamba


def machine_with(vram_bytes: int) -> PlannedMachine:
    """A GPU of that size, 0: none, next to 64 GiB of RAM."""
    gpu = gpu_of(vram_bytes, ggml_name=DRY_RUN_GPU, llama_device=DRY_RUN_GPU)
    return PlannedMachine(gpu if vram_bytes else ResolvedDevice("none"), 64 * GIB, 64 * GIB)


@pytest.mark.parametrize("changes", [{}, {"cache_ratio": 0.5}, {"vram_bytes": MIB}, {"cache_ratio": 0.0}])
def test_context_cache_and_notes_equal_the_sessions(bundled_pair: tuple[Path, Path], changes: dict[str, float]) -> None:
    model, draft = bundled_pair
    placement = PlacementConfig(calibrate=False, **changes)  # type: ignore[arg-type]
    config = EngineConfig(model=model, draft=draft, device="emulated", n_threads=1, placement=placement)
    with Planner(config, this_machine(config)) as planner:
        found = planner.default_map()
        planned = planner.notes
    with Session.open(config) as session:
        info, uses = session.info, session.memory_uses()
    assert (found.n_ctx, found.budget.n_slots) == (info.n_ctx, info.cache_slots)
    assert found.cache_ratio == pytest.approx(info.cache_ratio)
    assert found.budget.pool_bytes == pytest.approx(info.pool_bytes, rel=0.001)
    assert found.kv_bytes == sum(use.memory_bytes for use in uses)
    assert found.compute_bytes == sum(use.compute_bytes for use in uses)
    assert {*planned, *found.budget.notes} <= set(info.notes)


def test_a_process_takes_the_planned_memory(bundled_pair: tuple[Path, Path]) -> None:
    """Resident memory grows by the plan's lines; mapped pages that were never read may be absent."""
    config = EngineConfig(model=bundled_pair[0], device="none", n_ctx=32768, n_threads=1)
    with Planner(config, this_machine(config)) as planner:
        planned = {line.what: line.n_bytes for line in planner.default_map().places[-1].lines}
    process = psutil.Process()
    before = process.memory_info().rss
    with Session.open(config) as session:
        session.target.decode(list(range(10, 522)), phase=1)  # type: ignore[arg-type]
        grown = process.memory_info().rss - before
    expected = sum(planned[what] for what in ("experts", "dense weights", "KV cache", "compute buffers"))
    assert 0.85 * expected < grown < 1.15 * expected + 32 * MIB  # the ring of routing, work buffers of the kernels


def test_a_recurrent_target_gets_no_draft(tmp_path: Path, tiny_draft: Path) -> None:
    config = EngineConfig(model=make_mamba(tmp_path / "mamba.gguf"), draft=tiny_draft, device="none")
    with Planner(config, this_machine(config)) as planner:
        assert planner.chosen.model is None
        assert any("take rejected tokens back" in note for note in planner.notes)
        assert "recurrent" in planner.facts.memory


def test_facts_are_sums_of_the_tensors(tiny: TinyFactory) -> None:
    """16 experts of three matrices 64 x 32 in Q4_0 (18 bytes per 32 weights) in each of 3 layers; 4 are used."""
    config = EngineConfig(model=tiny("qwen3moe"), device="none")
    with Planner(config, this_machine(config)) as planner:
        facts = planner.facts
    assert facts.expert_bytes == 3 * 64 * 32 * 18 // 32
    assert facts.experts_bytes == 3 * 16 * facts.expert_bytes
    embeddings = facts.n_vocab * 64 * 4
    assert facts.active_bytes == facts.dense_bytes - embeddings + facts.experts_bytes // 4
    assert facts.memory == ""
    for arch, word in (("deepseek2", "latent"), ("gpt-oss", "sliding window")):
        config = EngineConfig(model=tiny(arch), device="none")
        with Planner(config, this_machine(config)) as planner:
            assert word in planner.facts.memory


def test_ratio_and_reserve_determine_cache_and_command(bundled_pair: tuple[Path, Path]) -> None:
    def command(reserve: int, ratio: float | None) -> tuple[str, float]:
        config = EngineConfig(model=bundled_pair[0], n_ctx=1024, placement=PlacementConfig(cache_ratio=ratio))
        with Planner(config, machine_with(GIB), reserve=reserve) as planner:
            plan = make_session_plan(planner, given=["-m", "x.gguf", "-md", "d.gguf", "-c", "1024"])
        return plan.command, plan.map.cache_ratio

    assert command(0, 0.5) == ("moeedge chat -m x.gguf -md d.gguf -c 1024 --cache-ratio 0.5", 0.5)
    assert "--cache-ratio" not in command(0, None)[0]
    text, ratio = command(280 * MIB, 1.0)  # most of what the allowance and the reserve leave
    assert 0 < ratio < 0.9 and f"--cache-ratio {ratio:.2f}" in text


def test_a_plan_that_does_not_fit_advises(tiny: TinyFactory) -> None:
    path = tiny("qwen3moe", expert_type="F16", experts=64, layers=6)
    reserve, size = default_reserve(GIB), path.stat().st_size
    machine = PlannedMachine(ResolvedDevice("none"), ram_total_bytes=GIB, ram_free_bytes=reserve + int(1.5 * size))
    with Planner(EngineConfig(model=path, n_ctx=4096), machine) as planner:
        planner._program_bytes = reserve
        plan = make_session_plan(planner, given=["-m", "x.gguf"])
    assert plan.map.verdict == "does not fit" and plan.command == ""
    assert 0 < plan.largest_n_ctx < 4096
    text = " ".join(plan.notes)
    assert f"-c {plan.largest_n_ctx}" in text and "RAM" in text
    machine = PlannedMachine(ResolvedDevice("none"), ram_total_bytes=GIB, ram_free_bytes=reserve + size - 1)
    with Planner(EngineConfig(model=path, n_ctx=256), machine) as planner:
        planner._program_bytes = 0
        plan = make_session_plan(planner, given=["-m", "x.gguf"])
    assert plan.map.verdict == "from disk" and plan.command
    assert any("from the disk" in note for note in plan.notes)
    assert any("A file in" in note for note in plan.notes)
    assert all(line.mapped_bytes == line.n_bytes for line in plan.map.places[-1].lines if line.what == "experts")
