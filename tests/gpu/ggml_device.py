"""A ggml device through ggml's C functions: instances, memory, graphs, and traffic of a second instance.

Works on any device of ggml's list: CUDA0, Vulkan0, CPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from moeedge.native.library import ggml_function

POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
Q4_K, F32, I32 = 12, 0, 26  # enum ggml_type
_GRAPH_BYTES = 1 << 20


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", ctypes.c_bool))


@cache
def _function(name: str, result: Any, types: tuple[Any, ...]) -> Any:
    return ggml_function(name, result, *types)


def _call(name: str, *arguments: Any, result: Any = POINTER) -> Any:
    """Calls a ggml function with pointers, and numbers as ctypes objects."""
    types = tuple(type(argument) if isinstance(argument, ctypes._SimpleCData) else POINTER for argument in arguments)
    return _function(name, result, types)(*arguments)


@dataclass
class Backend:
    """One instance of a device: a queue of its own. Close it after use."""

    device: int
    handle: int
    _owned: list[int] = field(default_factory=list)  # buffers
    _contexts: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, name: str) -> Backend:
        """Raises ValueError for a name that ggml does not know, RuntimeError where the device has no instance."""
        device = ggml_function("ggml_backend_dev_by_name", POINTER, ctypes.c_char_p)(name.encode())
        if not device:
            raise ValueError(f"ggml has no device {name}")
        handle = ggml_function("ggml_backend_dev_init", POINTER, POINTER, ctypes.c_char_p)(device, None)
        if not handle:
            raise RuntimeError(f"{name} cannot be opened")
        return cls(device, handle)

    def close(self) -> None:
        """Frees its memory and the instance."""
        for context in self._contexts:
            _call("ggml_free", context, result=None)
        for buffer in self._owned:
            _call("ggml_backend_buffer_free", buffer, result=None)
        _call("ggml_backend_free", self.handle, result=None)

    def pinned(self, n_bytes: int) -> int | None:
        """The address of host memory that the device reads without a copy; None where it has no such memory."""
        buffer_type = _call("ggml_backend_dev_host_buffer_type", self.device)
        if not buffer_type:
            return None
        buffer = _call("ggml_backend_buft_alloc_buffer", buffer_type, SIZE(n_bytes))
        if not buffer:
            return None
        self._owned.append(buffer)
        address: int = _call("ggml_backend_buffer_get_base", buffer)
        return address

    def context(self) -> int:
        """A ggml context whose tensors have no memory yet."""
        make = ggml_function("ggml_init", POINTER, _InitParams)
        context: int = make(_InitParams(_GRAPH_BYTES, None, True))
        self._contexts.append(context)
        return context

    def allocate(self, context: int) -> None:
        """Gives the tensors of a context device memory, all zeros. Raises MemoryError."""
        buffer_type = _call("ggml_backend_dev_buffer_type", self.device)
        buffer = _call("ggml_backend_alloc_ctx_tensors_from_buft", context, buffer_type)
        if not buffer:
            raise MemoryError("the device has no memory for it")
        self._owned.append(buffer)
        _call("ggml_backend_buffer_clear", buffer, ctypes.c_uint8(0), result=None)

    def free_bytes(self) -> int:
        """Free memory of the device."""
        free, total = SIZE(), SIZE()
        read = ggml_function("ggml_backend_dev_memory", None, POINTER, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE))
        read(self.device, ctypes.byref(free), ctypes.byref(total))
        return free.value

    def ask_name(self) -> None:
        """Does nothing with the device: what a call from Python takes."""
        _call("ggml_backend_name", self.handle, result=ctypes.c_char_p)

    def synchronize(self) -> None:
        """Waits for all that was queued."""
        _call("ggml_backend_synchronize", self.handle, result=None)

    def set(self, tensor: int, source: int, n_bytes: int, *, queued: bool = False) -> None:
        """Host to device; blocking unless queued."""
        if queued:
            _call("ggml_backend_tensor_set_async", self.handle, tensor, source, SIZE(0), SIZE(n_bytes), result=None)
        else:
            _call("ggml_backend_tensor_set", tensor, source, SIZE(0), SIZE(n_bytes), result=None)

    def get(self, tensor: int, target: int, n_bytes: int, *, queued: bool = False) -> None:
        """Device to host; blocking unless queued."""
        if queued:
            _call("ggml_backend_tensor_get_async", self.handle, tensor, target, SIZE(0), SIZE(n_bytes), result=None)
        else:
            _call("ggml_backend_tensor_get", tensor, target, SIZE(0), SIZE(n_bytes), result=None)

    def graph(self, context: int, output: int) -> int:
        """The graph that computes a tensor."""
        graph: int = _call("ggml_new_graph", context)
        _call("ggml_build_forward_expand", graph, output, result=None)
        return graph

    def supports(self, tensor: int) -> bool:
        """Whether the device can compute a tensor."""
        return bool(_call("ggml_backend_dev_supports_op", self.device, tensor, result=ctypes.c_bool))

    def compute(self, graph: int, *, queued: bool = False) -> None:
        """Computes a graph, and waits for it unless queued. Raises RuntimeError."""
        name = "ggml_backend_graph_compute_async" if queued else "ggml_backend_graph_compute"
        if _call(name, self.handle, graph, result=ctypes.c_int) != 0:
            raise RuntimeError("the device failed to compute")


def tensor(context: int, kind: int, *dimensions: int) -> int:
    """A new tensor of up to four dimensions."""
    sizes = (ctypes.c_int64 * 4)(*dimensions, *([1] * (4 - len(dimensions))))
    make = ggml_function("ggml_new_tensor", POINTER, POINTER, ctypes.c_int, ctypes.c_int, POINTER)
    made: int = make(context, kind, len(dimensions), ctypes.cast(sizes, POINTER))
    return made


def mul_mat_id(context: int, table: int, columns: int, ids: int) -> int:
    """The product of chosen experts with columns."""
    product: int = _call("ggml_mul_mat_id", context, table, columns, ids)
    return product


def scale(context: int, source: int) -> int:
    """A tensor times a half."""
    scaled: int = _call("ggml_scale", context, source, ctypes.c_float(0.5))
    return scaled


@contextmanager
def traffic(name: str, chunk_bytes: int) -> Iterator[bool]:
    """Uploads chunk after chunk from another thread and queue, as the engine's mover does; False: no pinned memory."""
    mover = Backend.open(name)
    context = mover.context()
    target = tensor(context, F32, chunk_bytes // 4)
    mover.allocate(context)
    source = mover.pinned(chunk_bytes)
    memory = (ctypes.c_uint8 * chunk_bytes)()
    address = source or ctypes.addressof(memory)
    stop = threading.Event()

    def move() -> None:
        while not stop.is_set():
            mover.set(target, address, chunk_bytes, queued=source is not None)
            mover.synchronize()

    thread = threading.Thread(target=move)
    thread.start()
    try:
        yield source is not None
    finally:
        stop.set()
        thread.join()
        mover.close()
