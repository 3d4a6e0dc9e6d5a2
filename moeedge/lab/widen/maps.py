"""Maps from wide dimensions to the source: integer arrays with a source index per element, -1 for a zero.

The residual stream is repeated, and tensors that read it use the first repetition only. Repetitions keep the mean
square that normalisation divides by; the remaining zeros lower it, which weights and epsilon compensate.

    norm(x)_i = x_i * w_i / sqrt(sum(x^2) / n + eps)

With r repetitions of n elements in N, the mean square is rn/N times the source's; w times sqrt(rn/N) and eps times rn/N
give the same result. A head's query and key are also normalised, over the head size, with the same eps: r is chosen so
that both factors agree as closely as integers allow.

Rotary positions rotate element i of a head's first half with element i of its second half by the angle
p * b^(-2i/d) for head size d. In a head of size D the base b^(D/d) keeps the angles; if that exceeds float32, pairs
are placed s apart and the base is b^(D/(ds)).

Rows of quantised blocks are moved by such maps: bytes are copied if entire blocks move, else requantised. A block of
zero bytes is a block of zeros in every type that is written, because its scale is zero.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray

from moeedge.llama import library

Map = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_MAX_BASE = 1e30  # below float32's 3.4e38


def corner(n: int, wide: int) -> Map:
    """Returns [wide]: the source, then zeros."""
    return repeated(n, wide, 1)


def repeated(n: int, wide: int, times: int) -> Map:
    """Returns [wide]: the source repeated `times`, then zeros."""
    places = np.full(wide, -1, np.int64)
    places[: n * times] = np.tile(np.arange(n), times)
    return places


def product(outer: Map, inner: Map, n_inner: int) -> Map:
    """Returns [len(outer) * len(inner)]: groups mapped by `outer`, elements by `inner`; n_inner: source group size."""
    places = outer[:, None] * n_inner + inner[None, :]
    places[(outer[:, None] < 0) | (inner[None, :] < 0)] = -1
    return places.reshape(-1)


def blocks(places: Map, size: int) -> Map | None:
    """Returns [len(places) / size]: the map of blocks of `size`, or None if it splits or joins blocks."""
    if len(places) % size:
        return None
    table = places.reshape(-1, size)
    first = table[:, 0]
    steps = np.where(first[:, None] < 0, 0, np.arange(size))
    if not np.array_equal(table, first[:, None] + steps) or np.any((first >= 0) & (first % size != 0)):
        return None
    return np.where(first < 0, -1, first // size)


@dataclass(frozen=True)
class GroupedHeads:
    """Heads that share KV heads in equal groups, placed in a model with more heads, KV heads, or both.

    If the wide model's groups are smaller than the source's, a KV head is copied for each part of its group.
    """

    heads: int
    heads_kv: int
    wide_heads: int
    wide_heads_kv: int

    def fits(self) -> bool:
        """Whether the wide model has room for the source's heads."""
        return self.wide_heads % self.wide_heads_kv == 0 and self.heads_kv * self._copies <= self.wide_heads_kv

    @property
    def _copies(self) -> int:
        """Wide KV heads per KV head of the source."""
        return -(-(self.heads // self.heads_kv) // (self.wide_heads // self.wide_heads_kv))

    def kv(self) -> Map:
        """Returns [wide_heads_kv]: the source's KV head."""
        source = np.arange(self.wide_heads_kv) // self._copies
        return np.where(source < self.heads_kv, source, -1)

    def queries(self) -> Map:
        """Returns [wide_heads]: the source's head; its KV head is the one that `kv` places in this head's group."""
        group, wide_group = self.heads // self.heads_kv, self.wide_heads // self.wide_heads_kv
        wide_kv, member = np.divmod(np.arange(self.wide_heads), wide_group)
        source_kv, part = np.divmod(wide_kv, self._copies)
        member = part * wide_group + member
        return np.where((source_kv < self.heads_kv) & (member < group), source_kv * group + member, -1)


@dataclass(frozen=True)
class Rotary:
    """Elements of a query or key head of size `head_dim` in a head of size `wide`."""

    head_dim: int
    wide: int
    base: float

    @property
    def _stride(self) -> int:
        """Distance between pairs: 1 unless the base would become too large."""
        ratio = self.wide // self.head_dim
        divisors = (s for s in range(1, ratio + 1) if ratio % s == 0)
        return next(s for s in divisors if self.base ** (ratio / s) <= _MAX_BASE or s == ratio)

    @property
    def wide_base(self) -> float:
        """Base for the wide model's metadata that keeps llama.cpp's float32 factor between pairs."""
        if self.wide == self.head_dim:
            return self.base
        factor = float(np.float32(np.float32(self.base) ** (-2.0 / self.head_dim)))
        return float(factor ** (-self.wide / (2 * self._stride)))

    def places(self) -> Map:
        """Returns [wide]: the source's element; halves stay halves."""
        half, wide_half = self.head_dim // 2, self.wide // 2
        first = np.full(wide_half, -1, np.int64)
        first[: half * self._stride : self._stride] = np.arange(half)
        return np.concatenate([first, np.where(first < 0, -1, first + half)])


def repetitions(embd: int, wide_embd: int, head_dim: int, wide_head_dim: int) -> int:
    """Returns r of the module's docstring: how often the residual stream is repeated."""
    wanted = round(wide_embd * head_dim / (embd * wide_head_dim))
    return max(1, min(wanted, wide_embd // embd))


def row_bytes(type_: GgmlType, n: int) -> int:
    """Returns the bytes of a row of `n` weights."""
    block, size = gguf.GGML_QUANT_SIZES[type_]
    return int(n // block * size)


@dataclass(frozen=True)
class RowMover:
    """Turns rows of a tensor into rows of its wide form.

    columns: int64 [wide columns], the source's column or -1 for a zero. scale: factor of all values.
    """

    source_type: GgmlType
    type: GgmlType
    columns: Map
    scale: float = 1.0

    @cached_property
    def copies(self) -> bool:
        """Whether bytes are copied, without rounding."""
        return self.type == self.source_type and self.scale == 1.0 and self._block_map is not None

    @property
    def n_bytes(self) -> int:
        """Bytes of a wide row."""
        return row_bytes(self.type, len(self.columns))

    @cached_property
    def _block_map(self) -> Map | None:
        return blocks(self.columns, gguf.GGML_QUANT_SIZES[self.type][0])

    def move(self, source: Bytes) -> Bytes:
        """uint8 [rows, bytes of a source row] -> uint8 [rows, n_bytes]."""
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        out = np.zeros((len(source), len(self.columns) // block, size), np.uint8)
        block_map = self._block_map if self.copies else None
        if block_map is not None:
            live = np.flatnonzero(block_map >= 0)
            out[:, live] = source.reshape(len(source), -1, size)[:, block_map[live]]
            return out.reshape(len(source), -1)
        # only blocks with a non-zero are quantised
        table = self.columns.reshape(-1, block)
        live = np.flatnonzero((table >= 0).any(axis=1))
        places = table[live].reshape(-1)
        narrow = gguf.quants.dequantize(source, self.source_type).astype(np.float32, copy=False)
        values = narrow[:, np.maximum(places, 0)] * np.where(places >= 0, np.float32(self.scale), np.float32(0))
        out[:, live] = quantize_rows(values, self.type).reshape(len(source), len(live), size)
        return out.reshape(len(source), -1)


def quantize_rows(values: NDArray[np.float32], type_: GgmlType) -> Bytes:
    """Quantises float32 [rows, n], n a multiple of the type's block, to uint8 [rows, row_bytes] with llama.cpp."""
    values = np.ascontiguousarray(values, np.float32)
    n_rows, n = values.shape
    out = np.empty((n_rows, row_bytes(type_, n)), np.uint8)
    if not values.size:  # the quantizer would divide by zero columns
        return out
    if type_ == GgmlType.F32:  # not supported by the quantizer
        return values.view(np.uint8).reshape(out.shape)
    written = _quantizer()(int(type_), values.ctypes.data, out.ctypes.data, 0, n_rows, n, None)
    if written != out.nbytes:
        raise RuntimeError(f"the quantizer wrote {written} bytes of {type_.name}, not {out.nbytes}")
    return out


@cache
def _quantizer() -> Any:
    """ggml_quantize_chunk(type, source, destination, first, rows, columns, importance) -> bytes written."""
    c_int64, c_void_p = ctypes.c_int64, ctypes.c_void_p
    return library.ggml_function(
        "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p
    )
