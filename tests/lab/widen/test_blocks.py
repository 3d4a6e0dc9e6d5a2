"""Rows of blocks against values: what the gguf package reads from the moved rows is what it reads from the source's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from hypothesis import given, settings
from hypothesis import strategies as st

from moeedge.lab.widen.maps import RowMover, quantize_rows, row_bytes

COPIED = (GgmlType.Q4_0, GgmlType.Q8_0, GgmlType.Q4_K, GgmlType.F16, GgmlType.F32)
# half a step of each type's grid, as a share of a block's largest value, with what the scale's own rounding adds
STEPS = {GgmlType.Q4_0: 0.13, GgmlType.Q8_0: 0.005, GgmlType.Q4_K: 0.12, GgmlType.Q5_0: 0.07}


def rows_of(type_: GgmlType, n_rows: int, n: int, seed: int) -> np.ndarray:
    """Rows of random values in that type: uint8 [n_rows, row_bytes]."""
    values = np.random.default_rng(seed).standard_normal((n_rows, n)).astype(np.float32)
    return values.astype(np.float16).view(np.uint8) if type_ == GgmlType.F16 else quantize_rows(values, type_)


def scattered(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The reference: each wide column from its source, zeros elsewhere."""
    out = np.zeros((len(values), len(columns)), np.float32)
    for place, source in enumerate(columns):
        if source >= 0:
            out[:, place] = values[:, source]
    return out


@st.composite
def block_columns(draw: st.DrawFn) -> tuple[GgmlType, int, np.ndarray]:
    """A type, a source width in its blocks, and a map of entire blocks with gaps, repetitions and any order."""
    type_ = draw(st.sampled_from(COPIED))
    size = gguf.GGML_QUANT_SIZES[type_][0]
    n_blocks = draw(st.integers(1, 5))
    table = draw(st.lists(st.integers(-1, n_blocks - 1), min_size=1, max_size=12))
    columns = [np.full(size, -1) if block < 0 else np.arange(block * size, (block + 1) * size) for block in table]
    return type_, n_blocks * size, np.concatenate(columns)


@given(block_columns(), st.integers(1, 5), st.integers(0, 2**16))
@settings(deadline=None)
def test_copied_blocks_hold_the_same_values(drawn: tuple[GgmlType, int, np.ndarray], n_rows: int, seed: int) -> None:
    type_, n, columns = drawn
    source = rows_of(type_, n_rows, n, seed)
    mover = RowMover(type_, type_, columns)
    assert mover.copies
    moved = mover.move(source)
    assert moved.shape == (n_rows, mover.n_bytes) == (n_rows, row_bytes(type_, len(columns)))
    expected = scattered(gguf.quants.dequantize(source, type_), columns)
    assert np.array_equal(gguf.quants.dequantize(moved, type_), expected)


@given(
    st.sampled_from([GgmlType.F32, GgmlType.Q4_0, GgmlType.Q8_0]),
    st.sampled_from(sorted(STEPS)),
    st.lists(st.integers(-1, 63), min_size=1, max_size=70),
    st.integers(0, 2**16),
)
@settings(deadline=None)
def test_other_types_and_split_blocks_are_requantised(
    source_type: GgmlType, type_: GgmlType, places: list[int], seed: int
) -> None:
    """Within half a step; blocks of zeros stay zero."""
    size = gguf.GGML_QUANT_SIZES[type_][0]
    columns = np.full(3 * size, -1)
    columns[: len(places)] = places[: 3 * size]
    source = rows_of(source_type, 3, 64, seed)
    mover = RowMover(source_type, type_, columns)
    expected = scattered(gguf.quants.dequantize(source, source_type), columns)
    if mover.copies:
        return
    found = gguf.quants.dequantize(mover.move(source), type_)
    by_block, expected = found.reshape(3, -1, 32), expected.reshape(3, -1, 32)
    # Q4_K's scales of 32 weights are a share of the largest of 256
    within = expected.reshape(3, 3, -1) if type_ == GgmlType.Q4_K else expected
    largest = np.abs(within).max(axis=2, keepdims=True)
    error = np.abs(by_block - expected).reshape(within.shape)
    assert (error <= STEPS[type_] * largest + 1e-6).all()
    assert not by_block[
        ~expected.any(axis=2) & ~np.repeat(within.any(axis=2), by_block.shape[1] // within.shape[1], 1)
    ].any()


def test_norm_weights_are_scaled() -> None:
    weights = np.arange(1, 9, dtype=np.float32)
    mover = RowMover(GgmlType.F32, GgmlType.F32, np.array([*range(8), -1, -1]), 0.5)
    assert not mover.copies
    moved = mover.move(weights.view(np.uint8).reshape(1, -1)).view(np.float32)
    assert moved.tolist() == [[*(weights / 2), 0.0, 0.0]]


@pytest.mark.parametrize("type_", STEPS)
def test_the_quantizer_is_llama_cpps(type_: GgmlType) -> None:
    """The gguf package's own, where it has one, gives the same bytes."""
    values = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    found = quantize_rows(values, type_)
    try:
        expected = gguf.quants.quantize(values, type_)
    except NotImplementedError:
        assert np.abs(gguf.quants.dequantize(found, type_) - values).max() < 0.5
    else:
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("type_", sorted(STEPS))
def test_rows_of_zeros_stay_zero(type_: GgmlType) -> None:
    size = gguf.GGML_QUANT_SIZES[type_][0]
    moved = RowMover(GgmlType.F32, type_, np.full(2 * size, -1)).move(rows_of(GgmlType.F32, 3, 64, 0))
    assert not gguf.quants.dequantize(moved, type_).any()
