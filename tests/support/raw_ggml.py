"""ggml's C interface as far as tests of devices and kernels use it: calls, tensors on a device, queues, events."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.llama.library import ggml_function

_F32 = 0
_CONTEXT_BYTES = 1 << 20


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("size", c_size_t), ("memory", c_void_p), ("no_alloc", c_bool))


def call(name: str, result: Any, types: list[Any], *arguments: Any) -> Any:
    """Calls a function of libggml or libggml-base."""
    return ggml_function(name, result, *types)(*arguments)


def new_context() -> int:
    """A ggml context for tensors whose data are allocated elsewhere."""
    return int(call("ggml_init", c_void_p, [_InitParams], _InitParams(_CONTEXT_BYTES, None, True)))


def find_device(name: str) -> int:
    """The registered device of that name."""
    return int(call("ggml_backend_dev_by_name", c_void_p, [c_char_p], name.encode()))


class Queue:
    """A backend instance of a device."""

    def __init__(self, device: str) -> None:
        self.device = find_device(device)
        self.handle = call("ggml_backend_dev_init", c_void_p, [c_void_p, c_char_p], self.device, None)

    def set(self, tensor: int, values: NDArray[Any]) -> None:
        """Queues a copy to the tensor; `values` must stay as they are until it is done."""
        self._transfer("ggml_backend_tensor_set_async", tensor, values)

    def get(self, tensor: int, values: NDArray[Any]) -> None:
        """Queues a copy to `values`."""
        self._transfer("ggml_backend_tensor_get_async", tensor, values)

    def _transfer(self, name: str, tensor: int, values: NDArray[Any]) -> None:
        types = [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t]
        call(name, None, types, self.handle, tensor, values.ctypes.data, 0, values.nbytes)

    def copy_from(self, other: Queue, source: int, target: int) -> None:
        """Queues a copy of `source`, of the other queue, to `target`, of this one."""
        types = [c_void_p] * 4
        call("ggml_backend_tensor_copy_async", None, types, other.handle, self.handle, source, target)

    def compute(self, graph: int) -> int:
        """Launches a graph; returns ggml's status."""
        return int(call("ggml_backend_graph_compute_async", c_int, [c_void_p] * 2, self.handle, graph))

    def synchronize(self) -> None:
        """Waits for everything in the queue."""
        call("ggml_backend_synchronize", None, [c_void_p], self.handle)

    def record(self, event: int) -> None:
        """Records an event."""
        call("ggml_backend_event_record", None, [c_void_p] * 2, event, self.handle)

    def wait_for(self, event: int) -> None:
        """Lets the queue, not the host, wait for an event."""
        call("ggml_backend_event_wait", None, [c_void_p] * 2, self.handle, event)

    def new_event(self) -> int:
        """An event of the queue's device."""
        return int(call("ggml_backend_event_new", c_void_p, [c_void_p], self.device))

    def close(self) -> None:
        """Ends the queue."""
        call("ggml_backend_free", None, [c_void_p], self.handle)


def synchronize_event(event: int) -> None:
    """Lets the host wait for an event."""
    call("ggml_backend_event_synchronize", None, [c_void_p], event)


def blocking_get(tensor: int, values: NDArray[Any]) -> None:
    """Copies the tensor to `values` outside all queues."""
    types = [c_void_p, c_void_p, c_size_t, c_size_t]
    call("ggml_backend_tensor_get", None, types, tensor, values.ctypes.data, 0, values.nbytes)


class Tensors:
    """float32 tensors [n] on a device, and graphs of them."""

    def __init__(self, queue: Queue, n: int, names: list[str]) -> None:
        self._context = new_context()
        types = [c_void_p, c_int, c_int64]
        self.by_name: dict[str, int] = {}
        for name in names:
            tensor = call("ggml_new_tensor_1d", c_void_p, types, self._context, _F32, n)
            call("ggml_set_name", c_void_p, [c_void_p, c_char_p], tensor, name.encode())
            self.by_name[name] = tensor
        double = call("ggml_scale", c_void_p, [c_void_p, c_void_p, ctypes.c_float], self._context, self["x"], 2.0)
        call("ggml_set_name", c_void_p, [c_void_p, c_char_p], double, b"double")
        self.by_name["double"] = double
        self.graph = call("ggml_new_graph", c_void_p, [c_void_p], self._context)
        call("ggml_build_forward_expand", None, [c_void_p] * 2, self.graph, double)
        allocate = "ggml_backend_alloc_ctx_tensors"
        self.buffer = call(allocate, c_void_p, [c_void_p] * 2, self._context, queue.handle)

    def __getitem__(self, name: str) -> int:
        return self.by_name[name]

    def close(self) -> None:
        """Frees the memory."""
        call("ggml_backend_buffer_free", None, [c_void_p], self.buffer)
        call("ggml_free", None, [c_void_p], self._context)


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
