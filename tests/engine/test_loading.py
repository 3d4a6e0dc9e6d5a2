"""Where models are loaded to: a GPU is not needed to see what llama.cpp is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeedge import paths
from moeedge.engine import loading
from moeedge.engine.types import MAX_N_CTX, EngineConfig
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama import model_memory
from moeedge.llama.model import Model
from moeedge.scheduler.config import PlacementConfig

_GIB = 2**30
SMALL_GPU = ResolvedDevice(
    "gpu", ggml_name="GPU0", label="GPU0", llama_device="none", free_bytes=_GIB // 4, total_bytes=_GIB
)
LARGE_GPU = ResolvedDevice(
    "gpu", ggml_name="GPU0", label="GPU0", llama_device="none", free_bytes=24 * _GIB, total_bytes=24 * _GIB
)
NO_DEVICE = ResolvedDevice("none", llama_device="auto")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every load that is no look at a header."""
    calls: list[dict[str, Any]] = []
    load = Model.load

    def remember(path: Path, **options: Any) -> Model:
        if not options.get("header_only"):
            calls.append({"name": path.name, **options})
        return load(path, **{key: value for key, value in options.items() if key == "header_only"})

    monkeypatch.setattr(Model, "load", remember)
    return calls


def config(model: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": model, "n_ctx": 256} | changes)


@pytest.mark.parametrize(
    ("device", "changes", "n_gpu_layers", "experts_on_cpu"),
    [
        (NO_DEVICE, {}, 0, False),
        (NO_DEVICE, {"n_gpu_layers": 7}, 7, False),
        (SMALL_GPU, {}, -1, True),
        (SMALL_GPU, {"n_gpu_layers": 2}, 2, True),
        (SMALL_GPU, {"n_cpu_moe": 1}, -1, True),
        (LARGE_GPU, {"n_cpu_moe": 1}, -1, True),
        (LARGE_GPU, {"n_cpu_moe": 0, "placement": PlacementConfig(cache_ratio=0.0), "n_gpu_layers": 9}, 9, True),
        (NO_DEVICE, {"n_cpu_moe": 1, "n_gpu_layers": 9}, 9, True),
        (LARGE_GPU, {}, -1, False),  # all of it fits: nothing to place
        (LARGE_GPU, {"n_gpu_layers": 2}, 2, True),
        (LARGE_GPU, {"placement": PlacementConfig(cache_ratio=0.5)}, -1, True),
        (LARGE_GPU, {"placement": PlacementConfig(cache_ratio=0.0)}, -1, True),
        (LARGE_GPU, {"placement": PlacementConfig(cache_ratio=0.0), "n_gpu_layers": 9}, 9, False),
    ],
)
def test_the_target(
    tiny_moe: Path,
    asked: list[dict[str, Any]],
    device: ResolvedDevice,
    changes: dict[str, Any],
    n_gpu_layers: int,
    experts_on_cpu: bool,
) -> None:
    with loading.load_target(config(tiny_moe, **changes), device):
        pass
    (options,) = asked
    assert options["n_gpu_layers"] == n_gpu_layers
    assert options["experts_on_cpu"] == experts_on_cpu
    assert options["device"] == device.llama_device
    assert options.get("n_cpu_moe") == changes.get("n_cpu_moe")


@pytest.mark.parametrize(
    ("device", "changes", "n_gpu_layers"),
    [(SMALL_GPU, {}, 0), (SMALL_GPU, {"n_gpu_layers": 2}, 2), (LARGE_GPU, {}, -1)],
)
def test_a_dense_target_is_on_the_gpu_entirely_or_as_requested(
    tiny_draft: Path, asked: list[dict[str, Any]], device: ResolvedDevice, changes: dict[str, Any], n_gpu_layers: int
) -> None:
    with loading.load_target(config(tiny_draft, **changes), device):
        pass
    assert asked[0]["n_gpu_layers"] == n_gpu_layers


@pytest.mark.parametrize(
    ("device", "changes", "n_gpu_layers"),
    [(NO_DEVICE, {}, 0), (SMALL_GPU, {}, -1), (SMALL_GPU, {"n_gpu_layers": 0}, 0)],
)
def test_the_draft_is_entirely_on_the_gpu_of_the_experts(
    tiny_moe: Path,
    tiny_draft: Path,
    asked: list[dict[str, Any]],
    device: ResolvedDevice,
    changes: dict[str, Any],
    n_gpu_layers: int,
) -> None:
    with loading.load_draft(config(tiny_moe, draft=tiny_draft, **changes), device):
        pass
    (options,) = asked
    assert (options["name"], options["n_gpu_layers"]) == (tiny_draft.name, n_gpu_layers)
    assert "experts_on_cpu" not in options


def test_a_context_that_does_not_fit_the_gpu_keeps_experts_off_it(tiny_moe: Path, asked: list[dict[str, Any]]) -> None:
    device = ResolvedDevice("gpu", ggml_name="GPU0", llama_device="none", free_bytes=4 * _GIB, total_bytes=4 * _GIB)
    for n_ctx, fits in ((512, True), (MAX_N_CTX, False)):  # the latter's KV cache takes 6 GiB
        with loading.load_target(config(tiny_moe, n_ctx=n_ctx), device):
            pass
        assert asked[-1]["experts_on_cpu"] != fits


def test_a_long_default_context_does_not(
    tiny_moe: Path, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model was trained for 4,096 tokens, whose KV cache takes three times 2**19 bytes."""
    free_bytes = 256 * 2**20 + tiny_moe.stat().st_size + 2**19
    device = ResolvedDevice("gpu", ggml_name="GPU0", llama_device="none", free_bytes=free_bytes, total_bytes=_GIB)
    for n_tokens, fits in ((8192, False), (512, True)):
        monkeypatch.setattr(model_memory, "DEFAULT_N_CTX", n_tokens)
        with loading.load_target(config(tiny_moe, n_ctx=0), device):
            pass
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
