"""What a model of the catalog would take, from the catalog's facts alone: no header and no network.

For `moeedge list --fits` and for a plan of a model whose header cannot be read. The plan from a header is llama.cpp's
own account; here experts have the file's mean bits per weight, and buffers are allowances.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeedge.errors import InputError, ModelFileError
from moeedge.hardware.devices import Storage, resolve
from moeedge.hardware.memory import available_memory, default_reserve, fits, total_memory
from moeedge.hardware.spec import DeviceSpec
from moeedge.hub.catalog import Catalog, Choice, Shape
from moeedge.hub.local import ListedModel, chat_draft
from moeedge.llama import library
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.planning.memory_map import KERNEL_BYTES, MemoryItem, MemoryPool, Verdict, chat_vram
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.sizing import n_staging_slots
from moeedge.units import format_bytes

DEFAULT_N_CTX = 8192  # tokens, as `chat` takes for a model that is entirely on a GPU
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
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

    name: str
    file_bytes: int
    is_exact: bool  # the size
    experts_bytes: int = 0  # of all experts; 0: a dense model, or unknown: all weights have to be in one place
    n_experts: int = 0  # of all layers
    shape: Shape | None = None  # None: unknown

    @property
    def dense_bytes(self) -> int:
        return self.file_bytes - self.experts_bytes

    @property
    def active_bytes(self) -> int:
        """Read per token: the dense weights and the experts in use."""
        used = self.shape.used / self.shape.experts if self.shape and self.n_experts else 0.0
        return self.dense_bytes + round(self.experts_bytes * used)

    @property
    def n_ctx_train(self) -> int | None:
        return self.shape.context if self.shape else None

    @property
    def compute_bytes(self) -> int:
        vocabulary = self.shape.vocabulary if self.shape else None
        return _GRAPH_BYTES + _LOGITS * (vocabulary or _VOCABULARY)

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
    kv_bytes: int  # of model and draft
    places: tuple[MemoryPool, ...]  # the GPU if there is one, then the RAM
    place: Place  # of the weights
    device_ratio: float  # share of the experts that the GPU holds
    ram_ratio: float  # share of the experts that have room in RAM

    @property
    def whole_on_gpu(self) -> bool:
        return self.place == "GPU"

    @property
    def verdict(self) -> Verdict:
        return {"disk": "from disk", "nowhere": "does not fit"}.get(self.place, "fits")  # type: ignore[return-value]


def known_model(choice: Choice) -> KnownModel | None:
    """The facts of the catalog; None where it has no size."""
    exact, shape = choice.variant.size_bytes, choice.entry.shape
    size = exact or choice.variant.about_bytes
    if size is None:
        return None
    if shape is None or not shape.experts:
        return KnownModel(choice.name, size, exact is not None, shape=shape)
    experts_bytes, n_experts = round(size * shape.expert_share), shape.expert_layers * shape.experts
    return KnownModel(choice.name, size, exact is not None, experts_bytes, n_experts, shape)


def known_file(name: str, path: Path, size_bytes: int) -> KnownModel:
    """A file on this machine that the catalog does not have: its experts by its header, the rest assumed."""
    try:
        tensors, _ = expert_tensors(path)
    except ModelFileError:
        return KnownModel(name, size_bytes, True)
    n_experts = sum({tensor.layer: tensor.n_experts for tensor in tensors}.values())
    return KnownModel(name, size_bytes, True, expert_bytes(tensors), n_experts)


def known_models(models: Iterable[ListedModel], catalog: Catalog) -> dict[str, KnownModel]:
    """What is known of the rows of `moeedge list`, by name; those of unknown size are left out."""
    found = {}
    for row in models:
        choice = catalog.find(row.name) if row.name.partition(":")[0] in catalog.entries else None
        known = known_model(choice) if choice else None
        if choice is None and row.path is not None and row.size_bytes:
            known = known_file(row.name, Path(row.path), row.size_bytes)
        if known is not None:
            found[row.name] = known
    return found


def estimate(model: KnownModel, memory: Memory, n_ctx: int, draft: KnownModel | None = None) -> EstimatedMap:
    """Where the weights of `model` go: on the GPU entirely, else experts in RAM and as many on the GPU as fit there.

    draft: drafts for it; it is on the GPU if the model uses one.
    """
    kv, compute = model.kv_bytes(n_ctx), model.compute_bytes
    reserve = default_reserve(memory.vram_total_bytes or memory.vram_bytes)
    drafts = [] if draft is None else [
        MemoryItem("draft: weights", draft.file_bytes),
        MemoryItem("draft: KV cache", draft.kv_bytes(n_ctx)),
        MemoryItem("draft: compute buffers", draft.compute_bytes),
    ]  # fmt: skip
    contexts = [MemoryItem("KV cache", kv), MemoryItem("compute buffers", compute), *drafts]
    room = memory.vram_bytes - KERNEL_BYTES - reserve - sum(item.n_bytes for item in contexts)
    on_gpu = 0 < model.file_bytes <= room
    beside = not on_gpu and model.n_experts > 0 and memory.vram_bytes > 0 and model.dense_bytes <= room
    slots = 0
    if beside:
        for_slots = max(0, room - model.dense_bytes - model.staging_bytes)
        slots = min(model.n_experts, int(for_slots / model.experts_bytes * model.n_experts))
    in_vram = [
        MemoryItem("all weights", model.file_bytes) if on_gpu else MemoryItem("dense weights", model.dense_bytes),
        *contexts,
        MemoryItem("kernels (an allowance)", KERNEL_BYTES),
        MemoryItem("reserve", reserve, spare=True),
    ]
    if slots:
        in_vram.append(MemoryItem("cache: staging (an allowance)", model.staging_bytes))
        slots_bytes = slots * model.experts_bytes // model.n_experts
        in_vram.append(MemoryItem(f"expert slots: {slots:,} of {model.n_experts:,}", slots_bytes))
    in_ram = [MemoryItem("program and vocabulary", _PROGRAM_BYTES)]
    if not on_gpu and model.n_experts:
        in_ram.append(MemoryItem("experts", model.experts_bytes, mapped_bytes=model.experts_bytes))
    if not (on_gpu or beside):
        mapped = 0 if model.n_experts else model.dense_bytes  # of a model with experts they are read for every token
        in_ram += [MemoryItem("dense weights", model.dense_bytes, mapped_bytes=mapped), *contexts]
    draft_bytes = draft.file_bytes if draft else 0
    host_bytes = 0 if on_gpu else model.experts_bytes if beside else model.file_bytes + draft_bytes
    ram_total_bytes = memory.ram_total_bytes or memory.ram_bytes
    storage: Storage = "loaded"
    if not fits(host_bytes, memory.ram_bytes, ram_total_bytes):
        storage = "on demand" if model.n_experts else "mapped"
        in_ram.append(MemoryItem("reserve", default_reserve(ram_total_bytes), spare=True))
    ram = MemoryPool("RAM", ram_total_bytes, memory.ram_bytes, tuple(in_ram), storage)
    places: tuple[MemoryPool, ...] = (ram,)
    if on_gpu or beside:
        places = (MemoryPool("GPU", memory.vram_bytes, memory.vram_bytes, tuple(in_vram)), ram)
    kv += draft.kv_bytes(n_ctx) if draft else 0
    device_ratio = 1.0 if on_gpu else slots / model.n_experts if beside else 0.0
    return EstimatedMap(n_ctx, kv, places, _place(ram, on_gpu, beside), device_ratio, _ram_ratio(model, ram))


def _place(ram: MemoryPool, on_gpu: bool, beside: bool) -> Place:
    if ram.verdict == "does not fit":
        return "nowhere"
    if on_gpu:
        return "GPU"
    if ram.verdict == "from disk":
        return "disk"
    return "GPU and RAM" if beside else "RAM"


def _ram_ratio(model: KnownModel, ram: MemoryPool) -> float:
    if not model.experts_bytes:
        return 1.0
    return max(0.0, min(1.0, (ram.free_bytes - ram.fixed_bytes) / model.experts_bytes))


def largest_n_ctx(model: KnownModel, memory: Memory, draft: KnownModel | None = None) -> int:
    """The largest of a few contexts with which the model is no worse off than with the smallest; 0: none fits."""
    sizes = [n for n in CONTEXTS if n <= (model.n_ctx_train or CONTEXTS[-1])] or [CONTEXTS[0]]
    first = estimate(model, memory, sizes[0], draft).place
    if first == "nowhere":
        return 0
    return max(n for n in sizes if estimate(model, memory, n, draft).place == first)


@dataclass(frozen=True)
class EstimatedPlan:
    """The answer of `moeedge plan` without a header."""

    model: KnownModel
    draft: KnownModel | None  # that chat loads with it
    reason: str  # why there is no header
    memory: Memory
    map: EstimatedMap
    contexts: tuple[EstimatedMap, ...]
    largest_n_ctx: int  # tokens; 0: none fits
    command: str  # that runs it; empty if it does not fit
    notes: tuple[str, ...]  # sentences for the user


def make_estimated_plan(
    choice: Choice,
    memory: Memory,
    *,
    draft: Choice | None,
    n_ctx: int,
    given: Sequence[str],
    vram_given: bool,
    reason: str,
) -> EstimatedPlan:
    """The plan of a model of the catalog, at n_ctx tokens or (0) at 8,192. Raises InputError where no size is known.

    given: options of `moeedge chat`, as the user typed them. vram_given: whether the GPU's size is the user's, too.
    """
    model, drafts = known_model(choice), None if draft is None else known_model(draft)
    if model is None:
        raise InputError(f"{reason} The catalog has no size of {choice.name} to estimate with.", "Try it online.")
    chosen = estimate(model, memory, n_ctx or min(DEFAULT_N_CTX, model.n_ctx_train or DEFAULT_N_CTX), drafts)
    sizes = {*(n for n in CONTEXTS if n <= (model.n_ctx_train or CONTEXTS[-1])), chosen.n_ctx}
    contexts = tuple(chosen if n == chosen.n_ctx else estimate(model, memory, n, drafts) for n in sorted(sizes))
    notes = []
    for known in (model, drafts):
        if known is not None:
            about = "" if known.is_exact else "about "
            notes.append(f"moeedge pull {known.name} downloads {about}{format_bytes(known.file_bytes)}.")
    if model.shape is None:
        notes.append("The catalog does not say how much of it is experts, so the estimate treats all of it alike.")
    if draft is not None and drafts is None:
        notes.append(f"The catalog has no size of the draft {draft.name}: it is not in the estimate.")
    if chosen.place == "disk":
        notes.append("The file is larger than the free memory: experts are read from the disk as they are needed.")
    if chosen.place == "nowhere":
        missing_bytes = -min(0, chosen.places[-1].free_bytes - chosen.places[-1].fixed_bytes)
        notes.append(f"{format_bytes(missing_bytes)} of RAM are missing.")
    words = ["moeedge", "chat", *given]
    if vram_given and chosen.place == "GPU and RAM" and chosen.device_ratio:
        words += chat_vram(chosen.places[0].lines[-1].n_bytes)
    command = "" if chosen.place == "nowhere" else shlex.join(words)
    largest = largest_n_ctx(model, memory, drafts)
    return EstimatedPlan(model, drafts, reason, memory, chosen, contexts, largest, command, tuple(notes))


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
