"""A MoE block's experts as a ggml graph (up, gate, SwiGLU, down), computed by ggml's CPU backend or by ours."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from moeedge.llama import library
from tests.support.raw_ggml import call, find_device, new_context

_F32, _I32 = 0, 26  # enum ggml_type
_N_DISTINCT_ROWS = 64  # the others repeat them: quantizing takes long


@dataclass(frozen=True)
class BlockShape:
    """Widths and numbers of experts; `type` is a name of ggml's types, of all matrices."""

    type: str
    n_embd: int = 2048  # Qwen3-30B-A3B
    n_ff: int = 768
    n_experts: int = 128
    n_used: int = 8

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's three matrices."""
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return 3 * self.n_embd * self.n_ff // per_block * block_bytes


def _proc(device: int, name: str, prototype: Any) -> Any:
    """A function that the device's backend offers by name."""
    registry = call("ggml_backend_dev_backend_reg", c_void_p, [c_void_p], device)
    address = call("ggml_backend_reg_get_proc_address", c_void_p, [c_void_p, c_char_p], registry, name.encode())
    return prototype(address)


def _repacked_buffer_type() -> int | None:
    device = find_device("CPU")
    found = _proc(device, "ggml_backend_dev_get_extra_bufts", CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p))(device)
    for index in range(16):
        if not found or not found[index]:
            return None
        if call("ggml_backend_buft_name", c_char_p, [c_void_p], found[index]) == b"CPU_REPACK":
            return int(found[index])
    return None


class Engine:
    """A backend instance: "CPU" is ggml's, "MOEEDGE" ours."""

    def __init__(self, name: str, n_threads: int) -> None:
        library.start()
        device = find_device(name)
        self.handle = call("ggml_backend_dev_init", c_void_p, [c_void_p, c_char_p], device, None)
        _proc(device, "ggml_backend_set_n_threads", CFUNCTYPE(None, c_void_p, c_int))(self.handle, n_threads)

    def compute(self, graph: int) -> None:
        """Computes a graph; raises RuntimeError if it fails."""
        status = call("ggml_backend_graph_compute", c_int, [c_void_p, c_void_p], self.handle, graph)
        if status != 0:
            raise RuntimeError(f"ggml's status is {status}")

    def close(self) -> None:
        """Frees the instance."""
        call("ggml_backend_free", None, [c_void_p], self.handle)


class Experts:
    """The matrices of a layer's experts, with random values; a context manager.

    repacked: as llama.cpp keeps them for the CPU by default, where ggml has such a layout for the type. roles: which of
    the three matrices there are; one of a single expert is a dense matrix.
    """

    def __init__(
        self,
        shape: BlockShape,
        *,
        repacked: bool,
        seed: int = 0,
        roles: tuple[str, ...] = ("up", "gate", "down"),
    ) -> None:
        library.start()
        self.shape = shape
        self._context = new_context()
        self._type = int(gguf.GGMLQuantizationType[shape.type])
        rng = np.random.default_rng(seed)
        sizes = {
            "up": (shape.n_embd, shape.n_ff),
            "gate": (shape.n_embd, shape.n_ff),
            "down": (shape.n_ff, shape.n_embd),
        }
        sizes = {role: sizes[role] for role in roles}
        types = [c_void_p, c_int, c_int64, c_int64, c_int64]
        self.tensors = {
            role: call("ggml_new_tensor_3d", c_void_p, types, self._context, self._type, *size, shape.n_experts)
            for role, size in sizes.items()
        }
        buffer_type = _repacked_buffer_type() if repacked else None
        if buffer_type is None:
            buffer_type = call("ggml_backend_cpu_buffer_type", c_void_p, [])
        allocate = "ggml_backend_alloc_ctx_tensors_from_buft"
        self._buffer = call(allocate, c_void_p, [c_void_p, c_void_p], self._context, buffer_type)
        for role, (n_in, n_out) in sizes.items():
            self._fill(self.tensors[role], n_in, n_out * shape.n_experts, rng)

    def _fill(self, tensor: int, n_in: int, n_rows: int, rng: np.random.Generator) -> None:
        n_distinct = min(_N_DISTINCT_ROWS, n_rows)
        values = np.ascontiguousarray(rng.standard_normal((n_distinct, n_in)) / np.sqrt(n_in), np.float32)
        row_bytes = int(call("ggml_row_size", c_size_t, [c_int, c_int64], self._type, n_in))
        rows = np.empty((n_distinct, row_bytes), np.uint8)
        types = [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]
        quantize = ("ggml_quantize_chunk", c_size_t, types)
        call(*quantize, self._type, values.ctypes.data, rows.ctypes.data, 0, n_distinct, n_in, None)
        # another order for each repetition, so that experts differ
        order = np.concatenate([rng.permutation(n_distinct) for _ in range(-(-n_rows // n_distinct))])[:n_rows]
        data = np.ascontiguousarray(rows[order])
        call(
            "ggml_backend_tensor_set",
            None,
            [c_void_p, c_void_p, c_size_t, c_size_t],
            tensor,
            data.ctypes.data,
            0,
            data.nbytes,
        )

    @property
    def up_address(self) -> int:
        """Where up's matrices are in memory."""
        return int(call("ggml_get_data", c_void_p, [c_void_p], self.tensors["up"]))

    def __enter__(self) -> Experts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the memory."""
        call("ggml_backend_buffer_free", None, [c_void_p], self._buffer)
        call("ggml_free", None, [c_void_p], self._context)


class ExpertBlock:
    """The graph for batches of `n_tokens`; `run` computes it.

    summed: as llama.cpp builds a block, from the router's logits to the sum over a token's experts and the addition of
    another value, with memory that is used again; ids then are those of random logits. biases: of which matmuls;
    with any, the activation is gpt-oss's.
    """

    def __init__(self, experts: Experts, n_tokens: int, *, summed: bool = False, biases: Sequence[str] = ()) -> None:
        shape = experts.shape
        self._context = new_context()
        new_3d = ("ggml_new_tensor_3d", c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64])
        new_2d = ("ggml_new_tensor_2d", c_void_p, [c_void_p, c_int, c_int64, c_int64])
        matmul = ("ggml_mul_mat_id", c_void_p, [c_void_p] * 4)
        self._x = call(*new_3d, self._context, _F32, shape.n_embd, 1, n_tokens)
        self.graph = call("ggml_new_graph", c_void_p, [c_void_p], self._context)
        expand = ("ggml_build_forward_expand", None, [c_void_p] * 2, self.graph)
        logits = call(*new_2d, self._context, _F32, shape.n_experts, n_tokens)
        if summed:
            self._ids, self._weights = self._router(logits, shape, n_tokens)
            call(*expand, self._weights)
        else:
            self._ids = call(*new_2d, self._context, _I32, shape.n_used, n_tokens)
            self._weights = call(*new_3d, self._context, _F32, 1, shape.n_used, n_tokens)
        up = call(*matmul, self._context, experts.tensors["up"], self._x, self._ids)
        gate = call(*matmul, self._context, experts.tensors["gate"], self._x, self._ids)
        widths = {"up": shape.n_ff, "gate": shape.n_ff, "down": shape.n_embd}
        own_biases = {role: call(*new_2d, self._context, _F32, n, shape.n_experts) for role, n in widths.items()}
        for bias in own_biases.values():  # weights, whose memory is not used again
            call("ggml_set_output", None, [c_void_p], bias)

        def biased(value: int, role: str) -> int:
            added = ("ggml_add_id", c_void_p, [c_void_p] * 4)
            return int(call(*added, self._context, value, own_biases[role], self._ids)) if role in biases else value

        gate, up = biased(gate, "gate"), biased(up, "up")
        if biases:
            oai = ("ggml_swiglu_oai", c_void_p, [*[c_void_p] * 3, c_float, c_float])
            act = call(*oai, self._context, gate, up, 1.702, 7.0)
        else:
            act = call("ggml_swiglu_split", c_void_p, [c_void_p] * 3, self._context, gate, up)
        down = biased(call(*matmul, self._context, experts.tensors["down"], act, self._ids), "down")
        self._out = call("ggml_mul", c_void_p, [c_void_p] * 3, self._context, down, self._weights)
        added = call(*new_2d, self._context, _F32, shape.n_embd, n_tokens)
        out_shape: tuple[int, ...] = (n_tokens, shape.n_used, shape.n_embd)
        if summed:
            row, view = 4 * shape.n_embd, ("ggml_view_2d", c_void_p, [c_void_p] * 2 + [c_int64] * 2 + [c_size_t] * 2)
            call(*expand, self._out)
            places = [
                call(*view, self._context, self._out, shape.n_embd, n_tokens, shape.n_used * row, place * row)
                for place in range(shape.n_used)
            ]
            for place in places:
                call(*expand, place)
            for other in [*places[1:], added]:
                places[0] = call("ggml_add", c_void_p, [c_void_p] * 3, self._context, places[0], other)
                call(*expand, places[0])
            self._out, out_shape = places[0], (n_tokens, shape.n_embd)
        call(*expand, self._out)
        buffer_type = call("ggml_backend_cpu_buffer_type", c_void_p, [])
        self._buffer = self._allocator = None
        if summed:
            self._allocator = call("ggml_gallocr_new", c_void_p, [c_void_p], buffer_type)
            assert call("ggml_gallocr_alloc_graph", c_bool, [c_void_p] * 2, self._allocator, self.graph)
        else:
            allocate = "ggml_backend_alloc_ctx_tensors_from_buft"
            self._buffer = call(allocate, c_void_p, [c_void_p, c_void_p], self._context, buffer_type)
        self.input = self._array(self._x, c_float, (n_tokens, shape.n_embd))
        self.out = self._array(self._out, c_float, out_shape)
        self._others = [self._array(own_biases[role], c_float, (shape.n_experts, widths[role])) for role in biases]
        if summed:
            self._others.append(self._array(added, c_float, (n_tokens, shape.n_embd)))
            self._others.append(self._array(logits, c_float, (n_tokens, shape.n_experts)))
        else:
            self.ids = self._array(self._ids, c_int, (n_tokens, shape.n_used))
            weights = self._array(self._weights, c_float, (n_tokens, shape.n_used))
            weights[:] = np.linspace(0.9, 0.01, weights.size, dtype=np.float32).reshape(weights.shape)

    def _router(self, logits: int, shape: BlockShape, n_tokens: int) -> tuple[int, int]:
        """Ids and weights as of Qwen3 and DeepSeek."""
        context = self._context
        reshape_2d = ("ggml_reshape_2d", c_void_p, [c_void_p, c_void_p, c_int64, c_int64])
        reshape_3d = ("ggml_reshape_3d", c_void_p, [c_void_p, c_void_p, *[c_int64] * 3])
        probs = call("ggml_soft_max", c_void_p, [c_void_p] * 2, context, logits)
        ids = call("ggml_argsort_top_k", c_void_p, [c_void_p, c_void_p, c_int], context, probs, shape.n_used)
        rows = call(*reshape_3d, context, probs, 1, shape.n_experts, n_tokens)
        weights = call("ggml_get_rows", c_void_p, [c_void_p] * 3, context, rows, ids)
        weights = call(*reshape_2d, context, weights, shape.n_used, n_tokens)
        total = call("ggml_sum_rows", c_void_p, [c_void_p] * 2, context, weights)
        total = call("ggml_clamp", c_void_p, [c_void_p] * 2 + [c_float] * 2, context, total, 6.1e-5, float("inf"))
        weights = call("ggml_div", c_void_p, [c_void_p] * 3, context, weights, total)
        weights = call(*reshape_3d, context, weights, 1, shape.n_used, n_tokens)
        return ids, call("ggml_scale", c_void_p, [c_void_p, c_void_p, c_float], context, weights, 2.5)

    def _array(self, tensor: int, kind: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        address = call("ggml_get_data", c_void_p, [c_void_p], tensor)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), shape)

    def run(self, engine: Engine, input_: NDArray[np.float32], ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Returns weighted outputs [n_tokens, n_used, n_embd] of input_ [n_tokens, n_embd], ids [n_tokens, n_used].

        A summed block's are [n_tokens, n_embd].
        """
        self.out[:] = np.nan  # first, as another tensor may have its memory
        self.input[:] = input_
        rng = np.random.default_rng(7)
        for values in self._others:
            values[:] = rng.standard_normal(values.shape)
        if self._allocator is None:
            self.ids[:] = ids
        engine.compute(self.graph)
        return self.out.copy()

    def close(self) -> None:
        """Frees the memory."""
        call("ggml_gallocr_free", None, [c_void_p], self._allocator)
        call("ggml_backend_buffer_free", None, [c_void_p], self._buffer)
        call("ggml_free", None, [c_void_p], self._context)


class DenseMatmul:
    """The graph that multiplies a matrix with columns of random values, the same ones in each graph."""

    def __init__(self, matrix: int, n_in: int, n_out: int, n_tokens: int) -> None:
        context = self._context = new_context()
        x = call("ggml_new_tensor_2d", c_void_p, [c_void_p, c_int, c_int64, c_int64], context, _F32, n_in, n_tokens)
        self.graph = call("ggml_new_graph", c_void_p, [c_void_p], context)
        product = call("ggml_mul_mat", c_void_p, [c_void_p] * 3, context, matrix, x)
        call("ggml_build_forward_expand", None, [c_void_p] * 2, self.graph, product)
        buffer_type = call("ggml_backend_cpu_buffer_type", c_void_p, [])
        allocate = "ggml_backend_alloc_ctx_tensors_from_buft"
        self._buffer = call(allocate, c_void_p, [c_void_p] * 2, context, buffer_type)
        self.out = self._values(product, (n_tokens, n_out))
        self.input = self._values(x, (n_tokens, n_in))
        self.input[:] = np.random.default_rng(0).standard_normal((n_tokens, n_in))

    def close(self) -> None:
        """Frees the memory."""
        call("ggml_backend_buffer_free", None, [c_void_p], self._buffer)
        call("ggml_free", None, [c_void_p], self._context)

    def _values(self, tensor: int, shape: tuple[int, int]) -> NDArray[np.float32]:
        data = call("ggml_get_data", c_void_p, [c_void_p], tensor)
        return np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_float)), shape)


def spread_experts(chosen: NDArray[np.int64], n_tokens: int, n_used: int) -> NDArray[np.int32]:
    """Returns ids [n_tokens, n_used] that use all of `chosen`, about equally often, and none twice for a token."""
    if not n_used <= len(chosen) <= n_tokens * n_used:
        raise ValueError(f"{n_tokens} tokens cannot use {len(chosen)} experts")
    places = np.arange(n_tokens * n_used) % len(chosen)
    return chosen[places].reshape(n_tokens, n_used).astype(np.int32)


def nmse(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Mean square of the difference over that of the reference."""
    return float(np.mean((found - reference) ** 2) / np.mean(reference**2))
