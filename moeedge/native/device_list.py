"""The devices of the llama.cpp in this process, asked of ggml itself."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_bool, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

from moeedge.native.library import ggml

_KINDS = {0: "CPU", 1: "GPU", 2: "IGPU", 3: "ACCEL"}  # enum ggml_backend_dev_type
_OUR_DEVICE = "MOEEDGE"
RPC_REGISTRY = "RPC"


@dataclass(frozen=True)
class Device:
    """One device of the installed llama.cpp."""

    name: str  # as -dev takes it
    kind: str  # CPU, GPU, IGPU (shares the host's memory), ACCEL, or RPC (a worker's, in another process)
    description: str
    free_bytes: int
    total_bytes: int  # 0: it reports no memory
    registry: str = ""  # the ggml backend that offers it: CPU, CUDA, Metal, BLAS, ...
    pci_id: str = ""  # domain:bus:device.function in lower case, where the backend knows it


class _Properties(ctypes.Structure):
    """struct ggml_backend_dev_props of ggml-backend.h."""

    _fields_ = [
        ("name", c_char_p),
        ("description", c_char_p),
        ("memory_free", c_size_t),
        ("memory_total", c_size_t),
        ("type", c_int),
        ("device_id", c_char_p),
        ("caps", c_bool * 5),
    ]


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the ggml that llama_cpp has loaded."""
    function = getattr(ggml(), name)
    function.restype = result
    function.argtypes = list(arguments)
    return function


def devices() -> list[Device]:
    """The devices that the installed llama.cpp offers, ours left out, in its order.

    Those of workers come without memory: asking one that has gone would end this process.
    """
    return list(_devices())


def _devices() -> Iterator[Device]:
    count = ggml_function("ggml_backend_dev_count", c_size_t)
    get = ggml_function("ggml_backend_dev_get", c_void_p, c_size_t)
    name_of = ggml_function("ggml_backend_dev_name", c_char_p, c_void_p)
    registry_of = ggml_function("ggml_backend_dev_backend_reg", c_void_p, c_void_p)
    registry_name = ggml_function("ggml_backend_reg_name", c_char_p, c_void_p)
    description_of = ggml_function("ggml_backend_dev_description", c_char_p, c_void_p)
    get_properties = ggml_function("ggml_backend_dev_get_props", None, c_void_p, ctypes.POINTER(_Properties))
    for index in range(count()):
        device = get(index)
        name = name_of(device).decode()
        if name == _OUR_DEVICE:
            continue
        registry = registry_name(registry_of(device)).decode()
        if registry == RPC_REGISTRY:
            yield Device(name, "RPC", description_of(device).decode(), 0, 0, registry)
            continue
        properties = _Properties()
        get_properties(device, ctypes.byref(properties))
        yield Device(
            name,
            _KINDS.get(properties.type, "other"),
            properties.description.decode(),
            properties.memory_free,
            properties.memory_total,
            registry,
            (properties.device_id or b"").decode(),
        )
