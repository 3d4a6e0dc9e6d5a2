"""What the NVIDIA driver says, through NVML; every answer is None or empty where there is no such driver."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Memory:
    """Bytes of one card, all processes together."""

    used_bytes: int
    free_bytes: int
    total_bytes: int


@cache
def _nvml() -> Any:
    """The initialised NVML module, or None."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the library is absent, older than its wrapper, or the driver is not loaded
        return None
    return pynvml


@cache
def cards() -> tuple[str, ...]:
    """The names of the cards that the driver knows, whatever llama.cpp was built for."""
    nvml = _nvml()
    if nvml is None:
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return tuple(_text(nvml.nvmlDeviceGetName(handle)) for handle in handles)
    except nvml.NVMLError:
        return ()


@cache
def _handle(pci_id: str) -> Any:
    nvml = _nvml()
    if nvml is None or not pci_id:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByPciBusId(pci_id.encode())
    except nvml.NVMLError:
        return None


def memory(pci_id: str) -> Memory | None:
    """The memory of the card at this PCI address (domain:bus:device.function); takes microseconds."""
    handle, nvml = _handle(pci_id), _nvml()
    if handle is None:
        return None
    try:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:  # a slice of a card may not see the whole
        return None
    return Memory(int(found.used), int(found.free), int(found.total))


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
