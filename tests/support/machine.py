"""Machines that are not this one: GPUs of any size, free memory, a clock, full disks, what Linux and drivers tell."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeedge import native
from moeedge.hardware import gpus, host, nvidia
from moeedge.hardware.devices import ResolvedDevice, VramReading
from moeedge.scheduler.slot_memory import MemoryWatch

MIB, GIB = 2**20, 2**30
CPU = native.Device("CPU", "CPU", "a processor", 8, 8, "CPU")


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """A write beyond that fails in the middle, as on a full disk or under a quota: EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def gpu_of(free_bytes: int, **changes: Any) -> ResolvedDevice:
    """A GPU with so much memory, all of it free; llama.cpp gets none."""
    fields: dict[str, Any] = {"free_bytes": free_bytes, "total_bytes": free_bytes, "llama_device": "none"}
    return ResolvedDevice("gpu", **{"ggml_name": "GPU0", "label": "GPU0"} | fields | changes)


class Machine:
    """Replaces what moeedge asks of Linux and the drivers, by files below `root`: no GPU, 48 of 64 GiB free."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.root, self.patch = root, patch.setattr
        self.patch(gpus, "ROOT", root)
        self.patch(host, "_GROUPS", root)
        self.patch(host, "_MEMBERSHIP", root / "membership")
        self.patch(host, "CPU_INFO", root / "cpuinfo")
        self.patch("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=48 * GIB))
        self.offer(CPU)

    def offer(self, *devices: native.Device, cards: tuple[str, ...] = ()) -> None:
        """llama.cpp lists these devices, and NVIDIA's driver these cards."""
        self.patch(native, "devices", lambda: list(devices))
        self.patch(nvidia, "cards", lambda: cards)

    def set_cores(self, logical: int, physical: int, limit: float | None = None) -> None:
        """The processor has so many cores, of which a container may use `limit`."""
        self.patch(host, "usable_cores", lambda: logical)
        self.patch("psutil.cpu_count", lambda logical: physical)
        self.patch(host, "core_limit", lambda: limit)

    def write(self, name: str, text: str) -> Path:
        """Writes a file and its folders."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@dataclass
class FreeMemory:
    """Free memory and a clock, all that a MemoryWatch sees; step_s: with each look at the clock it is so much later."""

    free_bytes: int = 1000 * MIB
    step_s: float = 0.0
    time_s: float = 0.0
    n_readings: int = 0

    def clock(self) -> float:
        self.time_s += self.step_s
        return self.time_s

    def read(self, _device: ResolvedDevice) -> VramReading | None:
        self.n_readings += 1
        return VramReading(0, self.free_bytes, self.free_bytes, "system")

    def watch(self, reserve_bytes: int) -> MemoryWatch:
        """A watch that wants so much to stay free."""
        return MemoryWatch(ResolvedDevice("gpu"), reserve_bytes, read=self.read, clock=self.clock)
