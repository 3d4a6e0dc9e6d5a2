"""From what -dev asks for to the device that will hold experts.

Everything that could hold experts here, with what it is for or why it is of no use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import psutil

from moeedge import native
from moeedge.errors import DeviceError
from moeedge.hardware import nvidia, rpc
from moeedge.hardware.spec import EMULATED, DeviceSpec
from moeedge.units import format_rate

DeviceKind = Literal["none", "emulated", "gpu", "rpc"]
EMULATED_RATIO = 0.17  # of all expert bytes: the paper's 24 GB card under the unquantised Qwen3-30B-A3B
_HOW_TO_SEE = "moeedge devices says what there is"


@dataclass(frozen=True)
class ResolvedDevice:
    """Where experts may be placed, and what llama.cpp may do with its own devices beside it."""

    kind: DeviceKind
    ggml_name: str = ""  # what native.cache.CacheConfig.device takes
    label: str = "none"  # for the screen and for records; contains "emulated" where it is
    llama_device: str = "none"  # for llama.cpp's layers: "none", "auto" (its GPUs, never a worker's) or a GPU's name
    link_bytes_per_s: int = 0  # emulated only; 0: not paced
    latency_us: float = 0.0  # emulated only
    threads: int = 0  # emulated only; 0: half the physical cores
    endpoint: str = ""  # rpc only: HOST:PORT
    pci_id: str = ""  # of a GPU, where its backend tells
    free_bytes: int = 0  # when it was resolved; 0: not known
    total_bytes: int = 0
    default_ratio: float | None = None  # cache ratio unless asked otherwise; None: what fits
    notes: list[str] = field(default_factory=list)  # sentences for the user


def resolve(spec: DeviceSpec, *, bundled: bool = False) -> ResolvedDevice:
    """Finds the device; `bundled` says that the model is the bundled one, which auto runs on the emulated device.

    Raises DeviceError for a name that llama.cpp does not list (naming those that it does), for a worker that does not
    answer, and BackendError where llama.cpp was built without RPC.
    """
    native.attach()
    if spec.kind == "none":
        return ResolvedDevice("none")
    if spec.kind == "emulated":
        return _emulated(spec)
    if spec.kind == "rpc":
        return _worker(spec.endpoint)
    if spec.kind == "auto":
        return _automatic(bundled)
    return _named(spec.name)


def check_known(spec: DeviceSpec) -> None:
    """Raises DeviceError for a device that nothing offers, without touching it."""
    if spec.kind == "name":
        native.attach()
        _find(spec.name)


def usable_names() -> list[str]:
    """What -dev takes here."""
    listed = [device.name for device in native.devices() if device.kind not in ("ACCEL", "RPC")]
    return ["auto", "none", EMULATED, *listed, *(["rpc://HOST:PORT"] if rpc.is_built_in() else [])]


def driver_without_backend(devices: list[native.Device]) -> str:
    """A sentence where the NVIDIA driver knows cards that llama.cpp was not built for; empty otherwise."""
    cards = nvidia.cards()
    if not cards or any(device.kind in ("GPU", "IGPU") for device in devices):
        return ""
    return (
        f"The NVIDIA driver offers {cards[0]}, but the installed llama.cpp was built without CUDA. "
        f"Install it with CUDA: {rpc.build_command('-DGGML_CUDA=on')}"
    )


def _automatic(bundled: bool) -> ResolvedDevice:
    devices = native.devices()
    gpus = [device for device in devices if device.kind == "GPU"]
    if gpus:
        return _gpu(gpus[0], llama_device="auto", notes=[])
    notes = []
    missed = driver_without_backend(devices)
    if missed:
        notes.append(missed)
    shared = [device.name for device in devices if device.kind == "IGPU"]
    if shared:
        notes.append(f"{shared[0]} shares the host's memory, so that auto leaves experts on the CPU; -dev {shared[0]}.")
    if bundled:
        notes.append(
            "No GPU: the bundled model runs on the emulated device (a second CPU instance); "
            "-dev none switches that off."
        )
        return _emulated(DeviceSpec("emulated"), notes=notes)
    if not shared:
        notes.append(f"No GPU: every expert stays on the CPU ({_HOW_TO_SEE}).")
    return ResolvedDevice("none", llama_device="auto", notes=notes)


def _emulated(spec: DeviceSpec, *, notes: list[str] | None = None) -> ResolvedDevice:
    link = f", link {format_rate(spec.link_bytes_per_s)}" if spec.link_bytes_per_s else ""
    link += f", latency {spec.latency_us:g} us" if spec.latency_us else ""
    memory = psutil.virtual_memory()
    return ResolvedDevice(
        "emulated",
        ggml_name=EMULATED,
        label=f"emulated (CPU{link})",
        llama_device="auto",
        link_bytes_per_s=spec.link_bytes_per_s,
        latency_us=spec.latency_us,
        threads=spec.threads,
        free_bytes=memory.available,
        total_bytes=memory.total,
        default_ratio=EMULATED_RATIO,
        notes=notes or [],
    )


def _worker(endpoint: str) -> ResolvedDevice:
    name, worker = rpc.add_worker(endpoint)
    free, total = (worker.free_bytes, worker.total_bytes) if worker else (0, 0)
    notes = []
    if free == total:  # a worker on a CPU reports its whole memory as free, other programs included
        free = total // 2
    if worker and worker.n_devices > 1:
        notes.append(f"rpc://{endpoint} serves {worker.n_devices} devices; the first one is used.")
    return ResolvedDevice(
        "rpc",
        ggml_name=name,
        label=f"rpc://{endpoint}",
        llama_device="auto",
        endpoint=endpoint,
        free_bytes=free,
        total_bytes=total,
        notes=notes,
    )


def _named(name: str) -> ResolvedDevice:
    device = _find(name)
    if device.kind == "CPU":
        return ResolvedDevice("none", notes=[f"{name} is where experts are without a device: as -dev none."])
    return _gpu(device, llama_device=device.name, notes=[])


def _find(name: str) -> native.Device:
    """The device of that name, if experts can be on it."""
    known = f"Known: {', '.join(usable_names())}."
    for device in native.devices():
        if device.name == name:
            if device.kind == "RPC":
                raise DeviceError(f"{name} is a worker's device.", f"Name it rpc://{device.description}.")
            if device.kind not in ("CPU", "GPU", "IGPU"):
                raise DeviceError(f"{name} computes in the host's memory and has none of its own for experts.", known)
            return device
    raise DeviceError(f'There is no device "{name}".', known)


def _gpu(device: native.Device, *, llama_device: str, notes: list[str]) -> ResolvedDevice:
    return ResolvedDevice(
        "gpu",
        ggml_name=device.name,
        label=f"{device.name} ({device.description})",
        llama_device=llama_device,
        pci_id=device.pci_id if device.registry == "CUDA" else "",
        free_bytes=device.free_bytes,
        total_bytes=device.total_bytes,
        notes=notes,
    )


@dataclass(frozen=True)
class Entry:
    """One row of `moeedge devices`."""

    name: str  # as -dev takes it; of an unusable one as llama.cpp or the driver calls it
    kind: str  # CPU, GPU, IGPU (shares the host's memory), ACCEL, emulated or RPC
    description: str
    free_bytes: int | None  # None: not known, or no memory of its own
    total_bytes: int | None
    usable: bool  # whether it can hold experts
    remark: str  # what for, or why not


def catalog() -> list[Entry]:
    """What llama.cpp lists, in its order, and the devices that it does not know by itself."""
    listed = native.devices()
    entries = [_listed(device) for device in listed if device.kind != "RPC"]
    missed = driver_without_backend(listed)
    if missed:
        entries += [Entry(card, "GPU", "NVIDIA", None, None, False, missed) for card in nvidia.cards()]
    host = psutil.virtual_memory()
    entries.append(
        Entry(
            EMULATED,
            "emulated",
            "a second CPU instance",
            host.available,
            host.total,
            True,
            "memory and threads of its own, to try it all without a GPU; emulated:link=25GB/s,threads=2 sets its pace",
        )
    )
    entries.append(_remote())
    return entries


def _listed(device: native.Device) -> Entry:
    free: int | None = device.free_bytes
    total: int | None = device.total_bytes
    if device.kind == "CPU":
        free = psutil.virtual_memory().available  # llama.cpp calls all of it free
        usable, remark = False, "the cold side: experts that are on no device stay and run here"
    elif device.kind == "GPU":
        usable, remark = True, "holds experts, and layers with -ngl"
    elif device.kind == "IGPU":
        usable, remark = True, "shares the host's memory; auto passes it by"
    else:
        usable, remark = False, "computes in the host's memory, has none of its own for experts"
    if not total:
        free = total = None
    return Entry(device.name, device.kind, device.description, free, total, usable, remark)


def _remote() -> Entry:
    if rpc.is_built_in():
        return Entry(
            "rpc://HOST:PORT", "RPC", "another machine's device", None, None, True, "start moeedge worker there first"
        )
    remark = f"the installed llama.cpp was built without RPC: {rpc.build_command()}"
    return Entry("rpc://HOST:PORT", "RPC", "another machine's device", None, None, False, remark)
