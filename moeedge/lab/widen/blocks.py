"""Rows of quantised blocks moved to a wide tensor: bytes are copied if entire blocks move, else requantised.

A block of zero bytes is a block of zeros in every type that this module writes, because its scale is zero.
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

from moeedge.lab.widen.maps import Map, blocks
from moeedge.llama import library

Bytes = NDArray[np.uint8]


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
