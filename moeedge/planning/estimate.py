"""Where the models of `moeedge list --fits` go, from the catalog's facts alone: no header and no network.

The rules are those of a session (`llama.model_memory`, `scheduler.sizing`), and the facts less exact: experts have the
file's mean bits per weight, and compute buffers are allowances.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moeedge.errors import ModelFileError
from moeedge.hardware.devices import resolve
from moeedge.hardware.host import available_memory, default_reserve, fits, total_memory
from moeedge.hardware.spec import DeviceSpec
from moeedge.hub.catalog import Catalog, Choice
from moeedge.hub.local import ListedModel, chat_draft
from moeedge.llama import library
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model_memory import ModelMemory, fit_whole
from moeedge.planning.memory_map import KERNEL_BYTES
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.sizing import n_staging_slots, plan_budget

_MIB = 2**20
_PROGRAM_BYTES = 100 * _MIB  # of the process, with its vocabulary
_GRAPH_BYTES = 64 * _MIB  # of llama.cpp's buffers besides the logits
_LOGITS = 4 * 512  # bytes per token of the vocabulary: float32, for a batch of 512 tokens
_VOCABULARY = 151936  # tokens, where the catalog does not tell
_KV_BYTES_PER_TOKEN = 96 * 2**10  # where the catalog does not tell: that of Qwen3-30B-A3B
_UNKNOWN = ModelMemory(0, None, _KV_BYTES_PER_TOKEN, compute_bytes=_GRAPH_BYTES + _LOGITS * _VOCABULARY)
_LAYOUTS = 2  # of experts, each with staging slots: K mixes of llama.cpp store half of the layers in other types

Place = Literal["GPU", "GPU and RAM", "RAM", "disk", "nowhere"]
_ORDER: tuple[Place, ...] = ("GPU", "GPU and RAM", "RAM", "disk")  # the best first


@dataclass(frozen=True)
class Memory:
    """Free memory in bytes; vram_bytes 0: no GPU. A total of 0: all is free."""

    ram_bytes: int
    vram_bytes: int = 0
    vram_total_bytes: int = 0
    ram_total_bytes: int = 0


def free_memory(vram_bytes: int | None = None, ram_bytes: int | None = None) -> Memory:
    """The free memory of the GPU that -dev auto means and of RAM; given sizes replace the measured ones."""
    ram, total = (available_memory(), total_memory()) if ram_bytes is None else (ram_bytes, ram_bytes)
    if vram_bytes is not None:
        return Memory(ram, vram_bytes, ram_total_bytes=total)
    library.start()
    device = resolve(DeviceSpec("auto"))
    return Memory(ram, *((device.free_bytes, device.total_bytes) if device.kind == "gpu" else (0, 0)), total)


@dataclass(frozen=True)
class EstimatedMap:
    """A model in memory with one context."""

    n_ctx: int
    place: Place  # of the weights
    device_ratio: float  # share of the experts that the GPU holds
    ram_ratio: float  # share of the experts that have room in RAM


def known_model(choice: Choice) -> ModelMemory | None:
    """The facts of the catalog; None where it has no size."""
    size, shape = choice.variant.size_bytes or choice.variant.about_bytes, choice.entry.shape
    if size is None or shape is None:
        return None if size is None else replace(_UNKNOWN, weights_bytes=size)
    return ModelMemory(
        size,
        shape.context,
        shape.kv_bytes_per_token,
        experts_bytes=round(size * shape.expert_share),
        n_expert_layers=shape.expert_layers,
        n_experts=shape.experts,
        window_bytes=shape.window_bytes,
        compute_bytes=_GRAPH_BYTES + _LOGITS * (shape.vocabulary or _VOCABULARY),
    )


def known_file(path: Path, size_bytes: int) -> ModelMemory:
    """A file on this machine that the catalog does not have: its experts by its header, the rest assumed."""
    known = replace(_UNKNOWN, weights_bytes=size_bytes)
    with suppress(ModelFileError):
        tensors, _ = expert_tensors(path)
        n_experts, n_bytes = {tensor.layer: tensor.n_experts for tensor in tensors}, expert_bytes(tensors)
        n_most = max(n_experts.values(), default=0)
        known = replace(known, experts_bytes=n_bytes, n_expert_layers=len(n_experts), n_experts=n_most)
    return known


def known_row(row: ListedModel, choice: Choice | None) -> ModelMemory | None:
    """The facts of a row of `moeedge list`, by its entry in the catalog or else by its file; None: no size."""
    if choice is not None:
        return known_model(choice)
    return known_file(Path(row.path), row.size_bytes) if row.path and row.size_bytes else None


def estimate(model: ModelMemory, memory: Memory, draft: ModelMemory | None = None) -> EstimatedMap:
    """Where the weights of `model` go: on the GPU entirely, else experts in RAM and as many on the GPU as fit there.

    The context is that of a chat without -c. draft: drafts for it; it is on the GPU if the model uses one.
    """
    models = [model] if draft is None else [model, draft]
    contexts_bytes = sum(each.context_bytes() for each in models) + (draft.weights_bytes if draft else 0)
    free_bytes, total_bytes = memory.vram_bytes - KERNEL_BYTES, memory.vram_total_bytes or memory.vram_bytes
    gpu_bytes = model.dense_bytes + contexts_bytes
    place: Place
    device_ratio, fixed_bytes = 0.0, _PROGRAM_BYTES
    # experts are pages of the file, which the system may drop; dense weights next to them are read for every token
    if model.weights_bytes > 0 and fit_whole(models, free_bytes, total_bytes):
        place, device_ratio, paged_bytes, host_bytes = "GPU", 1.0, 0, 0
    elif model.n_experts > 0 and memory.vram_bytes > 0 and fits(gpu_bytes, free_bytes, total_bytes):
        place, paged_bytes, host_bytes = "GPU and RAM", model.experts_bytes, model.experts_bytes
        each_bytes = model.experts_bytes // (model.n_expert_layers * model.n_experts)
        staging = _LAYOUTS * n_staging_slots(PlacementConfig(), "gpu", model.n_experts, each_bytes)
        device_ratio = plan_budget(
            expert_bytes_total=model.experts_bytes,
            n_expert_layers=model.n_expert_layers,
            n_experts=model.n_experts,
            free_bytes=free_bytes - gpu_bytes,
            reserve_bytes=default_reserve(total_bytes) + staging * each_bytes,
        ).ratio
    else:
        place, host_bytes = "RAM", sum(each.weights_bytes for each in models)  # as `engine.loading.host_bytes`
        paged_bytes = model.experts_bytes if model.n_experts else model.dense_bytes
        fixed_bytes += contexts_bytes + (model.dense_bytes if model.n_experts else 0)
    ram_total_bytes = memory.ram_total_bytes or memory.ram_bytes
    loads_experts = model.n_experts and not fits(host_bytes, memory.ram_bytes, ram_total_bytes)
    if fixed_bytes + paged_bytes > memory.ram_bytes or loads_experts:
        place = "nowhere" if fixed_bytes > memory.ram_bytes else "GPU" if place == "GPU" else "disk"
    ram_ratio = (memory.ram_bytes - fixed_bytes) / model.experts_bytes if model.experts_bytes else 1.0
    return EstimatedMap(model.default_n_ctx(), place, device_ratio, max(0.0, min(1.0, ram_ratio)))


@dataclass(frozen=True)
class FittingModel:
    """A row of `moeedge list --fits`."""

    model: ListedModel
    map: EstimatedMap


@dataclass(frozen=True)
class FittingModels:
    """Models that run in some memory, the best placed first, and of these the largest."""

    memory: Memory
    rows: tuple[FittingModel, ...]
    n_others: int  # that do not run there, or of unknown size


def fitting(models: Iterable[ListedModel], catalog: Catalog, memory: Memory) -> FittingModels:
    """Which of `models` run in `memory`, with a context of 8,192 tokens or what they were trained with."""
    models, sizes = list(models), dict[str, int]()
    rows = []
    for row in models:
        choice = catalog.find(row.name)
        known = known_row(row, choice)
        if known is not None:
            draft = None if choice is None else chat_draft(catalog, choice)
            placed = estimate(known, memory, None if draft is None else known_model(draft))
            rows += [FittingModel(row, placed)] if placed.place != "nowhere" else []
            sizes[row.name] = known.weights_bytes
    rows.sort(key=lambda row: (_ORDER.index(row.map.place), -sizes[row.model.name]))
    return FittingModels(memory, tuple(rows), len(models) - len(rows))
