"""How much of the device's memory the expert cache takes: a pure function from sizes to slots.

How many slots the expert cache gets, from sizes alone: by what opening it and planning for it both go.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeedge.errors import InputError
from moeedge.hardware.devices import DeviceKind, ResolvedDevice
from moeedge.llama.gguf_file import expert_bytes, n_groups, scratch_bytes
from moeedge.llama.model import ModelInfo
from moeedge.native.cache import ExpertTensor
from moeedge.scheduler.config import PlacementConfig
from moeedge.units import format_bytes

_MIB = 2**20


@dataclass(frozen=True)
class Budget:
    """The cache's size; ratio 0 switches it off, and a note says why unless that was asked for."""

    ratio: float  # share of all experts that get a slot
    n_slots: int
    pool_bytes: int
    notes: tuple[str, ...] = ()


def default_reserve(total_bytes: int) -> int:
    """Bytes of a device left to others: a thirty-second, from 256 MiB to 1 GiB, for kernels' scratch and the screen."""
    return min(max(256 * _MIB, total_bytes // 32), 1024 * _MIB)


def model_fits(*, model_bytes: int, kv_bytes: int, free_bytes: int, reserve_bytes: int) -> bool:
    """Before loading: whether the device can hold all layers, KV caches included, so that no expert need be moved."""
    return model_bytes + kv_bytes + reserve_bytes <= free_bytes


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
) -> Budget:
    """The cache for a model whose experts take `expert_bytes_total`, on a device with `free_bytes` left.

    To be called when weights, KV caches and compute buffers are allocated, so that `free_bytes` is what they left.
    total_bytes: of the device, 0 where it is not known. vram_bytes and cache_ratio are the user's wish, default_ratio
    the device's; without any the cache takes what is free but for the reserve. experts_on_device: llama.cpp has put
    them there already.
    Raises InputError for a ratio outside [0, 1] and for more memory than the device has.
    """
    _check(vram_bytes, cache_ratio, total_bytes)
    n_all = n_expert_layers * n_experts
    if n_all == 0 or expert_bytes_total == 0:
        return _off("The model has no experts: nothing to place on the device.")
    if experts_on_device:
        return _off("All experts are on the device already: the expert cache is off.")
    room = max(0, free_bytes - reserve_bytes)
    ratio = cache_ratio if cache_ratio is not None or vram_bytes is not None else default_ratio
    if ratio is not None:
        wanted_slots = int(ratio * n_all + 1e-6)  # 0.29 * 100 is 28.999999999999996
    else:
        wanted_slots = _slots(room if vram_bytes is None else vram_bytes, expert_bytes_total, n_all)
    if wanted_slots == 0 and (ratio == 0 or vram_bytes == 0):
        return Budget(0.0, 0, 0)
    n_slots = min(wanted_slots, _slots(room, expert_bytes_total, n_all))
    per_layer = format_bytes(-(-expert_bytes_total // n_experts))
    if n_slots < n_expert_layers:
        given = _bytes(n_slots, expert_bytes_total, n_all)
        if n_slots == wanted_slots and ratio is None and vram_bytes is not None:
            given = vram_bytes
        elif n_slots == wanted_slots and ratio is not None:
            given = round(ratio * expert_bytes_total)
        return _off(
            f"{format_bytes(given)} for experts is too small: "
            f"one expert per layer takes {per_layer}. The expert cache is off."
        )
    notes = []
    if n_slots < wanted_slots:
        notes.append(
            f"The expert cache has shrunk from {format_bytes(_bytes(wanted_slots, expert_bytes_total, n_all))} to "
            f"{format_bytes(_bytes(n_slots, expert_bytes_total, n_all))}: {format_bytes(free_bytes)} are free on the "
            f"device, {format_bytes(reserve_bytes)} of them kept in reserve."
        )
    return Budget(n_slots / n_all, n_slots, _bytes(n_slots, expert_bytes_total, n_all), notes=tuple(notes))


def _check(vram_bytes: int | None, cache_ratio: float | None, total_bytes: int) -> None:
    if vram_bytes is not None and cache_ratio is not None:
        raise InputError("--vram and --cache-ratio exclude each other.", "Give one of them.")
    if cache_ratio is not None and not 0 <= cache_ratio <= 1:  # written so that NaN is refused, too
        raise InputError(f"The cache ratio {cache_ratio} is outside [0, 1].", "0 switches the cache off, 1 holds all.")
    if vram_bytes is None:
        return
    if vram_bytes < 0:
        raise InputError(f"--vram must be 0 or more, not {vram_bytes}.", "0 switches the cache off.")
    if 0 < total_bytes < vram_bytes:
        raise InputError(
            f"--vram {format_bytes(vram_bytes)} is larger than the device, which has {format_bytes(total_bytes)}.",
            "Give less, or leave it out to take what is free.",
        )


def _off(note: str) -> Budget:
    return Budget(0.0, 0, 0, (note,))


def _slots(n_bytes: int, expert_bytes_total: int, n_all: int) -> int:
    """Experts of average size that `n_bytes` hold, in whole numbers: exact for files of any size."""
    return min(n_all, n_bytes * n_all // expert_bytes_total)


def _bytes(n_slots: int, expert_bytes_total: int, n_all: int) -> int:
    return -(-n_slots * expert_bytes_total // n_all)


_STAGE_EXPERTS = 32  # per half of the staging slots, for streaming prefill
_DEVICE_PAIRS_MAX = 2048  # that the backend gives a device at once (native/src/hybrid.h)


def stage_slots(requested: PlacementConfig, kind: DeviceKind, n_experts: int) -> int:
    """Room to stream experts through in large batches, where that may be faster than the CPU."""
    if requested.prefill == "stream" or (requested.prefill == "auto" and kind == "gpu"):
        return 2 * min(n_experts, _STAGE_EXPERTS)
    return 0


def staging_and_scratch_bytes(tensors: list[ExpertTensor], info: ModelInfo, *, n_ubatch: int, n_stage: int) -> int:
    """What the cache takes beside its slots: staging slots of every group and the columns that are computed."""
    expert = expert_bytes(tensors) // max(1, info.n_expert_layers * info.n_experts)
    n_pairs = min(n_ubatch * info.n_expert_used, _DEVICE_PAIRS_MAX)
    # the backend's buffer for columns has room for half as many again
    return n_stage * n_groups(tensors) * expert + scratch_bytes(tensors, n_pairs) * 3 // 2


def reserve_bytes(device: ResolvedDevice, total_bytes: int) -> int:
    """What the cache leaves to others on a device of that size."""
    return default_reserve(total_bytes) if device.kind == "gpu" else 0


def cache_budget(
    requested: PlacementConfig,
    device: ResolvedDevice,
    tensors: list[ExpertTensor],
    info: ModelInfo,
    *,
    free_bytes: int,
    total_bytes: int,
    n_ubatch: int,
    experts_on_device: bool,
) -> Budget:
    """The slots on a device with `free_bytes` left when all else is allocated."""
    experts_total = expert_bytes(tensors)
    n_stage = stage_slots(requested, device.kind, info.n_experts)
    reserved = staging_and_scratch_bytes(tensors, info, n_ubatch=n_ubatch, n_stage=n_stage)
    reserved += reserve_bytes(device, total_bytes)
    if total_bytes == 0:  # a device that does not tell: as much as is asked for, and less if that fails
        free_bytes = experts_total + reserved
    return plan_budget(
        expert_bytes_total=experts_total,
        n_expert_layers=info.n_expert_layers,
        n_experts=info.n_experts,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        reserve_bytes=reserved,
        vram_bytes=requested.vram_bytes,
        cache_ratio=requested.cache_ratio,
        default_ratio=device.default_ratio,
        experts_on_device=experts_on_device,
    )
