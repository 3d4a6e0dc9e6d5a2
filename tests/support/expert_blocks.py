"""A MoE block's experts as a ggml graph (up, gate, SwiGLU, down), computed by ggml's CPU backend or by ours."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from moeedge.llama import library
from tests.support.raw_ggml import F32, I32, Graph, Queue, find_device, ggml

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
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return 3 * self.n_embd * self.n_ff // per_block * block_bytes


def _proc(device: int, name: str, prototype: Any) -> Any:
    """A function that the device's backend offers by name."""
    registry = ggml("ggml_backend_dev_backend_reg", device)
    return prototype(ggml("ggml_backend_reg_get_proc_address", registry, name.encode()))


def _repacked_buffer_type() -> int | None:
    device = find_device("CPU")
    found = _proc(device, "ggml_backend_dev_get_extra_bufts", CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p))(device)
    for index in range(16):
        if not found or not found[index]:
            return None
        if ggml("ggml_backend_buft_name", found[index], result=c_char_p) == b"CPU_REPACK":
            return int(found[index])
    return None


class Engine(Queue):
    """A backend instance: "CPU" is ggml's, "MOEEDGE" ours."""

    def __init__(self, name: str, n_threads: int) -> None:
        library.start()
        super().__init__(name)
        _proc(self.device, "ggml_backend_set_n_threads", CFUNCTYPE(None, c_void_p, c_int))(self.handle, n_threads)

    def compute(self, graph: int) -> int:
        """Computes a graph; raises RuntimeError if it fails."""
        status = ggml("ggml_backend_graph_compute", self.handle, graph, result=c_int)
        if status != 0:
            raise RuntimeError(f"ggml's status is {status}")
        return int(status)


class Experts(Graph):
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
        super().__init__()
        self.shape = shape
        self._type = int(gguf.GGMLQuantizationType[shape.type])
        rng = np.random.default_rng(seed)
        wide, narrow = (shape.n_embd, shape.n_ff), (shape.n_ff, shape.n_embd)
        sizes = {role: narrow if role == "down" else wide for role in roles}
        self.tensors = {role: self.tensor(self._type, *size, shape.n_experts) for role, size in sizes.items()}
        self.allocate(_repacked_buffer_type() if repacked else None)
        for role, (n_in, n_out) in sizes.items():
            self._fill(self.tensors[role], n_in, n_out * shape.n_experts, rng)

    def _fill(self, tensor: int, n_in: int, n_rows: int, rng: np.random.Generator) -> None:
        n_distinct = min(_N_DISTINCT_ROWS, n_rows)
        values = np.ascontiguousarray(rng.standard_normal((n_distinct, n_in)) / np.sqrt(n_in), np.float32)
        kind, sizes = c_int(self._type), (c_int64(0), c_int64(n_distinct), c_int64(n_in))
        rows = np.empty((n_distinct, ggml("ggml_row_size", kind, c_int64(n_in), result=c_size_t)), np.uint8)
        addresses = (values.ctypes.data, rows.ctypes.data)
        ggml("ggml_quantize_chunk", kind, *addresses, *sizes, None, result=c_size_t)
        # another order for each repetition, so that experts differ
        order = np.concatenate([rng.permutation(n_distinct) for _ in range(-(-n_rows // n_distinct))])[:n_rows]
        data = np.ascontiguousarray(rows[order])
        ggml("ggml_backend_tensor_set", tensor, data.ctypes.data, c_size_t(0), c_size_t(data.nbytes), result=None)

    @property
    def up_address(self) -> int:
        """Where up's matrices are in memory."""
        return int(ggml("ggml_get_data", self.tensors["up"]))

    def __enter__(self) -> Experts:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class ExpertBlock(Graph):
    """The graph for batches of `n_tokens`; `run` computes it.

    summed: as llama.cpp builds a block, from the router's logits to the sum over a token's experts and the addition of
    another value, with memory that is used again; ids then are those of random logits. biases: of which matmuls;
    with any, the activation is gpt-oss's.
    """

    def __init__(self, experts: Experts, n_tokens: int, *, summed: bool = False, biases: Sequence[str] = ()) -> None:
        super().__init__()
        shape = experts.shape
        x, logits = self.tensor(F32, shape.n_embd, 1, n_tokens), self.tensor(F32, shape.n_experts, n_tokens)
        if summed:
            ids, weights = self._router(logits, shape, n_tokens)
            self.expand(weights)
        else:
            ids, weights = self.tensor(I32, shape.n_used, n_tokens), self.tensor(F32, 1, shape.n_used, n_tokens)
        widths = {"up": shape.n_ff, "gate": shape.n_ff, "down": shape.n_embd}
        own_biases = {role: self.tensor(F32, n, shape.n_experts) for role, n in widths.items()}
        for bias in own_biases.values():  # weights, whose memory is not used again
            ggml("ggml_set_output", bias, result=None)

        def multiplied(role: str, values: int) -> int:
            product = self.op("mul_mat_id", experts.tensors[role], values, ids)
            return self.op("add_id", product, own_biases[role], ids) if role in biases else product

        up, gate = multiplied("up", x), multiplied("gate", x)
        if biases:
            act = self.op("swiglu_oai", gate, up, c_float(1.702), c_float(7.0))
        else:
            act = self.op("swiglu_split", gate, up)
        out = self.op("mul", multiplied("down", act), weights)
        added = self.tensor(F32, shape.n_embd, n_tokens)
        out_shape: tuple[int, ...] = (n_tokens, shape.n_used, shape.n_embd)
        if summed:
            out, out_shape = self._summed(out, added, shape, n_tokens), (n_tokens, shape.n_embd)
        self.expand(out)
        self._allocator = None
        if summed:
            self._allocator = ggml("ggml_gallocr_new", ggml("ggml_backend_cpu_buffer_type"))
            assert ggml("ggml_gallocr_alloc_graph", self._allocator, self.graph, result=c_bool)
        else:
            self.allocate()
        self.input = self.array(x, c_float, n_tokens, shape.n_embd)
        self.out = self.array(out, c_float, *out_shape)
        self._others = [self.array(own_biases[role], c_float, shape.n_experts, widths[role]) for role in biases]
        if summed:
            self._others.append(self.array(added, c_float, n_tokens, shape.n_embd))
            self._others.append(self.array(logits, c_float, n_tokens, shape.n_experts))
        else:
            self.ids = self.array(ids, c_int, n_tokens, shape.n_used)
            factors = self.array(weights, c_float, n_tokens, shape.n_used)
            factors[:] = np.linspace(0.9, 0.01, factors.size, dtype=np.float32).reshape(factors.shape)

    def _router(self, logits: int, shape: BlockShape, n_tokens: int) -> tuple[int, int]:
        """Ids and weights as of Qwen3 and DeepSeek."""
        by_token, alone = (c_int64(shape.n_used), c_int64(n_tokens)), c_int64(1)
        probs = self.op("soft_max", logits)
        ids = self.op("argsort_top_k", probs, c_int(shape.n_used))
        rows = self.op("reshape_3d", probs, alone, c_int64(shape.n_experts), c_int64(n_tokens))
        weights = self.op("reshape_2d", self.op("get_rows", rows, ids), *by_token)
        total = self.op("clamp", self.op("sum_rows", weights), c_float(6.1e-5), c_float(float("inf")))
        weights = self.op("reshape_3d", self.op("div", weights, total), alone, *by_token)
        return ids, self.op("scale", weights, c_float(2.5))

    def _summed(self, out: int, added: int, shape: BlockShape, n_tokens: int) -> int:
        """The sum over a token's experts and of `added`, in the order of llama.cpp's nodes."""
        row = 4 * shape.n_embd
        self.expand(out)
        sizes = (c_int64(shape.n_embd), c_int64(n_tokens), c_size_t(shape.n_used * row))
        places = [self.op("view_2d", out, *sizes, c_size_t(place * row)) for place in range(shape.n_used)]
        for place in places:
            self.expand(place)
        total = places[0]
        for other in (*places[1:], added):
            total = self.expand(self.op("add", total, other))
        return total

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
        ggml("ggml_gallocr_free", self._allocator, result=None)
        super().close()


class DenseMatmul(Graph):
    """The graph that multiplies a matrix with columns of random values, the same ones in each graph."""

    def __init__(self, matrix: int, n_in: int, n_out: int, n_tokens: int) -> None:
        super().__init__()
        x = self.tensor(F32, n_in, n_tokens)
        product = self.expand(self.op("mul_mat", matrix, x))
        self.allocate()
        self.out, self.input = self.array(product, c_float, n_tokens, n_out), self.array(x, c_float, n_tokens, n_in)
        self.input[:] = np.random.default_rng(0).standard_normal((n_tokens, n_in))


def spread_experts(chosen: NDArray[np.int64], n_tokens: int, n_used: int) -> NDArray[np.int32]:
    """Returns ids [n_tokens, n_used] that use all of `chosen`, about equally often, and none twice for a token."""
    if not n_used <= len(chosen) <= n_tokens * n_used:
        raise ValueError(f"{n_tokens} tokens cannot use {len(chosen)} experts")
    places = np.arange(n_tokens * n_used) % len(chosen)
    return chosen[places].reshape(n_tokens, n_used).astype(np.int32)
