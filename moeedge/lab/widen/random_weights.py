"""Random weights of any ggml type: random codes under scales that give the wanted standard deviation.

The factor between scale and standard deviation is measured, by dequantizing a sample, so that one way serves all types.
Signs of scales are random, and minimums follow scales, so that weights have a mean of 0: a common offset would grow
from layer to layer. Most tensors are cut from pools of blocks, each time from another place, to be as fast as a disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GgmlType

from moeedge.lab.widen.maps import Bytes

_POOL_BYTES = 4 * 2**20  # stays in caches, which makes writing it twice as fast as one of 16 MiB
_QUIET = 0.01  # of the spread of other rows: logits near 0, which no greedy answer chooses

# byte offsets of a block's float16 fields, and each field as a multiple of the scale: the offset that makes the mean 0
_FIELDS: dict[GgmlType, dict[int, float]] = {
    **{GgmlType[name]: {0: 1.0} for name in ("Q4_0", "Q5_0", "Q8_0", "IQ1_S", "IQ4_NL", "IQ4_XS")},
    **{GgmlType[name]: {0: 1.0} for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
    GgmlType.Q4_1: {0: 1.0, 2: -7.5},
    GgmlType.Q5_1: {0: 1.0, 2: -15.5},
    GgmlType.Q2_K: {80: 1.0, 82: 1.5},
    GgmlType.Q3_K: {108: 1.0},
    GgmlType.Q4_K: {0: 1.0, 2: 7.5},
    GgmlType.Q5_K: {0: 1.0, 2: 15.5},
    GgmlType.Q6_K: {208: 1.0},
}
_FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
TYPES = frozenset({*_FIELDS, *_FLOATS, GgmlType.MXFP4})


@dataclass(frozen=True)
class RandomTensor:
    """One tensor of a file with random weights."""

    name: str
    shape: tuple[int, ...]  # the slowest dimension first
    type: GgmlType
    std: float
    mean: float = 0.0  # of types without blocks
    quiet: tuple[int, ...] = ()  # rows with nearly no spread: end tokens in the output matrix

    @property
    def n_bytes(self) -> int:
        """Bytes without padding."""
        block, n_bytes = GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape)) // int(block) * int(n_bytes)


class RandomWeights:
    """Draws the weights of one file."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.SFC64(seed))
        self._pools: dict[tuple[GgmlType, float, float], Bytes] = {}

    def chunks(self, tensor: RandomTensor) -> Iterator[Bytes]:
        """Yields the tensor's bytes in groups: uint8, one-dimensional."""
        if tensor.name in ("token_embd.weight", "output.weight") or tensor.type == GgmlType.F32:
            yield from self._rows(tensor)  # equal rows would be equal tokens
            return
        pool, left = self._pool(tensor), tensor.n_bytes
        size = GGML_QUANT_SIZES[tensor.type][1]
        while left:
            start = int(self._rng.integers(len(pool) // size)) * size
            chunk = pool[start : start + left]
            yield chunk
            left -= len(chunk)

    def _rows(self, tensor: RandomTensor) -> Iterator[Bytes]:
        block, size = GGML_QUANT_SIZES[tensor.type]
        per_row = tensor.shape[-1] // block
        n_rows = int(np.prod(tensor.shape[:-1]))
        group = max(1, _POOL_BYTES // (per_row * size))
        for first in range(0, n_rows, group):
            n = min(group, n_rows - first)
            rows = draw(self._rng, tensor.type, n * per_row, tensor.std, tensor.mean).reshape(n, -1)
            for row in tensor.quiet:
                if first <= row < first + n:
                    rows[row - first] = draw(self._rng, tensor.type, per_row, tensor.std * _QUIET).reshape(-1)
            yield rows.reshape(-1)

    def _pool(self, tensor: RandomTensor) -> Bytes:
        """Returns blocks of the tensor's kind, more than it has or as many as a pool has."""
        key = (tensor.type, tensor.std, tensor.mean)
        n_bytes = min(_POOL_BYTES, 2 * tensor.n_bytes)
        if key not in self._pools or len(self._pools[key]) < n_bytes // 2:
            n_blocks = n_bytes // GGML_QUANT_SIZES[tensor.type][1]
            self._pools[key] = draw(self._rng, tensor.type, n_blocks, tensor.std, tensor.mean).reshape(-1)
        return self._pools[key]


def draw(rng: np.random.Generator, type_: GgmlType, n_blocks: int, std: float, mean: float = 0.0) -> Bytes:
    """Returns random blocks, of types without blocks values: uint8 [n_blocks, bytes of a block]."""
    if type_ not in _FLOATS:
        blocks = _codes(rng, type_, n_blocks)
        spread = rng.random(n_blocks, np.float32) + np.float32(0.5)  # scales differ from block to block
        spread *= std / _unit_std(type_) / np.sqrt(13 / 12)
        _set_scales(rng, blocks, type_, spread)
        return blocks
    if type_ == GgmlType.F32:
        values = rng.standard_normal(n_blocks, np.float32) * np.float32(std) + np.float32(mean)
        return _bytes(values)
    values = (rng.random(n_blocks, np.float32) - np.float32(0.5)) * np.float32(12**0.5 * std) + np.float32(mean)
    if type_ == GgmlType.F16:
        return _bytes(values.astype(np.float16))
    return _bytes((values.view(np.uint32) >> 16).astype(np.uint16))


def _bytes(values: np.ndarray[Any, Any]) -> Bytes:
    return values.view(np.uint8).reshape(len(values), -1)


def _codes(rng: np.random.Generator, type_: GgmlType, n_blocks: int) -> Bytes:
    """Returns blocks of random bytes whose minimums are those of the scales next to them."""
    size = GGML_QUANT_SIZES[type_][1]
    drawn = rng.integers(0, 2**64, -(-n_blocks * size // 8), np.uint64)
    blocks: Bytes = drawn.view(np.uint8)[: n_blocks * size].reshape(n_blocks, size)
    if type_ == GgmlType.Q2_K:  # 16 bytes of scale and minimum
        blocks[:, :16] = (blocks[:, :16] & 15) * np.uint8(17)
    if type_ in (GgmlType.Q4_K, GgmlType.Q5_K):  # 8 scales and 8 minimums of 6 bits
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * np.uint8(17)
    return blocks


def _set_scales(rng: np.random.Generator, blocks: Bytes, type_: GgmlType, scales: np.ndarray[Any, Any]) -> None:
    """Writes the blocks' scales, [blocks], above 0."""
    if type_ == GgmlType.MXFP4:  # a power of two: one of the nearest, so that the mean square is that of the scale
        exponents = np.floor(np.log2(scales))
        chance = (np.square(scales / np.exp2(exponents)) - 1) / 3
        blocks[:, 0] = 127 + exponents + (rng.random(len(scales), np.float32) < chance)
        return
    signed = scales * (2 * rng.integers(0, 2, len(scales), np.int8) - 1)
    for offset, factor in _FIELDS[type_].items():
        blocks[:, offset : offset + 2] = (signed * factor).astype("<f2").view(np.uint8).reshape(-1, 2)


@lru_cache
def _unit_std(type_: GgmlType) -> float:
    """Returns the root mean square of random blocks with a scale of 1."""
    rng = np.random.default_rng(0)
    blocks = _codes(rng, type_, 4096)
    _set_scales(rng, blocks, type_, np.ones(len(blocks), np.float32))
    return float(np.sqrt(np.mean(np.square(gguf.quants.dequantize(blocks, type_), dtype=np.float64))))
