"""GPUs that this machine has, whether llama.cpp can use them or not: the system's own lists of devices, and drivers'.

A list that is absent, as in a container without /sys, has no GPUs; no function here fails or needs a driver.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from moeedge import native
from moeedge.hardware import nvidia
from moeedge.hardware.rpc import build_command

ROOT = Path("/")  # of the system's files
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}  # others drive screens only
_DISPLAY_CLASS = "0x03"  # PCI class of display controllers: 0x0300 VGA, 0x0302 3D, 0x0380 other
_DRIVERS = {"NVIDIA": ("nvidia",), "AMD": ("amdgpu",), "Intel": ("i915", "xe")}  # those that compute
_BUILD_OPTIONS = {"NVIDIA": "-DGGML_CUDA=on", "AMD": "-DGGML_HIP=on", "Intel": "-DGGML_VULKAN=on"}
_APPLE_OPTION = "-DGGML_METAL=on"
# what a backend calls the vendor's devices
_WORDS = {
    "NVIDIA": ("nvidia", "geforce", "cuda"),
    "AMD": ("amd", "radeon", "rocm"),
    "Intel": ("intel", "arc", "sycl"),
    "Apple": ("apple", "mtl", "metal"),
}
_NAME_LISTS = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids")
_SMALL_BYTES = 4 * 2**30  # memory of its own below which an AMD GPU is taken for one in a processor


@dataclass(frozen=True)
class PresentGpu:
    """A GPU of this machine."""

    vendor: str  # NVIDIA, AMD, Intel or Apple
    name: str
    pci_id: str = ""  # domain:bus:device.function in lower case; empty: not on PCI, or unknown
    driver: str = ""  # the kernel's driver; empty: none is loaded, or unknown
    total_bytes: int | None = None  # memory of its own; None: unknown
    in_processor: bool = False  # it shares the host's memory, so that experts there gain little
    reachable: bool = True  # whether this process sees its device files; not so in a container without them
    blocked: str = ""  # the device file that this user may not open

    @property
    def lacks_backend(self) -> bool:
        """Whether llama.cpp's backend is all that is missing."""
        return self.is_driven and self.reachable and not self.blocked

    @property
    def is_driven(self) -> bool:
        """Whether a driver that computes is loaded, as far as it is known."""
        return not self.pci_id or self.driver in _DRIVERS[self.vendor]

    @property
    def advice(self) -> str:
        """What makes it usable: one or two sentences, a command last."""
        if not self.is_driven:
            held = f"the kernel's driver is {self.driver}" if self.driver else "no driver is loaded"
            if self.driver == "vfio-pci":
                return "It is handed to a virtual machine (driver vfio-pci)."
            return f"Install {self.vendor}'s driver first: {held}."
        if not self.reachable:
            given = "--gpus all" if self.vendor == "NVIDIA" else "--device /dev/dri"
            return f"Its driver is loaded, but this process cannot reach it: give a container the GPU ({given})."
        if self.blocked:
            return f"You may not open {self.blocked}: sudo usermod -aG render,video $USER, then log in again."
        option = _BUILD_OPTIONS.get(self.vendor, _APPLE_OPTION)
        return (
            "The installed llama.cpp has no backend for it. Load a prebuilt one with --backend FILE "
            f"(docs/devices.md, two minutes), or compile: {build_command(option)}"
        )


def unused_gpus(devices: list[native.Device]) -> list[PresentGpu]:
    """The GPUs of this machine that are none of llama.cpp's `devices`."""
    left = present_gpus()
    usable = [device for device in devices if device.kind in ("GPU", "IGPU")]
    unknown = []
    for device in usable:
        same = [gpu for gpu in left if gpu.pci_id and gpu.pci_id == device.pci_id.lower()]
        if same:
            left.remove(same[0])
        else:
            unknown.append(device)
    for device in unknown:  # backends that do not tell the address
        text = f"{device.registry} {device.name} {device.description}".lower()
        same = [gpu for gpu in left if any(word in text for word in _WORDS[gpu.vendor])]
        if same:
            left.remove(same[0])
    return left


def present_gpus() -> list[PresentGpu]:
    """Every GPU of this machine that could compute, in the order of the bus."""
    found = list(_on_pci())
    cards = list(nvidia.cards())  # with the names that the driver gives, in the order of the bus
    named = []
    for gpu in found:
        if gpu.vendor == "NVIDIA" and gpu.is_driven:
            gpu = replace(gpu, name=cards.pop(0)) if cards else replace(gpu, reachable=False)
        named.append(gpu)
    named += [PresentGpu("NVIDIA", card) for card in cards]  # as in WSL, which has no bus
    if sys.platform == "darwin":
        named.append(PresentGpu("Apple", "the Mac's GPU", in_processor=True))
    return named


def _on_pci() -> Iterator[PresentGpu]:
    for folder in sorted(_children(ROOT / "sys/bus/pci/devices")):
        vendor = _VENDORS.get(_text(folder / "vendor").lower())
        if vendor is None or not _text(folder / "class").lower().startswith(_DISPLAY_CLASS):
            continue
        pci_id = folder.name.lower()
        driver = folder / "driver"
        total = _number(folder / "mem_info_vram_total")  # amdgpu's
        yield PresentGpu(
            vendor,
            _name(pci_id, _text(folder / "vendor"), _text(folder / "device"), vendor),
            pci_id,
            os.path.basename(os.path.realpath(driver)) if driver.exists() else "",
            total,
            in_processor=_in_processor(vendor, pci_id, total),
            reachable=vendor == "NVIDIA" or any(_nodes(folder)),
            blocked=next((str(node) for node in _nodes(folder) if not os.access(node, os.R_OK | os.W_OK)), ""),
        )


def _in_processor(vendor: str, pci_id: str, total_bytes: int | None) -> bool:
    """Intel's own are always at 00:02.0; AMD's tell little memory of their own."""
    if vendor == "Intel":
        return pci_id.split(":")[1] == "00"
    return vendor == "AMD" and total_bytes is not None and total_bytes < _SMALL_BYTES


def _nodes(folder: Path) -> Iterator[Path]:
    """The render nodes of a PCI device, through which programs compute."""
    for node in sorted(_children(folder / "drm")):
        path = ROOT / "dev/dri" / node.name
        if node.name.startswith("renderD") and path.exists():
            yield path


def _name(pci_id: str, vendor_id: str, device_id: str, vendor: str) -> str:
    """Its name by NVIDIA's driver or the system's list of PCI devices, else its numbers."""
    for line in _text(ROOT / "proc/driver/nvidia/gpus" / pci_id / "information").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip()
    listed = _listed_name(vendor_id.lower().removeprefix("0x"), device_id.lower().removeprefix("0x"))
    number = f"{vendor_id.removeprefix('0x')}:{device_id.removeprefix('0x')}"
    return f"{vendor} {listed}" if listed else f"{vendor} GPU {number}"


def _listed_name(vendor_id: str, device_id: str) -> str:
    """From pci.ids: lines of vendors, below each a tab and a device."""
    for place in _NAME_LISTS:
        inside = False
        for line in _lines(ROOT / place):
            if not line.startswith("\t"):
                inside = line.startswith(vendor_id)
            elif inside and line.startswith(f"\t{device_id}"):
                return line[len(device_id) + 1 :].strip()
    return ""


@cache
def _lines(path: Path) -> tuple[str, ...]:
    return tuple(_text(path).splitlines())


def _children(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip("\n ")
    return ""


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        return int(_text(path))
    return None
