"""ggml's C interface as far as tests of devices and kernels use it: calls, tensors and graphs, queues, events."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

F32, F16, Q4_K, I32 = 0, 1, 12, 26  # enum ggml_type
_CONTEXT_BYTES = 1 << 20


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("size", c_size_t), ("memory", c_void_p), ("no_alloc", c_bool))


@cache
def _function(name: str, result: Any, types: tuple[Any, ...]) -> Any:
    function = ctypes.CDLL(llama_cpp.llama_cpp._lib._name)[name]  # an object of its own: the product has others
    function.restype, function.argtypes = result, types
    return function


def ggml(name: str, *arguments: Any, result: Any = c_void_p) -> Any:
    """Calls a function of libggml or libggml-base.

    Its types are those of the arguments: plain integers and None are pointers, numbers come as ctypes objects.
    """
    typed = (ctypes._SimpleCData, ctypes.Structure)
    types = [type(a) if isinstance(a, typed) else c_char_p if isinstance(a, bytes) else c_void_p for a in arguments]
    return _function(name, result, tuple(types))(*arguments)


def find_device(name: str) -> int:
    return int(ggml("ggml_backend_dev_by_name", name.encode()))


class Graph:
    """Tensors, operations on them, and a ggml graph that computes these."""

    def __init__(self) -> None:
        self._context = int(ggml("ggml_init", _InitParams(_CONTEXT_BYTES, None, True)))
        self.graph = int(ggml("ggml_new_graph", self._context))
        self.buffer: int | None = None

    def tensor(self, kind: int, *ne: int) -> int:
        """A tensor of up to four dimensions, without memory yet."""
        sizes = (c_int64 * 4)(*ne, *[1] * (4 - len(ne)))
        return self.op("new_tensor", c_int(kind), c_int(len(ne)), ctypes.addressof(sizes))

    def op(self, name: str, *arguments: Any) -> int:
        """The result of the operation ggml_NAME; arguments as in `ggml`."""
        return int(ggml(f"ggml_{name}", self._context, *arguments))

    def expand(self, tensor: int) -> int:
        """Adds a tensor to those that the graph computes."""
        ggml("ggml_build_forward_expand", self.graph, tensor, result=None)
        return tensor

    def allocate(self, buffer_type: int | None = None) -> None:
        """Gives all tensors memory of that type, by default the CPU's; `buffer` is None where there is too little."""
        buffer_type = buffer_type or ggml("ggml_backend_cpu_buffer_type")
        self.buffer = ggml("ggml_backend_alloc_ctx_tensors_from_buft", self._context, buffer_type)

    def array(self, tensor: int, kind: Any, *shape: int) -> NDArray[Any]:
        """A view of a tensor in the CPU's memory."""
        address = ggml("ggml_get_data", tensor)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), shape)

    def close(self) -> None:
        ggml("ggml_backend_buffer_free", self.buffer, result=None)
        ggml("ggml_free", self._context, result=None)


class Queue:
    """A backend instance of a device."""

    def __init__(self, device: str) -> None:
        self.device = find_device(device)
        self.handle = ggml("ggml_backend_dev_init", self.device, None)

    def set(self, tensor: int, values: NDArray[Any]) -> None:
        """Queues a copy to the tensor; `values` must stay as they are until it is done."""
        ggml("ggml_backend_tensor_set_async", self.handle, tensor, *_memory(values), result=None)

    def get(self, tensor: int, values: NDArray[Any]) -> None:
        """Queues a copy to `values`."""
        ggml("ggml_backend_tensor_get_async", self.handle, tensor, *_memory(values), result=None)

    def copy_from(self, other: Queue, source: int, target: int) -> None:
        """Queues a copy of `source`, of the other queue, to `target`, of this one."""
        ggml("ggml_backend_tensor_copy_async", other.handle, self.handle, source, target, result=None)

    def compute(self, graph: int) -> int:
        """Launches a graph; returns ggml's status."""
        return int(ggml("ggml_backend_graph_compute_async", self.handle, graph, result=c_int))

    def synchronize(self) -> None:
        """Waits for everything in the queue."""
        ggml("ggml_backend_synchronize", self.handle, result=None)

    def record(self, event: int) -> None:
        ggml("ggml_backend_event_record", event, self.handle, result=None)

    def wait_for(self, event: int) -> None:
        """Lets the queue, not the host, wait for an event."""
        ggml("ggml_backend_event_wait", self.handle, event, result=None)

    def new_event(self) -> int:
        return int(ggml("ggml_backend_event_new", self.device))

    def close(self) -> None:
        ggml("ggml_backend_free", self.handle, result=None)


def _memory(values: NDArray[Any]) -> tuple[int, c_size_t, c_size_t]:
    return values.ctypes.data, c_size_t(0), c_size_t(values.nbytes)


def synchronize_event(event: int) -> None:
    """Lets the host wait for an event."""
    ggml("ggml_backend_event_synchronize", event, result=None)


def blocking_get(tensor: int, values: NDArray[Any]) -> None:
    """Copies the tensor to `values` outside all queues."""
    ggml("ggml_backend_tensor_get", tensor, *_memory(values), result=None)


class Tensors(Graph):
    """float32 tensors [n] on a device, and the graph of double = 2 x."""

    def __init__(self, queue: Queue, n: int, names: list[str]) -> None:
        super().__init__()
        self.by_name = {name: self.tensor(F32, n) for name in names}
        self.by_name["double"] = self.expand(self.op("scale", self["x"], c_float(2.0)))
        for name, tensor in self.by_name.items():
            ggml("ggml_set_name", tensor, name.encode())
        self.allocate(ggml("ggml_backend_dev_buffer_type", queue.device))

    def __getitem__(self, name: str) -> int:
        return self.by_name[name]


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
