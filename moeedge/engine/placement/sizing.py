"""How many slots the expert cache gets, from sizes alone: by what opening it and planning for it both go."""

from __future__ import annotations

from moeedge.engine.expert_tensors import expert_bytes, n_groups, scratch_bytes
from moeedge.engine.model import ModelInfo
from moeedge.engine.types import PlacementConfig
from moeedge.hardware.budget import Budget, default_reserve, plan_budget
from moeedge.hardware.resolve import DeviceKind, ResolvedDevice
from moeedge.native.expert_tensor import ExpertTensor

_STAGE_EXPERTS = 32  # per half of the staging slots, for streaming prefill
_DEVICE_PAIRS_MAX = 2048  # that the backend gives a device at once (native/src/hybrid.h)


def stage_slots(wish: PlacementConfig, kind: DeviceKind, n_experts: int) -> int:
    """Room to stream experts through in large batches, where that may be faster than the CPU."""
    if wish.prefill == "stream" or (wish.prefill == "auto" and kind == "gpu"):
        return 2 * min(n_experts, _STAGE_EXPERTS)
    return 0


def beside_slots_bytes(tensors: list[ExpertTensor], info: ModelInfo, *, n_ubatch: int, n_stage: int) -> int:
    """What the cache takes beside its slots: staging slots of every group and the columns that are computed."""
    expert = expert_bytes(tensors) // max(1, info.n_expert_layers * info.n_experts)
    n_pairs = min(n_ubatch * info.n_experts_used, _DEVICE_PAIRS_MAX)
    # the backend's buffer for columns has room for half as many again
    return n_stage * n_groups(tensors) * expert + scratch_bytes(tensors, n_pairs) * 3 // 2


def reserve_bytes(device: ResolvedDevice, total_bytes: int) -> int:
    """What the cache leaves to others on a device of that size."""
    return default_reserve(total_bytes) if device.kind == "gpu" else 0


def cache_budget(
    wish: PlacementConfig,
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
    n_stage = stage_slots(wish, device.kind, info.n_experts)
    reserved = beside_slots_bytes(tensors, info, n_ubatch=n_ubatch, n_stage=n_stage)
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
        vram_bytes=wish.vram_bytes,
        cache_ratio=wish.cache_ratio,
        default_ratio=device.default_ratio,
        experts_on_device=experts_on_device,
    )
