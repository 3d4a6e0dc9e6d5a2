"""Where a session's models go: which device holds experts, which layers llama.cpp keeps on a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from moeedge import paths
from moeedge.engine import gguf_file, library
from moeedge.engine.memory import kv_bytes_per_token
from moeedge.engine.model import Model
from moeedge.engine.types import EngineConfig
from moeedge.hardware.budget import default_reserve, model_fits
from moeedge.hardware.resolve import ResolvedDevice, resolve
from moeedge.hardware.spec import DeviceSpec

_ALL_LAYERS = -1  # llama.cpp's word for them
# a model that fits with a context of that size is kept on the GPU whole, and its context made smaller
_CONTEXT_TOKENS = 8192


def resolve_device(config: EngineConfig) -> ResolvedDevice:
    """The device that -dev means for this model; raises DeviceError where there is none of that name."""
    library.start()  # llama.cpp logs as soon as it is asked for devices
    bundled = config.emulate_bundled and paths.is_bundled(config.model)
    return resolve(DeviceSpec.parse(config.device), bundled=bundled)


def load_target(
    config: EngineConfig,
    device: ResolvedDevice | None = None,
    *,
    header_only: bool = False,
    free_bytes: int | None = None,
) -> Model:
    """The target model, its dense weights where -ngl says; header_only and free_bytes as `Model.load` takes them.

    With a GPU for experts: all layers unless -ngl says less, and the experts stay in host memory, from where placement
    moves them, unless the GPU can hold the whole model. A dense one that it cannot hold stays on the CPU.
    """
    device = device or resolve_device(config)

    load = partial(Model.load, config.model, device=device.llama_device, header_only=header_only, free_bytes=free_bytes)
    if device.kind != "gpu":
        return load(n_gpu_layers=config.n_gpu_layers or 0)
    if _whole_model_fits(config, device):
        return load(n_gpu_layers=_ALL_LAYERS)
    if config.n_gpu_layers is None and not gguf_file.summarize(config.model).expert_layers:
        return load(n_gpu_layers=0)
    # a cache that is switched off leaves a wish for layers to llama.cpp, experts included
    whole_layers = config.placement.cache_ratio == 0 and config.n_gpu_layers is not None
    n_gpu_layers = _ALL_LAYERS if config.n_gpu_layers is None else config.n_gpu_layers
    return load(n_gpu_layers=n_gpu_layers, experts_on_cpu=not whole_layers)


def load_draft(
    config: EngineConfig,
    device: ResolvedDevice | None = None,
    *,
    header_only: bool = False,
    free_bytes: int | None = None,
) -> Model:
    """The draft model; it lies whole on the GPU that holds experts, unless -ngl says less."""
    device = device or resolve_device(config)
    n_gpu_layers = config.n_gpu_layers
    if n_gpu_layers is None:
        n_gpu_layers = _ALL_LAYERS if device.kind == "gpu" else 0
    return Model.load(
        _draft_path(config),
        n_gpu_layers=n_gpu_layers,
        device=device.llama_device,
        header_only=header_only,
        free_bytes=free_bytes,
    )


def _draft_path(config: EngineConfig) -> Path:
    if not isinstance(config.draft, Path):
        raise ValueError("there is no draft model")
    return config.draft


def _whole_model_fits(config: EngineConfig, device: ResolvedDevice) -> bool:
    """Whether target, draft and their KV caches fit the GPU, so that nothing need be placed; no, where asked to."""
    if config.placement.asked or config.n_gpu_layers is not None or device.free_bytes == 0:
        return False
    model_bytes, kv_bytes = 0, 0
    has_draft = isinstance(config.draft, Path) and config.gamma > 0
    for path in [config.model, _draft_path(config)] if has_draft else [config.model]:
        with Model.load(path, device=device.llama_device, header_only=True) as header:
            model_bytes += header.info.size_bytes
            kv_bytes += kv_bytes_per_token(header) * (config.n_ctx or min(header.info.n_ctx_train, _CONTEXT_TOKENS))
    return model_fits(
        model_bytes=model_bytes,
        kv_bytes=kv_bytes,
        free_bytes=device.free_bytes,
        reserve_bytes=default_reserve(device.total_bytes),
    )
