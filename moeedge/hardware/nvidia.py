"""NVIDIA cards as the driver reports them through NVML; every answer is None or empty without such a driver."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def cards() -> tuple[str, ...]:
    """Returns the names of the cards that the driver knows, also those that llama.cpp was not built for."""
    return tuple(filter(None, (_ask("nvmlDeviceGetName", card) for card in _cards())))


def memory(pci_id: str) -> tuple[int, int, int] | None:
    """Returns used, free and total bytes of the card at a PCI address, all processes together; takes microseconds.

    pci_id: domain:bus:device.function. None, too, for a slice of a card (MIG), which may not read the card's memory.
    """
    handle = _handle(pci_id) if pci_id else None
    info = None if handle is None else _ask("nvmlDeviceGetMemoryInfo", handle)
    return None if info is None else (int(info.used), int(info.free), int(info.total))


def process_bytes() -> dict[int, int]:
    """Returns the bytes that processes have on all cards together, by process id, where the driver says so."""
    sizes: dict[int, int] = {}
    for card in _cards():
        for process in _ask("nvmlDeviceGetComputeRunningProcesses", card) or ():
            sizes[process.pid] = sizes.get(process.pid, 0) + (process.usedGpuMemory or 0)
    return {pid: n_bytes for pid, n_bytes in sizes.items() if n_bytes}


def _cards() -> list[Any]:
    handles = (_ask("nvmlDeviceGetHandleByIndex", i) for i in range(_ask("nvmlDeviceGetCount") or 0))
    return [handle for handle in handles if handle is not None]


@cache
def _handle(pci_id: str) -> Any:
    return _ask("nvmlDeviceGetHandleByPciBusId", pci_id.encode())


def _ask(question: str, *arguments: Any) -> Any:
    """The driver's answer, or None."""
    if (nvml := _nvml()) is None:
        return None
    try:
        return getattr(nvml, question)(*arguments)
    except nvml.NVMLError:
        return None


@cache
def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the library is absent or older than its wrapper, or the driver is not loaded
        return None
    return pynvml
