"""What llama.cpp would allocate for a model without weights is what it allocates for the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.engine.types import EngineConfig
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.devices import DRY_RUN_GPU, MemoryUse
from moeedge.planning.memory_map import footprint
from tests.conftest import TinyFactory
from tests.support.recurrent import make_mamba
from tests.support.tiny import ARCHITECTURES
from tests.support.worker import WorkerProcess

CONTEXTS = (512, 2048, 8192, 32768)


def uses(path: Path, n_ctx: int, *, header_only: bool) -> dict[str, MemoryUse]:
    """By buffer type, of a model on the CPU."""
    with (
        Model.load(path, device="none", header_only=header_only) as model,
        Context(model, n_ctx=n_ctx, n_threads=1) as context,
    ):
        return {use.buffer_type: use for use in context.memory_uses()}


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
    for n_ctx in CONTEXTS[:3]:
        check(tiny(arch), n_ctx)


def test_long_contexts_of_the_bundled_pair_take_the_planned_memory(bundled_pair: tuple[Path, Path]) -> None:
    for path in bundled_pair:
        check(path, CONTEXTS[-1])


def test_a_recurrent_model_takes_the_planned_memory(tmp_path: Path) -> None:
    path = make_mamba(tmp_path / "mamba.gguf")
    check(path, 512)
    hidden_states = [sum(use.memory_bytes for use in uses(path, n, header_only=True).values()) for n in (512, 4096)]
    assert hidden_states[0] == hidden_states[1]  # whatever the context


def test_kv_caches_are_as_the_architecture_keeps_them(tiny: TinyFactory) -> None:
    """Tiny models: 3 layers, 2 heads of 16 for keys and as many for values, 2 bytes each."""
    per_token = {
        "qwen3moe": 3 * 2 * 16 * 2 * 2,
        "deepseek2": 3 * (32 + 16) * 2,  # one latent vector and one rotated key per layer
    }
    for arch, expected in per_token.items():
        kv = sum(use.memory_bytes for use in uses(tiny(arch), 4096, header_only=True).values())
        assert kv == 4096 * expected, arch
    # gpt-oss: every other layer keeps a window of 32 tokens and a batch of 512, rounded up to 256 positions
    full, window = 1, 2
    kv = sum(use.memory_bytes for use in uses(tiny("gpt-oss"), 4096, header_only=True).values())
    assert kv == (full * 4096 + window * 768) * 2 * 16 * 2 * 2


@pytest.mark.parametrize("experts_on_cpu", [True, False])
def test_a_dry_run_gpu_is_laid_out_like_a_real_device(
    worker: WorkerProcess, bundled_pair: tuple[Path, Path], experts_on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's device is used as the GPU: llama.cpp puts entire layers on it if listed explicitly."""
    import ctypes

    from moeedge.hardware import rpc
    from moeedge.llama import library

    name, _ = rpc.add_worker(worker.endpoint)
    pointers = (ctypes.c_void_p * 2)(library._device(name), None)
    device_list = library.device_list
    monkeypatch.setattr(library, "device_list", lambda device: pointers if device == name else device_list(device))
    found = []
    for device, header_only in ((name, False), (name, True), (DRY_RUN_GPU, True)):
        with Model.load(
            bundled_pair[0], device=device, n_gpu_layers=-1, experts_on_cpu=experts_on_cpu, header_only=header_only
        ) as model:
            found.append(footprint(model, 4096, EngineConfig(model=bundled_pair[0])))
    real, planned, dry_run = (next(iter(memory.gpus.values())) for memory in found)
    assert real == planned
    assert dry_run.kv_bytes == real.kv_bytes
    assert dry_run.compute_bytes == pytest.approx(real.compute_bytes, rel=0.01)
    # CUDA pads rows to 512 weights, which matters at the width of a toy only
    assert real.weights_bytes <= dry_run.weights_bytes <= 1.04 * real.weights_bytes
    assert found[0].repacked_bytes == found[1].repacked_bytes == found[2].repacked_bytes
