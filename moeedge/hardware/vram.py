"""The device's memory as the driver reports it, cheap enough to be asked several times a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeedge import native
from moeedge.hardware import nvidia
from moeedge.hardware.devices import ResolvedDevice

_SLICE = 0.1  # difference of the totals from which on NVML speaks of another memory: a slice of a card (MIG)


@dataclass(frozen=True)
class VramReading:
    """Bytes of the device's memory, all processes together, and who says so."""

    used_bytes: int
    free_bytes: int
    total_bytes: int
    source: Literal["nvml", "ggml", "worker", "pool"]


def read(device: ResolvedDevice, *, pool_bytes: int = 0, filled_bytes: int | None = None) -> VramReading | None:
    """What the device's memory holds; None without a device.

    pool_bytes: what the expert cache has allocated; filled_bytes: the share of it that holds experts (default: all).
    The emulated device has no memory but the pool. A worker is asked only when it is resolved (asking one that has gone
    would end this process), so that its reading is that first one and the pool.
    """
    if device.kind == "none":
        return None
    if device.kind == "emulated":
        used = pool_bytes if filled_bytes is None else filled_bytes
        return VramReading(used, pool_bytes - used, pool_bytes, "pool")
    if device.kind == "rpc":
        free = max(0, device.free_bytes - pool_bytes)
        return VramReading(device.total_bytes - free, free, device.total_bytes, "worker")
    return _read_gpu(device)


def _read_gpu(device: ResolvedDevice) -> VramReading | None:
    memory = nvidia.memory(device.pci_id) if device.pci_id else None
    if memory is not None and abs(memory.total_bytes - device.total_bytes) <= _SLICE * memory.total_bytes:
        return VramReading(memory.used_bytes, memory.free_bytes, memory.total_bytes, "nvml")
    for found in native.devices():
        if found.name == device.ggml_name:
            return VramReading(found.total_bytes - found.free_bytes, found.free_bytes, found.total_bytes, "ggml")
    return None
