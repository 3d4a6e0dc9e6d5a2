"""How many slots the expert cache gets on a device: pure functions of sizes, to open a cache or to plan one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moeedge.errors import InputError
from moeedge.hardware.devices import DeviceKind, ResolvedDevice
from moeedge.hardware.host import default_reserve
from moeedge.llama import library
from moeedge.llama.gguf_file import expert_bytes, expert_tensors, mean_expert_bytes, n_groups, scratch_bytes
from moeedge.llama.model import Model
from moeedge.llama.model_info import ModelInfo
from moeedge.native.abi import PrefillPath
from moeedge.native.cache import ExpertTensor
from moeedge.records import figure
from moeedge.scheduler.config import PlacementConfig
from moeedge.units import format_bytes

_STAGING_EXPERTS, _STAGING_BYTES = 32, 96 << 20  # most of both per half of the staging slots, for streaming prefill
_MAX_DEVICE_PAIRS = 2048  # that the backend gives a device at once (native/src/streamed-block.h)


@dataclass(frozen=True)
class CacheBudget:
    """The cache's size; ratio 0: it is off, with a note that gives the reason unless the user switched it off."""

    ratio: float  # share of the experts in host memory that get a slot
    n_slots: int = figure("Slots of the expert cache", key="cache_slots")
    pool_bytes: int = figure("The slots", "bytes")
    notes: tuple[str, ...] = ()


def plan_budget(
    *,
    expert_bytes_total: int,
    n_expert_layers: int,
    n_experts: int,
    free_bytes: int,
    total_bytes: int = 0,
    reserve_bytes: int = 0,
    vram_bytes: int | None = None,
    cache_ratio: float | None = None,
    default_ratio: float | None = None,
    experts_on_device: bool = False,
    in_ram: bool = False,
) -> CacheBudget:
    """The cache for a model whose experts take `expert_bytes_total`, on a device with `free_bytes` left.

    free_bytes: after weights, KV caches and compute buffers. total_bytes: of the device, 0 where unknown. At most one
    of vram_bytes and cache_ratio is the user's, default_ratio the device's; without any the cache takes all that is
    free except the reserve. experts_on_device: llama.cpp has put them there. in_ram: the device is the memory that the
    CPU computes from, vram_bytes the user's --ram. Raises InputError for more memory than the device has, and for too
    little --ram for an expert of every layer.
    """
    if vram_bytes is not None and 0 < total_bytes < vram_bytes:
        option, place = ("--ram", "this machine") if in_ram else ("--vram", "the device for experts (-dev)")
        raise InputError(
            f"{option} asks for {format_bytes(vram_bytes)}, and {place} has {format_bytes(total_bytes)}.",
            f"Ask for less, or leave out {option} to use what is free.",
        )
    off = CacheBudget(0.0, 0, 0)
    if experts_on_device:
        return replace(off, notes=("All experts are on the device already: the expert cache is off.",))
    n_all = n_expert_layers * n_experts
    if n_all == 0 or expert_bytes_total == 0:
        return replace(off, notes=("The model is dense: there are no experts to cache.",))

    def slots_of(n_bytes: int) -> int:
        """Experts of average size that fit, in integer arithmetic, which is exact for files of any size."""
        return min(n_all, n_bytes * n_all // expert_bytes_total)

    def bytes_of(n_slots: int) -> int:
        return -(-n_slots * expert_bytes_total // n_all)

    room = max(0, free_bytes - reserve_bytes)
    ratio = cache_ratio if cache_ratio is not None or vram_bytes is not None else default_ratio
    wanted_slots = slots_of(room if vram_bytes is None else vram_bytes)
    if ratio is not None:
        wanted_slots = int(ratio * n_all + 1e-6)  # 0.29 * 100 is 28.999999999999996
    if wanted_slots == 0 and (ratio == 0 or vram_bytes == 0):
        return off
    n_slots = min(wanted_slots, slots_of(room))
    per_layer = format_bytes(-(-expert_bytes_total // n_experts))
    if in_ram and vram_bytes is not None and wanted_slots < n_expert_layers:
        raise InputError(
            f"--ram {format_bytes(vram_bytes)} is too small: one expert per layer takes {per_layer}.",
            f"Give more than {per_layer}, or --ram off, so that llama.cpp maps the file.",
        )
    if n_slots < n_expert_layers:
        wanted_bytes = vram_bytes if ratio is None else round(ratio * expert_bytes_total)
        size = format_bytes(bytes_of(n_slots) if n_slots < wanted_slots or wanted_bytes is None else wanted_bytes)
        text = f"The expert cache is off: {size} cannot hold one expert per layer, which takes {per_layer}."
        return replace(off, notes=(text,))
    notes: tuple[str, ...] = ()
    if n_slots < wanted_slots:
        size, wanted = format_bytes(bytes_of(n_slots)), format_bytes(bytes_of(wanted_slots))
        free = f"{format_bytes(free_bytes)} are free {'in memory' if in_ram else 'on the device'}"
        reserve = f"{format_bytes(reserve_bytes)} of these stay free"
        notes = (f"The expert cache gets {size} instead of {wanted}: {free}, and {reserve}.",)
    return CacheBudget(n_slots / n_all, n_slots, bytes_of(n_slots), notes)


def in_host_memory(tensors: list[ExpertTensor], model: Model) -> list[ExpertTensor]:
    """Those of the expert tensors that the cache may hold: not of layers that are on a GPU entirely."""
    layers = set(model.host_expert_layers)
    return [tensor for tensor in tensors if tensor.layer in layers]


def whole_expert_bytes(model: Model) -> int:
    """Bytes of the experts that are on a GPU with their layers."""
    tensors, _ = expert_tensors(model.path, n_layers=model.info.n_layers)
    return expert_bytes(tensors) - expert_bytes(in_host_memory(tensors, model))


def n_staging_slots(config: PlacementConfig, kind: DeviceKind, n_experts: int, each_bytes: int) -> int:
    """Slots on a device to stream experts of that size through in large batches, where that may pay."""
    may_stream = config.prefill is PrefillPath.STREAM or (config.prefill is PrefillPath.AUTO and kind == "gpu")
    most = max(2, _STAGING_BYTES // max(1, each_bytes))
    return 2 * min(n_experts, _STAGING_EXPERTS, most) if may_stream else 0


def emulated_threads(device: ResolvedDevice) -> int:
    """Threads of the emulated device, 0 for a real one. Half the cores: the CPU computes its part at the same time."""
    return (device.threads or max(1, library.physical_cores() // 2)) if device.kind == "emulated" else 0


def staging_and_scratch_bytes(tensors: list[ExpertTensor], info: ModelInfo, *, n_ubatch: int, n_stage: int) -> int:
    """Bytes of the staging slots of every group and of the columns that the cache computes with.

    tensors: of the experts in host memory.
    """
    n_pairs = min(n_ubatch * info.n_expert_used, _MAX_DEVICE_PAIRS)
    # the backend's buffer for columns has room for half as many again
    # of a streamed batch: its pairs' columns, and these times their weights
    streamed = 2 * n_ubatch * info.n_expert_used * info.n_embd * 4 if n_stage else 0
    return (
        n_stage * n_groups(tensors) * mean_expert_bytes(tensors) + scratch_bytes(tensors, n_pairs) * 3 // 2 + streamed
    )


def reserve_bytes(device: ResolvedDevice, total_bytes: int) -> int:
    """Bytes that the cache leaves free on a device of that size."""
    return default_reserve(total_bytes) if device.kind == "gpu" else 0


def cache_budget(
    config: PlacementConfig,
    device: ResolvedDevice | None,
    tensors: list[ExpertTensor],
    model: Model,
    *,
    free_bytes: int,
    total_bytes: int,
    n_ubatch: int,
) -> CacheBudget:
    """The slots on a device, None: in RAM, with `free_bytes` left after everything else is allocated.

    tensors: of all experts. Those of layers that are on the device entirely need no slot; their bytes count to --vram.
    """
    info, n_layers, all_bytes = model.info, len(model.host_expert_layers), expert_bytes(tensors)
    tensors = in_host_memory(tensors, model)
    experts_total = expert_bytes(tensors)
    whole_bytes = all_bytes - experts_total
    counted_bytes, wanted_ratio, n_stage, reserved = 0, None, 0, default_reserve(total_bytes)
    if device is not None:
        counted_bytes, wanted_ratio = whole_bytes, device.default_ratio
        n_stage = n_staging_slots(config, device.kind, info.n_experts, mean_expert_bytes(tensors))
        reserved = reserve_bytes(device, total_bytes)
    # ratios count all experts of the model
    cache_ratio, default_ratio = (
        None if ratio is None else min(1.0, ratio * info.n_expert_layers / max(1, n_layers))
        for ratio in (config.cache_ratio, wanted_ratio)
    )
    reserved += staging_and_scratch_bytes(tensors, info, n_ubatch=n_ubatch, n_stage=n_stage)
    if total_bytes == 0:  # an unknown size: try what was requested, the cache shrinks if that fails
        free_bytes = experts_total + reserved
    return plan_budget(
        expert_bytes_total=experts_total,
        n_expert_layers=n_layers,
        n_experts=info.n_experts,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        reserve_bytes=reserved,
        vram_bytes=None if config.vram_bytes is None else max(0, config.vram_bytes - counted_bytes),
        cache_ratio=cache_ratio,
        default_ratio=default_ratio,
        experts_on_device=whole_bytes > 0 and n_layers == 0,
        in_ram=device is None,
    )
