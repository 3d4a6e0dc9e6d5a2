"""The devices of the llama.cpp in this process, the memory that a context takes, and a dry-run GPU for planning."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char, c_char_p, c_int, c_int32, c_size_t
from dataclasses import dataclass
from typing import Any

from moeedge.errors import BackendError
from moeedge.native.abi import c_field, c_struct, from_c
from moeedge.native.backends import RPC_REGISTRY, LoadedBackend, registered
from moeedge.native.library import ggml_functions, load

_KINDS = {0: "CPU", 1: "GPU", 2: "IGPU", 3: "ACCEL"}  # enum ggml_backend_dev_type
_OUR_DEVICE = "MOEEDGE"
_BUFFER_FROM_HOST_POINTER = 2  # index in struct ggml_backend_dev_caps


@dataclass(frozen=True)
class Device:
    """One device of the installed llama.cpp."""

    name: str  # as -dev takes it
    kind: str  # CPU, GPU, IGPU (shares the host's memory), ACCEL, or RPC (of a worker in another process)
    description: str
    free_bytes: int
    total_bytes: int  # 0: it reports no memory
    registry: str = ""  # the ggml backend that offers it: CPU, CUDA, Metal, BLAS, ...
    pci_id: str = ""  # domain:bus:device.function in lower case, where the backend knows it
    shares_host_memory: bool = False  # of a GPU or IGPU: what it holds is in the host's memory
    loaded: LoadedBackend | None = None  # None: llama.cpp was compiled with its backend


class _Properties(ctypes.Structure):
    """struct ggml_backend_dev_props of ggml-backend.h."""

    _fields_ = [
        *((name, c_char_p) for name in ("name", "description")),
        *((name, c_size_t) for name in ("memory_free", "memory_total")),
        *(("type", c_int), ("device_id", c_char_p), ("caps", c_bool * 5)),
    ]


def devices() -> list[Device]:
    """llama.cpp's devices without ours; workers without memory: to ask one that has ended ends this process."""
    listed = []
    ggml = ggml_functions()
    for device in map(ggml.ggml_backend_dev_get, range(ggml.ggml_backend_dev_count())):
        name = ggml.ggml_backend_dev_name(device).decode()
        if name == _OUR_DEVICE:
            continue
        registry_address = ggml.ggml_backend_dev_backend_reg(device)
        registry = ggml.ggml_backend_reg_name(registry_address).decode()
        if registry == RPC_REGISTRY:
            listed.append(Device(name, "RPC", ggml.ggml_backend_dev_description(device).decode(), 0, 0, registry))
            continue
        properties = _Properties()
        ggml.ggml_backend_dev_get_props(device, ctypes.byref(properties))
        kind = _KINDS.get(properties.type, "other")
        # Metal calls every device a GPU. Its devices, and no GPU with memory of its own, take host memory as buffers.
        is_shared = kind == "IGPU" or (kind == "GPU" and bool(properties.caps[_BUFFER_FROM_HOST_POINTER]))
        memory = properties.memory_free, properties.memory_total, registry
        pci_id = (properties.device_id or b"").decode()
        text = properties.description.decode()
        listed.append(Device(name, kind, text, *memory, pci_id, is_shared, registered.get(registry_address)))
    return listed


_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"  # of llama-ext.h; it has no C interface
_MAX_USES = 64
PLAIN_BUFFERS = ("CPU", "CPU_Mapped")  # llama.cpp's names of memory with weights as in the file, not repacked
DRY_RUN_GPU = "dry-run"  # device name by which the planner asks for it


@dataclass(frozen=True)
class MemoryUse:
    """struct moeedge_memory_use: bytes that a context and its model have in buffers of one type."""

    buffer_type: str = c_field(c_char * 64)  # llama.cpp's name: CPU, CPU_REPACK, CUDA0, ...
    device: str = c_field(c_char * 64)  # the GPU's name; empty: the CPU's
    on_gpu: bool = c_field(c_int32)  # False: in host memory
    weights_bytes: int = c_field()
    memory_bytes: int = c_field()  # KV cache and recurrent states
    compute_bytes: int = c_field()


def dry_run_gpu() -> int:
    """Address of a ggml device without memory and computation, for models that are loaded without weights."""
    return int(load().moeedge_dry_run_gpu())


def memory_uses(llama: Any, context: Any, *, simulated: bool) -> list[MemoryUse]:
    """Memory of `context` (llama_context *) and its model, exact to the byte.

    llama: the loaded libllama. simulated: the model was loaded without weights, and no memory is allocated.
    Raises BackendError where this llama.cpp does not report its memory.
    """
    breakdown = getattr(llama, _BREAKDOWN, None)
    if breakdown is None:
        raise BackendError("The installed llama.cpp does not report its memory.", "Install moeedge again.")
    uses = (c_struct(MemoryUse) * _MAX_USES)()
    count = load().moeedge_memory_uses(ctypes.cast(breakdown, ctypes.c_void_p), context, simulated, uses, _MAX_USES)
    if count < 0:
        raise BackendError(f"llama.cpp's memory report cannot be read (code {count}).")
    return [from_c(MemoryUse, use) for use in uses[:count]]
