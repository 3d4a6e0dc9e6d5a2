"""The machine that a plan is for, what a model and a context need there by llama.cpp's own account, and what fits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass, replace
from typing import Literal

from moeedge import native
from moeedge.engine.loading import ChosenDraft, find_device, make_context, make_head_context
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.devices import ResolvedDevice, Storage
from moeedge.hardware.host import available_memory, total_memory
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.backends import DRY_RUN_GPU, PLAIN_BUFFERS
from moeedge.records import derived, figure
from moeedge.scheduler.sizing import CacheBudget
from moeedge.units import format_bytes

Verdict = Literal["fits", "from disk", "does not fit"]

# What a CUDA process needs in addition to llama.cpp's buffers: llama.cpp's memory breakdown listed 451 to 456 MiB per
# card as "unaccounted" (ggml-org/llama.cpp pull request 15860, RTX 4090).
KERNEL_BYTES = 456 * 2**20


@dataclass(frozen=True)
class MemoryShare:
    """Bytes of a model and its context in one kind of memory."""

    weights_bytes: int = 0
    kv_bytes: int = 0  # with recurrent states
    compute_bytes: int = 0

    def __add__(self, other: MemoryShare) -> MemoryShare:
        return MemoryShare(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Footprint:
    """Memory of a model and one context of it."""

    gpus: defaultdict[str, MemoryShare]  # by llama.cpp's name of the GPU
    ram: MemoryShare
    fixed_bytes: int  # of the weights in RAM: those that cannot be paged out to the file, as copies for the CPU


def footprint(model: Model, n_ctx: int, config: EngineConfig, *, is_draft: bool = False) -> Footprint:
    """Returns the memory of `model`, loaded without weights, and of a session's context of `n_ctx` tokens."""
    with _dry_context(model, n_ctx, config, is_draft=is_draft) as context:
        memory = _read(context, has_weights=True)
    is_paged = config.load.is_mapped and not config.load.is_locked
    return memory if is_paged else replace(memory, fixed_bytes=memory.ram.weights_bytes)


def draft_footprint(chosen: ChosenDraft, target: Model, n_ctx: int, config: EngineConfig) -> Footprint:
    """Returns the memory of the draft next to a session's target, without what is the target's own."""
    if chosen.head is not None:
        with (
            _dry_context(target, n_ctx, config) as context,
            make_head_context(config, chosen.model or target, chosen.head, context) as head,
        ):
            return _read(head, has_weights=chosen.model is not None)
    if chosen.model is None:
        return Footprint(defaultdict(MemoryShare), MemoryShare(), 0)
    return footprint(chosen.model, n_ctx, config, is_draft=True)


def _dry_context(model: Model, n_ctx: int, config: EngineConfig, *, is_draft: bool = False) -> Context:
    return make_context(replace(config, n_threads=1), model, n_ctx, is_draft=is_draft)


def _read(context: Context, *, has_weights: bool) -> Footprint:
    gpus, ram, repacked = defaultdict[str, MemoryShare](MemoryShare), MemoryShare(), 0
    for use in context.memory_uses():
        weights = use.weights_bytes if has_weights else 0
        share = MemoryShare(weights, use.memory_bytes, use.compute_bytes)
        if use.on_gpu:
            gpus[use.device] += share
        else:
            ram += share
            repacked += weights if not use.device and use.buffer_type not in PLAIN_BUFFERS else 0
    return Footprint(gpus, ram, repacked)


@dataclass(frozen=True)
class MemoryItem:
    what: str = figure("What takes the memory")
    n_bytes: int = figure("Its size", "bytes")
    mapped_bytes: int = figure(
        "Of these, pages of the model file: the system can drop and reread them", "bytes", default=0
    )
    spare: bool = figure("Whether it is a reserve for other programs", default=False)


@dataclass(frozen=True)
class MemoryPool:
    """One kind of memory and its consumers."""

    name: str = figure("The device, or RAM")
    total_bytes: int = figure("Its memory", "bytes")
    free_bytes: int = figure("Free before anything is loaded", "bytes")
    lines: tuple[MemoryItem, ...] = figure("What takes memory there")
    storage: Storage = figure("Of a model's weights in host memory", default="loaded")

    @derived("In use after loading, without reserves", unit="bytes")
    def used_bytes(self) -> int:
        return sum(line.n_bytes for line in self.lines if not line.spare)

    @derived("Reserves for other programs", unit="bytes")
    def reserve_bytes(self) -> int:
        return sum(line.n_bytes for line in self.lines if line.spare)

    @derived("Must be in memory: all but pages of the model file", unit="bytes")
    def fixed_bytes(self) -> int:
        return sum(line.n_bytes - line.mapped_bytes for line in self.lines if not line.spare)

    @derived("Free after loading, the reserve among them; negative where bytes are missing", unit="bytes", least=None)
    def left_bytes(self) -> int:
        return self.free_bytes - self.used_bytes

    @property
    def verdict(self) -> Verdict:
        if self.left_bytes >= 0 and self.storage != "on demand":
            return "fits"
        return "from disk" if self.fixed_bytes <= self.free_bytes else "does not fit"


def in_mib(n_bytes: int) -> str:
    """A size as options take it, rounded up."""
    return f"{-(-n_bytes // 2**20)}MiB"


@dataclass(frozen=True)
class MemoryMap:
    """The use of all memory at one context size."""

    n_ctx: int = figure("Context size, in tokens")
    kv_bytes: int = figure("KV caches of target and draft", "bytes")
    compute_bytes: int = figure("Compute buffers", "bytes")
    places: tuple[MemoryPool, ...] = figure("Memory of the device if it has its own, then the host's")
    budget: CacheBudget = figure("", prefix="")
    cache_ratio: float = figure("Share of all experts that have a slot; 1: the model is entirely on the GPU", most=1)
    device_ratio: float = figure("Share of all experts on the device, in slots or with their layers", most=1)
    n_whole_layers: int = figure("Layers with experts, entirely on the GPU next to the cache", key="whole_layers")
    whole_on_gpu: bool = figure("Whether target and draft are entirely on the GPU, experts included")
    refused: str = ""  # why a session would not start

    @derived("Whether it fits: from disk where the file is read as it is needed")
    def verdict(self) -> Verdict:
        verdicts = [place.verdict for place in self.places]
        if self.refused or "does not fit" in verdicts or any(verdict != "fits" for verdict in verdicts[:-1]):
            return "does not fit"
        return verdicts[-1]


@dataclass(frozen=True)
class PlannedMachine:
    """Memory in bytes, and the device that may hold experts."""

    device: ResolvedDevice
    ram_total_bytes: int
    ram_free_bytes: int
    vram_given: bool = False  # by the user instead of the driver
    ram_given: bool = False
    notes: tuple[str, ...] = ()


def this_machine(
    config: EngineConfig, *, vram_bytes: int | None = None, ram_bytes: int | None = None
) -> PlannedMachine:
    """Returns this machine with the device of -dev; given sizes replace the measured ones.

    With vram_bytes and without a GPU, the plan is for a GPU of that size. Raises InputError for an impossible size.
    """
    device = find_device(config)
    notes = list(device.notes)
    if vram_bytes is not None:
        if vram_bytes <= 0:
            raise InputError("--vram must be more than 0.", "Plan without a GPU with -dev none.")
        size = format_bytes(vram_bytes)
        if device.kind == "gpu":
            device = replace(device, label=f"{device.label}, planned with {size}")
        elif config.device == "auto":
            device = ResolvedDevice("gpu", DRY_RUN_GPU, label=f"a GPU of {size}", llama_device=DRY_RUN_GPU)
        elif device.kind == "none":
            raise InputError(f"-dev {config.device} has no memory for experts.", "Leave out --vram, or -dev.")
        device, notes = replace(device, free_bytes=vram_bytes, total_bytes=vram_bytes, notes=[]), []
    elif device.kind == "emulated" and ram_bytes is not None:
        device = replace(device, free_bytes=ram_bytes, total_bytes=ram_bytes)
    gpus = [listed.name for listed in native.devices() if listed.kind == "GPU"]
    if len(gpus) > 1 and device.kind == "gpu" and device.llama_device == "auto":
        text = f"There are {len(gpus)} GPUs: llama.cpp spreads the layers over all of them, but only"
        notes.append(f"{text} {device.ggml_name} caches experts. Use it alone with -dev {device.ggml_name}.")
    total, free = (total_memory(), available_memory()) if ram_bytes is None else (ram_bytes, ram_bytes)
    return PlannedMachine(device, total, free, vram_bytes is not None, ram_bytes is not None, tuple(notes))
