"""NVIDIA cards as the driver reports them through NVML; every answer is None or empty without such a driver."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class CardMemory:
    """Bytes of one card, all processes together."""

    used_bytes: int
    free_bytes: int
    total_bytes: int


@cache
def cards() -> tuple[str, ...]:
    """Returns the names of the cards that the driver knows, also those that llama.cpp was not built for."""
    nvml = _nvml()
    if nvml is None:
        return ()
    try:
        names = [nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return ()
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names)


def memory(pci_id: str) -> CardMemory | None:
    """Returns the memory of the card at a PCI address (domain:bus:device.function); takes microseconds."""
    handle, nvml = _handle(pci_id), _nvml()
    if handle is None:
        return None
    try:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:  # a slice of a card (MIG) may not read the full card's memory
        return None
    return CardMemory(int(found.used), int(found.free), int(found.total))


def process_bytes() -> dict[int, int]:
    """Returns the bytes that processes have on all cards together, by process id, where the driver says so."""
    nvml = _nvml()
    found: dict[int, int] = {}
    if nvml is None:
        return found
    try:
        for i in range(nvml.nvmlDeviceGetCount()):
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(i)):
                found[process.pid] = found.get(process.pid, 0) + (process.usedGpuMemory or 0)
    except nvml.NVMLError:
        return {}
    return {pid: n_bytes for pid, n_bytes in found.items() if n_bytes}


@cache
def _handle(pci_id: str) -> Any:
    nvml = _nvml()
    if nvml is None or not pci_id:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByPciBusId(pci_id.encode())
    except nvml.NVMLError:
        return None


@cache
def _nvml() -> Any:
    """Returns the initialised NVML module, or None."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the library is absent or older than its wrapper, or the driver is not loaded
        return None
    return pynvml
