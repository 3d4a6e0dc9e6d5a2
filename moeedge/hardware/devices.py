"""Devices that can hold experts: from a DeviceSpec to a ResolvedDevice, the rows of `moeedge devices`, free memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from moeedge import native
from moeedge.errors import DeviceError
from moeedge.hardware import nvidia, rpc
from moeedge.hardware.gpus import unused_gpus
from moeedge.hardware.host import available_memory, total_memory
from moeedge.hardware.spec import EMULATED, DeviceSpec
from moeedge.records import filled
from moeedge.run import Level, Notification
from moeedge.units import format_rate

DeviceKind = Literal["none", "emulated", "gpu", "rpc"]
# Of a model's weights in host memory. loaded: all are read, with copies for the CPU's kernels where llama.cpp has some;
# mapped: pages of the file; on demand: experts are pages of the file, from where a cache in RAM loads those it needs
Storage = Literal["loaded", "mapped", "on demand"]
EMULATED_RATIO = 0.17  # of all expert bytes: MoE-SpAc's 24 GB card under the unquantised Qwen3-30B-A3B
_RPC_FORM = "rpc://HOST:PORT"
_MAX_TOTAL_DIFFERENCE = 0.1  # if NVML's and llama.cpp's totals differ by more, llama.cpp has a slice of a card (MIG)


@dataclass(frozen=True)
class ResolvedDevice:
    """Where experts may be placed, and which devices llama.cpp may use for its layers."""

    kind: DeviceKind
    ggml_name: str = ""  # for native.cache.CacheConfig.device
    label: str = "none"  # for the screen and for records; contains "emulated" for the emulated device
    llama_device: str = "none"  # for llama.cpp's layers: "none", "auto" (its GPUs, never a worker's) or a GPU's name
    link_bytes_per_s: int = 0  # emulated only; 0: not paced
    latency_us: float = 0.0  # emulated only
    threads: int = 0  # emulated only; 0: half the physical cores
    endpoint: str = ""  # rpc only: HOST:PORT
    pci_id: str = ""  # of a GPU whose backend reports it
    free_bytes: int = 0  # at resolution; 0: unknown
    total_bytes: int = 0
    default_ratio: float | None = None  # cache ratio unless the user sets one; None: as much as fits
    storage: Storage = "loaded"  # of the weights that are not on it
    notes: list[str] = field(default_factory=list)  # sentences for the user

    @property
    def place(self) -> str:
        """Where experts on it are, in words."""
        return "on the emulated GPU" if self.kind == "emulated" else f"on {self.label.partition(' (')[0]}"

    @property
    def loads_misses(self) -> bool:
        """Whether experts that are not on the device are loaded from the file into RAM as needed."""
        return self.storage == "on demand"

    @property
    def ram_alone(self) -> bool:
        """Whether experts are placed in RAM, and on no device."""
        return self.kind == "none" and self.loads_misses

    @property
    def has_tiers(self) -> bool:
        """Whether experts can be placed: on the device, in RAM, or on both."""
        return self.kind != "none" or self.loads_misses


@dataclass(frozen=True)
class DeviceRow:
    """One row of `moeedge devices`."""

    name: str  # as -dev takes it; for an unusable device as llama.cpp or the driver calls it
    kind: str  # CPU, GPU, IGPU (shares the host's memory), ACCEL, emulated or RPC
    description: str
    free_bytes: int | None  # None: unknown, or no memory of its own
    total_bytes: int | None
    usable: bool  # whether it can hold experts
    remark: str  # its purpose, or why it is unusable
    file: str | None = None  # of the ggml backend that offers it; None: llama.cpp was compiled with it


@dataclass(frozen=True)
class VramReading:
    """Bytes of the device's memory, all processes together, and who reported them."""

    used_bytes: int
    free_bytes: int
    total_bytes: int
    source: Literal["nvml", "ggml", "worker", "pool", "system"]


def resolve(spec: DeviceSpec, *, bundled: bool = False) -> ResolvedDevice:
    """Finds the device; `bundled`: the model is the bundled one, which auto runs on the emulated device.

    Raises DeviceError for an unknown name and a worker that does not answer, BackendError for rpc:// without RPC.
    """
    native.attach()
    if spec.kind == "emulated":
        return _emulated(spec)
    if spec.kind == "rpc":
        return _worker(spec.endpoint)
    if spec.kind == "auto":
        return _automatic(bundled)
    device = _find(spec.name) if spec.kind == "name" else None
    if device is not None and device.kind != "CPU":
        return _gpu(device, llama_device=device.name)
    note = f"-dev {spec.name} means no GPU: experts stay on the CPU, as with -dev none."
    return ResolvedDevice("none", notes=[] if device is None else [note])


def host_memory() -> VramReading:
    """The memory of this machine now."""
    free, total = available_memory(), total_memory()
    return VramReading(total - free, free, total, "system")


def _automatic(bundled: bool) -> ResolvedDevice:
    devices = native.devices()
    gpus = [device for device in devices if device.kind == "GPU" and not device.shares_host_memory]
    if gpus:
        return _gpu(gpus[0], llama_device="auto")
    missed = [gpu for gpu in unused_gpus(devices) if gpu.lacks_backend and not gpu.in_processor]
    notes = [f"{gpu.name} is not used. {gpu.advice}" for gpu in missed]
    shared = [device.name for device in devices if device.shares_host_memory]
    if shared:
        text = f"{shared[0]} is a GPU without memory of its own, so experts stay on the CPU."
        notes.append(f"{text} -dev {shared[0]} uses it all the same.")
    if bundled:
        text = "No GPU: the emulated device, a second CPU instance, takes its place; -dev none does without."
        notes.append(Notification(text, Level.NOTICE))
        return replace(_emulated(DeviceSpec("emulated")), notes=notes)
    if not shared:
        notes.append(Notification("No GPU: all experts stay on the CPU (see moeedge devices)."))
    return ResolvedDevice("none", llama_device="auto", notes=notes)


def _emulated(spec: DeviceSpec) -> ResolvedDevice:
    link = f", link {format_rate(spec.link_bytes_per_s)}" if spec.link_bytes_per_s else ""
    link += f", latency {spec.latency_us:g} us" if spec.latency_us else ""
    return filled(
        ResolvedDevice,
        spec,
        ggml_name=EMULATED,
        label=f"emulated (CPU{link})",
        llama_device="auto",
        free_bytes=available_memory(),
        total_bytes=total_memory(),
        default_ratio=EMULATED_RATIO,
    )


def _worker(endpoint: str) -> ResolvedDevice:
    name, worker = rpc.add_worker(endpoint)
    n_devices, free, total = worker or (1, 0, 0)
    if free == total:  # a worker on a CPU reports all memory as free, including that of other programs
        free = total // 2
    device = ResolvedDevice("rpc", name, f"rpc://{endpoint}", "auto", endpoint=endpoint)
    note = f"{device.label} serves {n_devices} devices; moeedge uses the first one."
    return replace(device, free_bytes=free, total_bytes=total, notes=[note] if n_devices > 1 else [])


def _gpu(device: native.Device, *, llama_device: str) -> ResolvedDevice:
    label, pci_id = f"{device.name} ({device.description})", device.pci_id if device.registry == "CUDA" else ""
    resolved = ResolvedDevice("gpu", device.name, label, llama_device, pci_id=pci_id)
    return replace(resolved, free_bytes=device.free_bytes, total_bytes=device.total_bytes)


def _find(name: str) -> native.Device:
    """Returns the device of that name, which is the CPU or can hold experts."""
    devices = native.devices()
    usable = [device.name for device in devices if device.kind not in ("ACCEL", "RPC")]
    names = ["auto", "none", EMULATED, *usable, *([_RPC_FORM] if rpc.is_built_in() else [])]
    hint = f"Choose from: {', '.join(names)}."
    device = next((device for device in devices if device.name == name), None)
    if device is None:
        raise DeviceError(f"Unknown device '{name}'.", hint)
    if device.kind == "RPC":
        raise DeviceError(f"{name} is a device of a worker.", f"Write -dev rpc://{device.description}.")
    if device.kind not in ("CPU", "GPU", "IGPU"):
        raise DeviceError(f"{name} has no memory of its own, so it cannot hold experts.", hint)
    return device


def list_devices() -> list[DeviceRow]:
    """Returns the devices that llama.cpp lists, in its order, then the emulated and the remote one."""
    devices = native.devices()
    rows = [_row(device) for device in devices if device.kind != "RPC"]
    rows += [
        DeviceRow(gpu.name, "GPU", gpu.vendor, None, gpu.total_bytes, False, f"not used. {gpu.advice}")
        for gpu in unused_gpus(devices)
    ]
    remark = "the CPU plays a GPU, to try everything without one; emulated:link=25GB/s,threads=2 sets its speed"
    sizes = available_memory(), total_memory()
    rows.append(DeviceRow(EMULATED, "emulated", "a second CPU instance", *sizes, True, remark))
    has_rpc, remark = rpc.is_built_in(), "start moeedge worker there first"
    remark = remark if has_rpc else f"the installed llama.cpp was built without RPC: {rpc.build_command()}"
    return [*rows, DeviceRow(_RPC_FORM, "RPC", "another machine's device", None, None, has_rpc, remark)]


def _row(device: native.Device) -> DeviceRow:
    usable, remark = device.kind in ("GPU", "IGPU"), "holds experts, and layers with -ngl"
    if device.kind == "CPU":
        remark = "experts that are on no other device are stored and computed here"
    elif not usable:
        remark = "has no memory of its own, so it cannot hold experts"
    elif device.shares_host_memory:
        remark = "has no memory of its own; -dev auto does not choose it"
    # llama.cpp reports all memory of the CPU as free
    free = available_memory() if device.kind == "CPU" else device.free_bytes
    free_bytes, total_bytes = (free, device.total_bytes) if device.total_bytes else (None, None)
    file = None if device.loaded is None else str(device.loaded.file)
    if device.loaded is not None and not device.loaded.states_ggml:
        remark += "; its file does not tell ggml's version, which must be llama.cpp's (docs/devices.md)"
    return DeviceRow(device.name, device.kind, device.description, free_bytes, total_bytes, usable, remark, file)


def read_memory(device: ResolvedDevice, *, pool_bytes: int = 0, filled_bytes: int | None = None) -> VramReading | None:
    """Returns the device's memory now, None without a device; cheap enough for several calls a second.

    pool_bytes: of the expert cache, all that the emulated device has; filled_bytes: those that hold experts (default:
    all). A worker's reading is its first answer less the pool: asking one that has gone would end this process.
    """
    if device.kind == "none":
        return None
    if device.kind == "emulated":
        used = pool_bytes if filled_bytes is None else filled_bytes
        return VramReading(used, pool_bytes - used, pool_bytes, "pool")
    if device.kind == "rpc":
        free = max(0, device.free_bytes - pool_bytes)
        return VramReading(device.total_bytes - free, free, device.total_bytes, "worker")
    card = nvidia.memory(device.pci_id)
    if card and abs(card[2] - device.total_bytes) <= _MAX_TOTAL_DIFFERENCE * card[2]:
        return VramReading(*card, "nvml")
    sizes = ((gpu.free_bytes, gpu.total_bytes) for gpu in native.devices() if gpu.name == device.ggml_name)
    return next((VramReading(total - free, free, total, "ggml") for free, total in sizes), None)
