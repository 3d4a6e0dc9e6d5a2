"""What ggml's repacked layout of experts would save: the matrices of a block of experts, plain and repacked.

    python -m tests.benchmarks.repacked_slots --types q4_0,q4_k,q8_0 --threads 1,2 --out RECORD.json

Slots are one tensor [columns, rows, slots] per matrix, as the cache in RAM has them; in the repacked layout in ggml's
buffer type CPU_REPACK, where each expert is repacked into its slot by itself. A sample is the three products of a block
(gate, up, down) for so many tokens, each with `--used` experts, of which neighbouring tokens share half. Plain and
repacked take turns; a ratio is the median of those of neighbouring samples. Further figures: the time to repack an
expert next to the time to copy it, and how far the results differ. --dense measures one matrix with all tokens
instead, as those of attention are used.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np

from moeedge.bench.records import read_environment
from tests.support.stock import silence

SCHEMA = "moeedge-repacked-slots-1"
TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_nl": 20, "mxfp4": 39}
F32, I32 = 0, 26


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("size", c_size_t), ("memory", c_void_p), ("no_alloc", c_bool))


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (c_void_p, [InitParams]),
    "ggml_new_tensor_3d": (c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p] * 3),
    "ggml_mul_mat_id": (c_void_p, [c_void_p] * 4),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p] * 2),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, [c_void_p] * 2),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_alloc": (c_int, [c_void_p] * 3),
    "ggml_backend_buft_alloc_buffer": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_buft_name": (c_char_p, [c_void_p]),
    "ggml_backend_buffer_get_base": (c_void_p, [c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_dev_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_dev_init": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_dev_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_dev_supports_op": (c_bool, [c_void_p] * 2),
    "ggml_backend_graph_compute": (c_int, [c_void_p] * 2),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_free": (None, [c_void_p]),
}


def ggml(name: str, *arguments: Any) -> Any:
    """Calls a function of ggml."""
    function = getattr(lib._lib, name)
    function.restype, function.argtypes = SIGNATURES[name]
    return function(*arguments)


@dataclass(frozen=True)
class Shape:
    """Sizes of a block of experts."""

    n_embd: int
    n_ff: int
    n_slots: int  # 0: dense matrices


class Cpu:
    """The CPU's backend and its buffer types."""

    def __init__(self, n_threads: int) -> None:
        self.device = ggml("ggml_backend_dev_by_name", b"CPU")
        self.backend = ggml("ggml_backend_dev_init", self.device, None)
        registry = ggml("ggml_backend_dev_backend_reg", self.device)
        address = ggml("ggml_backend_reg_get_proc_address", registry, b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, c_void_p, c_int)(address)(self.backend, n_threads)
        address = ggml("ggml_backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)(self.device)
        names: dict[bytes, int] = {}
        i = 0
        while extra[i]:
            names[ggml("ggml_backend_buft_name", extra[i])] = extra[i] or 0
            i += 1
        self.plain = ggml("ggml_backend_dev_buffer_type", self.device)
        self.repacked = names.get(b"CPU_REPACK")


class Slots:
    """The slots of a block's three matrices in one layout."""

    def __init__(self, cpu: Cpu, buft: int, type_: int, shape: Shape, experts: list[np.ndarray]) -> None:
        self.shape = shape
        self.context = ggml("ggml_init", InitParams(1 << 16, None, True))
        sizes = [(shape.n_embd, shape.n_ff), (shape.n_embd, shape.n_ff), (shape.n_ff, shape.n_embd)]
        self.pools = []
        self.buffers = []
        self._heads = []  # of one expert, moved from slot to slot
        for size, data in zip(sizes, experts, strict=True):
            pool = ggml("ggml_new_tensor_3d", self.context, type_, *size, max(1, shape.n_slots))
            buffer = ggml("ggml_backend_buft_alloc_buffer", buft, ggml("ggml_nbytes", pool))
            base = ggml("ggml_backend_buffer_get_base", buffer)
            head = ggml("ggml_new_tensor_2d", self.context, type_, *size)
            for tensor in (pool, head):
                assert ggml("ggml_backend_tensor_alloc", buffer, tensor, base) == 0
            self._data_field = _data_offset(head, base)
            self._heads.append((head, base, data))
            self.pools.append(pool)
            self.buffers.append(buffer)
        for slot in range(max(1, shape.n_slots)):
            self.load(slot)

    def load(self, slot: int) -> None:
        """Writes the expert to the slot."""
        for head, base, data in self._heads:
            ctypes.c_void_p.from_address(head + self._data_field).value = base + slot * data.nbytes
            ggml("ggml_backend_tensor_set", head, data.ctypes.data, 0, data.nbytes)

    def close(self) -> None:
        """Frees the slots."""
        for buffer in self.buffers:
            ggml("ggml_backend_buffer_free", buffer)
        ggml("ggml_free", self.context)


def _data_offset(tensor: int, base: int) -> int:
    """Where struct ggml_tensor has its pointer to the data."""
    for offset in range(8, 400, 8):
        if ctypes.c_void_p.from_address(tensor + offset).value == base:
            return offset
    raise AssertionError("no pointer to the data")


class Block:
    """The three products of a block for a number of pairs, from given slots."""

    def __init__(self, cpu: Cpu, slots: Slots, n_pairs: int) -> None:
        shape = slots.shape
        self.cpu = cpu
        self.context = ggml("ggml_init", InitParams(1 << 20, None, True))
        columns = (1, n_pairs) if shape.n_slots else (n_pairs, 1)
        self.inputs = [ggml("ggml_new_tensor_3d", self.context, F32, n, *columns) for n in (shape.n_embd, shape.n_ff)]
        self.ids = ggml("ggml_new_tensor_2d", self.context, I32, 1, n_pairs)
        self.graph = ggml("ggml_new_graph", self.context)
        self.outputs = []
        for pool, source in zip(slots.pools, (0, 0, 1), strict=True):
            if shape.n_slots:
                out = ggml("ggml_mul_mat_id", self.context, pool, self.inputs[source], self.ids)
            else:
                out = ggml("ggml_mul_mat", self.context, pool, self.inputs[source])
            assert ggml("ggml_backend_dev_supports_op", cpu.device, out)
            ggml("ggml_build_forward_expand", self.graph, out)
            self.outputs.append(out)
        self.buffer = ggml("ggml_backend_alloc_ctx_tensors", self.context, cpu.backend)
        rng = np.random.default_rng(2)
        for tensor, n in zip(self.inputs, (shape.n_embd, shape.n_ff), strict=True):
            self._set(tensor, rng.standard_normal((n_pairs, n), np.float32))

    def _set(self, tensor: int, values: np.ndarray) -> None:
        ggml("ggml_backend_tensor_set", tensor, values.ctypes.data, 0, values.nbytes)

    def run(self, ids: np.ndarray) -> float:
        """Seconds to compute it with these slots int32 [n_pairs]."""
        self._set(self.ids, ids)
        start_s = time.perf_counter()
        assert ggml("ggml_backend_graph_compute", self.cpu.backend, self.graph) == 0
        return time.perf_counter() - start_s

    def result(self, shape: Shape, n_pairs: int) -> np.ndarray:
        """The down product of the last run, float32 [n_pairs, n_embd]."""
        values = np.empty((n_pairs, shape.n_embd), np.float32)
        ggml("ggml_backend_tensor_get", self.outputs[2], values.ctypes.data, 0, values.nbytes)
        return values

    def close(self) -> None:
        """Frees it."""
        ggml("ggml_backend_buffer_free", self.buffer)
        ggml("ggml_free", self.context)


@dataclass(frozen=True)
class Row:
    """Plain against repacked, all samples in seconds."""

    type: str
    n_threads: int
    n_tokens: int
    n_distinct: int  # experts of a sample
    ratio: float  # median of plain / repacked: above 1, the repacked layout is faster
    relative_difference: float  # of the results, of their largest value
    plain_s: list[float]
    repacked_s: list[float]


@dataclass(frozen=True)
class LoadRow:
    """What it takes to bring an expert that was read into its slot."""

    type: str
    expert_bytes: int
    copy_s: list[float]
    repack_s: list[float]


def _ids(rng: np.random.Generator, shape: Shape, n_tokens: int, n_used: int) -> np.ndarray:
    """Slots int32 [n_tokens * n_used]: each token shares half of its experts with its predecessor."""
    rows = [rng.permutation(shape.n_slots)[:n_used]]
    while len(rows) < n_tokens:
        kept = rng.permutation(rows[-1])[: n_used // 2]
        others = np.setdiff1d(np.arange(shape.n_slots), kept)
        rows.append(np.concatenate([kept, rng.permutation(others)[: n_used - kept.size]]))
    return np.concatenate(rows).astype(np.int32)


def _quantized(type_: int, columns: int, rows: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    out = np.empty(values.nbytes, np.uint8)
    size = ggml("ggml_quantize_chunk", type_, values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    return out[:size].copy()


def measure(name: str, n_threads: int, options: argparse.Namespace, shape: Shape) -> tuple[list[Row], LoadRow | None]:
    """All rows of a type with so many threads; none where ggml has no repacked layout for it here."""
    cpu = Cpu(n_threads)
    if not cpu.repacked:
        return [], None
    type_ = TYPES[name]
    seeds_and_sizes = [(shape.n_embd, shape.n_ff), (shape.n_embd, shape.n_ff), (shape.n_ff, shape.n_embd)]
    experts = [_quantized(type_, *size, seed) for seed, size in enumerate(seeds_and_sizes)]
    plain = Slots(cpu, cpu.plain, type_, shape, experts)
    if not _has_layout(cpu, type_, shape):
        plain.close()
        return [], None
    repacked = Slots(cpu, cpu.repacked, type_, shape, experts)
    rng = np.random.default_rng(1)
    rows = []
    for n_tokens in options.tokens:
        n_pairs = n_tokens * (options.used if shape.n_slots else 1)
        blocks = [Block(cpu, slots, n_pairs) for slots in (plain, repacked)]
        samples: list[list[float]] = [[], []]
        for round_ in range(options.rounds + 2):
            ids = _ids(rng, shape, n_tokens, options.used) if shape.n_slots else np.zeros(n_pairs, np.int32)
            for i in (0, 1) if round_ % 2 else (1, 0):
                seconds = blocks[i].run(ids)
                if round_ >= 2:
                    samples[i].append(seconds)
        first, second = (block.result(shape, n_pairs) for block in blocks)
        difference = float(np.abs(first - second).max() / np.abs(first).max())
        ratio = statistics.median(a / b for a, b in zip(*samples, strict=True))
        rows.append(Row(name, n_threads, n_tokens, len(set(ids.tolist())), ratio, difference, *samples))
        for block in blocks:
            block.close()
    loads = LoadRow(name, sum(data.nbytes for data in experts), *_load_times(plain, repacked, options.rounds))
    plain.close()
    repacked.close()
    return rows, loads


def _has_layout(cpu: Cpu, type_: int, shape: Shape) -> bool:
    """True if ggml repacks such matrices on this CPU: then the tensor's `extra` names the kernels."""
    context = ggml("ggml_init", InitParams(1 << 16, None, True))
    tensor = ggml("ggml_new_tensor_2d", context, type_, shape.n_embd, shape.n_ff)
    buffer = ggml("ggml_backend_buft_alloc_buffer", cpu.repacked, ggml("ggml_nbytes", tensor))
    base = ggml("ggml_backend_buffer_get_base", buffer)
    ggml("ggml_backend_tensor_alloc", buffer, tensor, base)
    extra = _data_offset(tensor, base) + 8 + 64  # after data and name
    found = ctypes.c_void_p.from_address(tensor + extra).value is not None
    ggml("ggml_backend_buffer_free", buffer)
    ggml("ggml_free", context)
    return found


def _load_times(plain: Slots, repacked: Slots, rounds: int) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds):
        for slots, found in zip((plain, repacked), times, strict=True):
            start_s = time.perf_counter()
            slots.load(round_ % max(1, plain.shape.n_slots))
            found.append(time.perf_counter() - start_s)
    return times


def main() -> None:
    """Measures and prints a line per row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="q4_0,q4_k,q8_0,iq4_nl,mxfp4")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", default="1,5,64,512")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--used", type=int, default=8, help="experts per token")
    parser.add_argument("--embd", type=int, default=2048)
    parser.add_argument("--ff", type=int, default=768)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    silence()
    options.tokens = [int(n) for n in options.tokens.split(",")]
    shape = Shape(options.embd, options.ff, 0 if options.dense else options.slots)
    rows: list[Row] = []
    loads: list[LoadRow] = []
    for name in options.types.split(","):
        for n_threads in options.threads.split(","):
            found, load = measure(name, int(n_threads), options, shape)
            if load is None:
                print(f"{name}: no repacked layout on this CPU")
                break
            for row in found:
                print(
                    f"{name} threads {row.n_threads} tokens {row.n_tokens:>3} experts {row.n_distinct:>3}: plain"
                    f" {statistics.median(row.plain_s) * 1e3:8.2f} ms, repacked"
                    f" {statistics.median(row.repacked_s) * 1e3:8.2f} ms, ratio {row.ratio:.3f},"
                    f" difference {row.relative_difference:.1e}",
                    flush=True,
                )
            print(
                f"{name} an expert of {load.expert_bytes / 1e6:.2f} MB: copied in"
                f" {statistics.median(load.copy_s) * 1e3:.2f} ms, repacked in"
                f" {statistics.median(load.repack_s) * 1e3:.2f} ms"
            )
            rows += found
            loads.append(load)
    if options.out:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_environment()),
            "shape": asdict(shape),
            "rows": [asdict(row) for row in rows],
            "loads": [asdict(load) for load in loads],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
