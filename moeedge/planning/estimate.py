"""What a model of the catalog would take, from the catalog's facts alone: no header and no network.

For `moeedge list --fits`. The plan from a header is llama.cpp's own account; here experts have the file's mean bits per
weight, and buffers are allowances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeedge.errors import ModelFileError
from moeedge.hardware.devices import resolve
from moeedge.hardware.memory import available_memory, default_reserve, fits, total_memory
from moeedge.hardware.spec import DeviceSpec
from moeedge.hub.catalog import Catalog, Choice, Shape
from moeedge.hub.local import ListedModel, chat_draft
from moeedge.llama import library
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.planning.memory_map import KERNEL_BYTES
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.sizing import n_staging_slots

DEFAULT_N_CTX = 8192  # tokens, as `chat` takes for a model that is entirely on a GPU
_MIB = 2**20
_PROGRAM_BYTES = 100 * _MIB  # of the process, with its vocabulary
_GRAPH_BYTES = 64 * _MIB  # of llama.cpp's buffers besides the logits
_LOGITS = 4 * 512  # bytes per token of the vocabulary: float32, for a batch of 512 tokens
_VOCABULARY = 151936  # tokens, where the catalog does not tell
_KV_BYTES_PER_TOKEN = 96 * 2**10  # where the catalog does not tell: that of Qwen3-30B-A3B
_LAYOUTS = 2  # of experts, each with staging slots: K mixes of llama.cpp store half of the layers in other types

Place = Literal["GPU", "GPU and RAM", "RAM", "disk", "nowhere"]


@dataclass(frozen=True)
class KnownModel:
    """The catalog's facts about one file."""

    file_bytes: int
    experts_bytes: int = 0  # of all experts; 0: a dense model, or unknown: all weights have to be in one place
    n_experts: int = 0  # of all layers
    shape: Shape | None = None  # None: unknown

    @property
    def dense_bytes(self) -> int:
        return self.file_bytes - self.experts_bytes

    @property
    def n_ctx_train(self) -> int | None:
        return self.shape.context if self.shape else None

    @property
    def staging_bytes(self) -> int:
        """Slots of the expert cache on a GPU through which prompts stream experts."""
        if not self.n_experts:
            return 0
        per_layer = self.shape.experts if self.shape else self.n_experts
        n_stage = n_staging_slots(PlacementConfig(), "gpu", per_layer)
        return _LAYOUTS * n_stage * self.experts_bytes // self.n_experts

    def kv_bytes(self, n_ctx: int) -> int:
        """Keys and values of 16 bits."""
        if self.shape is None:
            return _KV_BYTES_PER_TOKEN * n_ctx
        return self.shape.kv_bytes_per_token * n_ctx + self.shape.window_bytes

    def context_bytes(self, n_ctx: int) -> int:
        """Keys, values and compute buffers."""
        vocabulary = self.shape.vocabulary if self.shape else None
        return self.kv_bytes(n_ctx) + _GRAPH_BYTES + _LOGITS * (vocabulary or _VOCABULARY)


@dataclass(frozen=True)
class Memory:
    """What is free, in bytes; vram_bytes 0: no GPU."""

    ram_bytes: int
    vram_bytes: int = 0
    vram_total_bytes: int = 0
    ram_total_bytes: int = 0  # 0: all is free


def free_memory(device: str = "auto", *, vram_bytes: int | None = None, ram_bytes: int | None = None) -> Memory:
    """What is free here, on the GPU that -dev means and in RAM; given sizes replace the measured ones.

    Raises DeviceError for an unknown device.
    """
    ram, total = (available_memory(), total_memory()) if ram_bytes is None else (ram_bytes, ram_bytes)
    if vram_bytes is not None or device == "none":
        return Memory(ram, vram_bytes or 0, ram_total_bytes=total)
    library.start()
    found = resolve(DeviceSpec.parse(device))
    if found.kind != "gpu":
        return Memory(ram, ram_total_bytes=total)
    return Memory(ram, found.free_bytes, found.total_bytes, total)


@dataclass(frozen=True)
class EstimatedMap:
    """A model in memory with one context."""

    n_ctx: int
    place: Place  # of the weights
    device_ratio: float  # share of the experts that the GPU holds
    ram_ratio: float  # share of the experts that have room in RAM


def known_model(choice: Choice) -> KnownModel | None:
    """The facts of the catalog; None where it has no size."""
    size, shape = choice.variant.size_bytes or choice.variant.about_bytes, choice.entry.shape
    if size is None:
        return None
    if shape is None or not shape.experts:
        return KnownModel(size, shape=shape)
    return KnownModel(size, round(size * shape.expert_share), shape.expert_layers * shape.experts, shape)


def known_file(path: Path, size_bytes: int) -> KnownModel:
    """A file on this machine that the catalog does not have: its experts by its header, the rest assumed."""
    try:
        tensors, _ = expert_tensors(path)
    except ModelFileError:
        return KnownModel(size_bytes)
    n_experts = sum({tensor.layer: tensor.n_experts for tensor in tensors}.values())
    return KnownModel(size_bytes, expert_bytes(tensors), n_experts)


def known_models(models: Iterable[ListedModel], catalog: Catalog) -> dict[str, KnownModel]:
    """What is known of the rows of `moeedge list`, by name; those of unknown size are left out."""
    found = {}
    for row in models:
        choice = catalog.find(row.name) if row.name.partition(":")[0] in catalog.entries else None
        known = known_model(choice) if choice else None
        if choice is None and row.path is not None and row.size_bytes:
            known = known_file(Path(row.path), row.size_bytes)
        if known is not None:
            found[row.name] = known
    return found


def estimate(model: KnownModel, memory: Memory, n_ctx: int, draft: KnownModel | None = None) -> EstimatedMap:
    """Where the weights of `model` go: on the GPU entirely, else experts in RAM and as many on the GPU as fit there.

    draft: drafts for it; it is on the GPU if the model uses one.
    """
    contexts_bytes = model.context_bytes(n_ctx)
    if draft is not None:
        contexts_bytes += draft.file_bytes + draft.context_bytes(n_ctx)
    reserve_bytes = default_reserve(memory.vram_total_bytes or memory.vram_bytes)
    room_bytes = memory.vram_bytes - KERNEL_BYTES - reserve_bytes - contexts_bytes
    on_gpu = 0 < model.file_bytes <= room_bytes
    beside = not on_gpu and model.n_experts > 0 and memory.vram_bytes > 0 and model.dense_bytes <= room_bytes
    device_ratio = 1.0 if on_gpu else 0.0
    if beside:
        slots_bytes = max(0, room_bytes - model.dense_bytes - model.staging_bytes)
        n_slots = min(model.n_experts, int(slots_bytes / model.experts_bytes * model.n_experts))
        device_ratio = n_slots / model.n_experts
    # experts are pages of the file, which the system may drop; dense weights next to them are read for every token
    fixed_bytes = _PROGRAM_BYTES + (0 if on_gpu or beside else contexts_bytes)
    fixed_bytes += model.dense_bytes if model.n_experts and not (on_gpu or beside) else 0
    paged_bytes = 0 if on_gpu else model.experts_bytes if model.n_experts else model.dense_bytes
    host_bytes = (
        0 if on_gpu else model.experts_bytes if beside else model.file_bytes + (draft.file_bytes if draft else 0)
    )
    loads_experts = model.n_experts and not fits(
        host_bytes, memory.ram_bytes, memory.ram_total_bytes or memory.ram_bytes
    )
    place: Place = "GPU" if on_gpu else "GPU and RAM" if beside else "RAM"
    if fixed_bytes + paged_bytes > memory.ram_bytes or loads_experts:
        place = "nowhere" if fixed_bytes > memory.ram_bytes else "GPU" if on_gpu else "disk"
    ram_ratio = (memory.ram_bytes - fixed_bytes) / model.experts_bytes if model.experts_bytes else 1.0
    return EstimatedMap(n_ctx, place, device_ratio, max(0.0, min(1.0, ram_ratio)))


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
    models = list(models)
    known = known_models(models, catalog)
    rows = []
    for row in models:
        if row.name in known:
            model = known[row.name]
            n_ctx = min(DEFAULT_N_CTX, model.n_ctx_train or DEFAULT_N_CTX)
            choice = catalog.find(row.name)
            draft = None if choice is None else chat_draft(catalog, choice)
            drafts = None if draft is None else known_model(draft)
            rows.append(FittingModel(row, estimate(model, memory, n_ctx, drafts)))
    order: tuple[Place, ...] = ("GPU", "GPU and RAM", "RAM", "disk")
    found = [row for row in rows if row.map.place != "nowhere"]
    found.sort(key=lambda row: (order.index(row.map.place), -known[row.model.name].file_bytes))
    return FittingModels(memory, tuple(found), len(models) - len(found))
