"""GPUs that this machine has, whether llama.cpp can use them or not: the system's own lists of devices, and drivers'.

A list that is absent, as in a container without /sys, has no GPUs; no function here fails or needs a driver.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moeedge import native
from moeedge.hardware import nvidia
from moeedge.hardware.host import value_in
from moeedge.hardware.rpc import build_command
from moeedge.paths import children, text_of

ROOT = Path("/")  # of the system's files
_VENDORS = {"10de": "NVIDIA", "1002": "AMD", "8086": "Intel"}  # others drive screens only
_DISPLAY_CLASS = "03"  # PCI class of display controllers: 0300 VGA, 0302 3D, 0380 other
_DRIVERS = {"NVIDIA": ("nvidia",), "AMD": ("amdgpu",), "Intel": ("i915", "xe")}  # those that compute
_BACKENDS = {"NVIDIA": "CUDA", "AMD": "HIP", "Intel": "VULKAN", "Apple": "METAL"}  # of ggml
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
        """The way to make it usable: one or two sentences, a command last."""
        if not self.is_driven and self.driver == "vfio-pci":
            return "It is handed to a virtual machine (driver vfio-pci)."
        if not self.is_driven:
            reason = f"the kernel's driver is {self.driver}" if self.driver else "no driver is loaded"
            return f"Install {self.vendor}'s driver first: {reason}."
        if not self.reachable:
            option = "--gpus all" if self.vendor == "NVIDIA" else "--device /dev/dri"
            return f"Its driver is loaded, but this process cannot reach it: give a container the GPU ({option})."
        if self.blocked:
            return f"You may not open {self.blocked}: sudo usermod -aG render,video $USER, then log in again."
        text = "The installed llama.cpp has no backend for it. Load a prebuilt one with --backend FILE"
        compiling = build_command(f"-DGGML_{_BACKENDS[self.vendor]}=on")
        return f"{text} (docs/devices.md, two minutes), or compile: {compiling}"


def unused_gpus(devices: list[native.Device]) -> list[PresentGpu]:
    """The GPUs of this machine that are none of llama.cpp's `devices`."""
    present, usable = present_gpus(), [device for device in devices if device.kind in ("GPU", "IGPU")]
    addresses = {device.pci_id.lower() for device in usable} & {gpu.pci_id for gpu in present} - {""}
    left = [gpu for gpu in present if gpu.pci_id not in addresses]
    for device in usable:
        if device.pci_id.lower() not in addresses:  # its backend does not tell the address
            text = f"{device.registry} {device.name} {device.description}".lower()
            same = next((gpu for gpu in left if any(word in text for word in _WORDS[gpu.vendor])), None)
            left = [gpu for gpu in left if gpu is not same]
    return left


def present_gpus() -> list[PresentGpu]:
    """Every GPU of this machine that could compute, in the order of the bus."""
    gpus = list(_on_pci())
    cards = list(nvidia.cards())  # with the names that the driver gives, in the order of the bus
    for i, gpu in enumerate(gpus):
        if gpu.vendor == "NVIDIA" and gpu.is_driven:
            gpus[i] = replace(gpu, name=cards.pop(0)) if cards else replace(gpu, reachable=False)
    gpus += [PresentGpu("NVIDIA", card) for card in cards]  # as in WSL, which has no bus
    return gpus + [PresentGpu("Apple", "the Mac's GPU", in_processor=True)] * (sys.platform == "darwin")


def _on_pci() -> Iterator[PresentGpu]:
    for folder in sorted(children(ROOT / "sys/bus/pci/devices")):
        vendor_id, device_id, kind = (text_of(folder / name).lower()[2:] for name in ("vendor", "device", "class"))
        vendor = _VENDORS.get(vendor_id)
        if vendor is None or not kind.startswith(_DISPLAY_CLASS):
            continue
        pci_id = folder.name.lower()
        driver, size = folder / "driver", text_of(folder / "mem_info_vram_total")  # amdgpu's
        total = int(size) if size.isdigit() else None
        # programs compute through the render nodes
        names = sorted(each.name for each in children(folder / "drm") if each.name.startswith("renderD"))
        nodes = [node for name in names if (node := ROOT / "dev/dri" / name).exists()]
        # Intel's own are always at 00:02.0; AMD's tell little memory of their own
        amd_own = vendor == "AMD" and total is not None and total < _SMALL_BYTES
        in_processor = pci_id.split(":")[1] == "00" if vendor == "Intel" else amd_own
        yield PresentGpu(
            vendor,
            _name(pci_id, vendor_id, device_id, vendor),
            pci_id,
            os.path.basename(os.path.realpath(driver)) if driver.exists() else "",
            total,
            in_processor=in_processor,
            reachable=vendor == "NVIDIA" or bool(nodes),
            blocked=next((str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)), ""),
        )


def _name(pci_id: str, vendor_id: str, device_id: str, vendor: str) -> str:
    """Its name by NVIDIA's driver or the system's list of PCI devices, else its numbers."""
    if by_driver := value_in(ROOT / "proc/driver/nvidia/gpus" / pci_id / "information", "model"):
        return by_driver
    listed = re.compile(rf"^{vendor_id}.*\n(?:\t.*\n)*?\t{device_id}(.+)", re.MULTILINE)  # below a vendor its devices
    match = next(filter(None, (listed.search(text_of(ROOT / place)) for place in _NAME_LISTS)), None)
    return f"{vendor} {match[1].strip()}" if match else f"{vendor} GPU {vendor_id}:{device_id}"
