"""ggml's C interface as far as tests of a device use it: tensors of int32 on a device, queues, events."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

_F32 = 0


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("size", c_size_t), ("memory", c_void_p), ("no_alloc", c_bool))


def _call(name: str, result: Any, types: list[Any], *arguments: Any) -> Any:
    function = getattr(lib._lib, name)
    function.restype, function.argtypes = result, types
    return function(*arguments)


class Queue:
    """A backend instance of a device."""

    def __init__(self, device: str) -> None:
        self.device = _call("ggml_backend_dev_by_name", c_void_p, [c_char_p], device.encode())
        self.handle = _call("ggml_backend_dev_init", c_void_p, [c_void_p, c_char_p], self.device, None)

    def set(self, tensor: int, values: NDArray[Any]) -> None:
        """Queues a copy to the tensor; `values` must stay as they are until it is done."""
        self._transfer("ggml_backend_tensor_set_async", tensor, values)

    def get(self, tensor: int, values: NDArray[Any]) -> None:
        """Queues a copy to `values`."""
        self._transfer("ggml_backend_tensor_get_async", tensor, values)

    def _transfer(self, name: str, tensor: int, values: NDArray[Any]) -> None:
        types = [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t]
        _call(name, None, types, self.handle, tensor, values.ctypes.data, 0, values.nbytes)

    def copy_from(self, other: Queue, source: int, target: int) -> None:
        """Queues a copy of `source`, of the other queue, to `target`, of this one."""
        types = [c_void_p] * 4
        _call("ggml_backend_tensor_copy_async", None, types, other.handle, self.handle, source, target)

    def compute(self, graph: int) -> int:
        """Launches a graph; returns ggml's status."""
        return int(_call("ggml_backend_graph_compute_async", c_int, [c_void_p] * 2, self.handle, graph))

    def synchronize(self) -> None:
        """Waits for everything in the queue."""
        _call("ggml_backend_synchronize", None, [c_void_p], self.handle)

    def record(self, event: int) -> None:
        """Records an event."""
        _call("ggml_backend_event_record", None, [c_void_p] * 2, event, self.handle)

    def wait_for(self, event: int) -> None:
        """Lets the queue, not the host, wait for an event."""
        _call("ggml_backend_event_wait", None, [c_void_p] * 2, self.handle, event)

    def new_event(self) -> int:
        """An event of the queue's device."""
        return int(_call("ggml_backend_event_new", c_void_p, [c_void_p], self.device))

    def close(self) -> None:
        """Ends the queue."""
        _call("ggml_backend_free", None, [c_void_p], self.handle)


def synchronize_event(event: int) -> None:
    """Lets the host wait for an event."""
    _call("ggml_backend_event_synchronize", None, [c_void_p], event)


def blocking_get(tensor: int, values: NDArray[Any]) -> None:
    """Copies the tensor to `values` outside all queues."""
    types = [c_void_p, c_void_p, c_size_t, c_size_t]
    _call("ggml_backend_tensor_get", None, types, tensor, values.ctypes.data, 0, values.nbytes)


class Tensors:
    """float32 tensors [n] on a device, and graphs of them."""

    def __init__(self, queue: Queue, n: int, names: list[str]) -> None:
        self._context = _call("ggml_init", c_void_p, [_InitParams], _InitParams(1 << 20, None, True))
        types = [c_void_p, c_int, c_int64]
        self.by_name: dict[str, int] = {}
        for name in names:
            tensor = _call("ggml_new_tensor_1d", c_void_p, types, self._context, _F32, n)
            _call("ggml_set_name", c_void_p, [c_void_p, c_char_p], tensor, name.encode())
            self.by_name[name] = tensor
        double = _call("ggml_scale", c_void_p, [c_void_p, c_void_p, ctypes.c_float], self._context, self["x"], 2.0)
        _call("ggml_set_name", c_void_p, [c_void_p, c_char_p], double, b"double")
        self.by_name["double"] = double
        self.graph = _call("ggml_new_graph", c_void_p, [c_void_p], self._context)
        _call("ggml_build_forward_expand", None, [c_void_p] * 2, self.graph, double)
        allocate = "ggml_backend_alloc_ctx_tensors"
        self.buffer = _call(allocate, c_void_p, [c_void_p] * 2, self._context, queue.handle)

    def __getitem__(self, name: str) -> int:
        return self.by_name[name]

    def close(self) -> None:
        """Frees the memory."""
        _call("ggml_backend_buffer_free", None, [c_void_p], self.buffer)
        _call("ggml_free", None, [c_void_p], self._context)


@contextmanager
def tensors_and_queues(device: str, n: int = 64) -> Iterator[tuple[Tensors, Queue, Queue]]:
    """Tensors x, y and double = 2 x of n values, and two queues."""
    first, second = Queue(device), Queue(device)
    tensors = Tensors(first, n, ["x", "y"])
    try:
        yield tensors, first, second
    finally:
        tensors.close()
        first.close()
        second.close()


def zeros(n: int = 64) -> NDArray[np.float32]:
    """Host memory for a tensor."""
    return np.zeros(n, np.float32)
