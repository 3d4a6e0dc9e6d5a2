"""What llama.cpp would allocate for a model without weights is what it allocates for the model, and for a session."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware import rpc
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.settings import ContextSettings, LoadSettings, TensorOverride
from moeedge.native.backends import DRY_RUN_GPU, MemoryUse
from moeedge.planning.memory_map import MemoryMap, footprint, this_machine
from moeedge.planning.planner import Planner
from tests.conftest import TinyFactory
from tests.support.raw_ggml import find_device
from tests.support.recurrent import make_mamba
from tests.support.tiny import ARCHITECTURES
from tests.support.worker import WorkerProcess


def uses(path: Path, n_ctx: int, *, header_only: bool) -> dict[str, MemoryUse]:
    """By buffer type, of a model on the CPU."""
    with (
        Model.load(path, device="none", header_only=header_only) as model,
        Context(model, n_ctx=n_ctx, n_threads=1) as context,
    ):
        return {use.buffer_type: use for use in context.memory_uses()}


def kv_bytes(path: Path, n_ctx: int) -> int:
    return sum(use.memory_bytes for use in uses(path, n_ctx, header_only=True).values())


def check(path: Path, n_ctx: int) -> None:
    real, planned = (uses(path, n_ctx, header_only=header_only) for header_only in (False, True))
    for name in ("memory_bytes", "compute_bytes"):
        totals = [sum(getattr(use, name) for use in found.values()) for found in (real, planned)]
        assert totals[0] == totals[1] > 0, (name, n_ctx)
    assert real.keys() - {"CPU_Mapped"} == planned.keys()
    for name in planned.keys() - {"CPU"}:  # repacked
        assert real[name].weights_bytes == planned[name].weights_bytes
    # what stays in the file is mapped as one range, from the first tensor to the last
    if "CPU_Mapped" in real:
        assert real["CPU_Mapped"].weights_bytes >= planned["CPU"].weights_bytes


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in ("eagle3", "dflash")])
def test_a_context_takes_exactly_the_planned_memory(tiny: TinyFactory, arch: str) -> None:
    for n_ctx in (512, 2048, 8192):
        check(tiny(arch), n_ctx)


def test_a_recurrent_model_takes_the_planned_memory(tmp_path: Path) -> None:
    path = make_mamba(tmp_path / "mamba.gguf")
    check(path, 512)
    assert kv_bytes(path, 512) == kv_bytes(path, 4096)  # whatever the context


@pytest.mark.parametrize("experts_on_cpu", [True, False])
def test_a_dry_run_gpu_is_laid_out_like_a_real_device(
    worker: WorkerProcess, bundled_pair: tuple[Path, Path], experts_on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's device is used as the GPU: llama.cpp puts entire layers on it if listed explicitly."""
    name, _ = rpc.add_worker(worker.endpoint)
    pointers = (ctypes.c_void_p * 2)(find_device(name), None)
    device_list = library.device_list
    monkeypatch.setattr(library, "device_list", lambda device: pointers if device == name else device_list(device))
    found = []
    for device, header_only in ((name, False), (name, True), (DRY_RUN_GPU, True)):
        how: dict[str, Any] = {"device": device, "n_gpu_layers": -1, "header_only": header_only}
        with Model.load(bundled_pair[0], experts_on_cpu=experts_on_cpu, **how) as model:
            found.append(footprint(model, 4096, EngineConfig(model=bundled_pair[0])))
    real, planned, dry_run = (next(iter(memory.gpus.values())) for memory in found)
    assert real == planned
    assert dry_run.kv_bytes == real.kv_bytes
    assert dry_run.compute_bytes == pytest.approx(real.compute_bytes, rel=0.01)
    # CUDA pads rows to 512 weights, which matters at the width of a toy only
    assert real.weights_bytes <= dry_run.weights_bytes <= 1.04 * real.weights_bytes
    assert found[0].fixed_bytes == found[1].fixed_bytes == found[2].fixed_bytes


# target, draft, and fields of the configuration
SESSIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "quantized": (
        "qwen3moe",
        "qwen3",
        {"context": ContextSettings(type_k="q8_0", type_v="q8_0"), "draft_type_k": "q4_0"},
    ),
    "f32": ("qwen3moe", "qwen3", {"context": ContextSettings(type_k="f32", flash_attn="off")}),
    "no flash": ("qwen3moe", "qwen3", {"context": ContextSettings(flash_attn="off"), "n_ubatch": 32}),
    "not mapped": ("qwen3moe", "qwen3", {"n_batch": 16, "load": LoadSettings("none")}),
    "locked": ("qwen3moe", "qwen3", {"load": LoadSettings("mmap+mlock", (TensorOverride("exps", "CPU"),))}),
    "recurrent": ("qwen35moe", "ngram", {}),
    "recurrent, auto": ("qwen35moe", "ngram", {"auto_gamma": True}),  # which may draft more tokens: a state for each
    "mtp": ("glm4moe", "mtp", {}),
    "chain": ("step35", "mtp", {}),
    "eagle3": ("qwen3moe", "eagle3", {}),
    "dflash": ("qwen3moe", "dflash", {}),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_takes_the_planned_memory(name: str, tiny: TinyFactory) -> None:
    """KV caches and buffers of target and draft, a head's layers among them, against what the plan says."""
    arch, draft, changes = SESSIONS[name]
    heads = {"head_dim": 32} if draft == "qwen3" else {}
    source: Any = draft if draft in ("ngram", "mtp") else tiny(draft, **heads)
    config = EngineConfig(
        model=tiny(arch, **heads), draft=source, n_ctx=1024, n_threads=1, gamma=4, device="none", **changes
    )
    planned = default_map(config)
    with Session.open(config) as session:
        used = session.memory_uses()
        of_target = session.target.memory_uses()
    assert planned.kv_bytes == sum(use.memory_bytes for use in used) > 0
    assert planned.compute_bytes == sum(use.compute_bytes for use in used) > 0
    if draft != "ngram":
        assert planned.kv_bytes > sum(use.memory_bytes for use in of_target)
    if draft == "qwen3":
        lines = {line.what: line for place in planned.places for line in place.lines}
        is_dropped = config.load.is_mapped and not config.load.is_locked
        assert [lines[what].mapped_bytes > 0 for what in ("dense weights", "draft: weights")] == [is_dropped] * 2


def default_map(config: EngineConfig) -> MemoryMap:
    with Planner(config, this_machine(config)) as planner:
        return planner.default_map()


def test_a_plan_for_a_gpu_that_is_not_here_takes_its_names(tiny_moe: Path) -> None:
    config = EngineConfig(model=tiny_moe, n_ctx=512, load=LoadSettings(overrides=(TensorOverride("exps", "CUDA0"),)))
    with pytest.raises(InputError) as caught:
        Planner(config, this_machine(config))
    assert "CPU" in caught.value.hint
    with Planner(config, this_machine(config, vram_bytes=1 << 30)) as planner:
        found = planner.default_map()
        assert found.n_whole_layers == 3 and found.budget.n_slots == 0
