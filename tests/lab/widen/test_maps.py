"""Maps of dimensions and of rows of blocks: attention, rotation, normalisation and the moved values stay the same."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from hypothesis import given, settings
from hypothesis import strategies as st

from moeedge.errors import InputError
from moeedge.lab.widen.layout import Layout, Shape
from moeedge.lab.widen.maps import (
    GroupedHeads,
    Rotary,
    RowMover,
    blocks,
    corner,
    quantize_rows,
    repetitions,
    row_bytes,
)

COPIED = (GgmlType.Q4_0, GgmlType.Q8_0, GgmlType.Q4_K, GgmlType.F16, GgmlType.F32)


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
    st.sampled_from([GgmlType.Q4_0, GgmlType.Q8_0, GgmlType.Q4_K, GgmlType.Q5_0]),
    st.lists(st.integers(-1, 63), min_size=1, max_size=70),
    st.integers(0, 2**16),
)
@settings(deadline=None)
def test_other_types_and_split_blocks_are_requantised(
    source_type: GgmlType, type_: GgmlType, places: list[int], seed: int
) -> None:
    """As llama.cpp quantizes the wide row; blocks of zeros stay zero."""
    size = gguf.GGML_QUANT_SIZES[type_][0]
    columns = np.full(3 * size, -1)
    columns[: len(places)] = places[: 3 * size]
    source = rows_of(source_type, 3, 64, seed)
    mover = RowMover(source_type, type_, columns)
    wide = quantize_rows(scattered(gguf.quants.dequantize(source, source_type), columns), type_)
    if not mover.copies:
        assert np.array_equal(*(gguf.quants.dequantize(rows, type_) for rows in (mover.move(source), wide)))


@st.composite
def grouped_heads(draw: st.DrawFn) -> GroupedHeads:
    """Any heads in any that have room for them."""
    kv, group, wide_group = (draw(st.integers(1, 6)) for _ in range(3))
    copies = -(-group // wide_group)
    wide_kv = kv * copies + draw(st.integers(0, 5))
    return GroupedHeads(kv * group, kv, wide_kv * wide_group, wide_kv)


@given(grouped_heads())
def test_every_head_occurs_once_with_its_keys(heads: GroupedHeads) -> None:
    assert heads.fits()
    queries, kv = heads.queries(), heads.kv()
    assert sorted(queries[queries >= 0]) == list(range(heads.heads))
    for place, head in enumerate(queries):
        if head >= 0:  # llama.cpp's rule: consecutive heads share a KV head
            seen = kv[place // (heads.wide_heads // heads.wide_heads_kv)]
            assert seen == head // (heads.heads // heads.heads_kv)


@given(
    st.sampled_from([16, 32, 64]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1e4, 1e5, 1e6, 5e6]),
    st.integers(0, 2000),
)
def test_rotation_of_a_larger_head(head_dim: int, ratio: int, base: float, position: int) -> None:
    """Halves of a head are rotated together; the large head contains the small one's result."""
    rotary = Rotary(head_dim, head_dim * ratio, base)
    places = rotary.places()
    rng = np.random.default_rng(position)
    small = rng.standard_normal(head_dim)
    large = np.where(places >= 0, small[places], 0.0)
    assert sorted(places[places >= 0]) == list(range(head_dim))
    turned, expected = turn(large, rotary.wide_base, position), turn(small, base, position)
    assert np.allclose(turned, np.where(places >= 0, expected[places], 0.0), atol=2e-3)
    assert rotary.wide_base < 3e38  # a float32


def turn(head: np.ndarray, base: float, position: int) -> np.ndarray:
    """Rotary positions by their definition, the factor from pair to pair a float32."""
    half = len(head) // 2
    factor = float(np.float32(np.float32(base) ** (-2.0 / len(head))))
    angle = position * factor ** np.arange(half)
    first, second = head[:half], head[half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle)]
    )


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("base", [1e4, 1e5])
def test_the_factor_between_pairs_is_kept_bit_for_bit(base: float, ratio: int) -> None:
    """Then llama.cpp computes the very same angles."""
    rotary = Rotary(32, 32 * ratio, base)
    assert np.array_equal(np.flatnonzero(rotary.places()[: 16 * ratio] >= 0), np.arange(16))  # side by side
    small, large = (np.float32(np.float32(b) ** (-2.0 / d)) for b, d in ((base, 32), (rotary.wide_base, 32 * ratio)))
    assert small == large


def test_maps_that_split_blocks() -> None:
    assert blocks(corner(48, 96), 32) is None  # half a block and zeros
    assert blocks(corner(32, 80), 32) is None  # half a block at the end
    assert blocks(np.roll(corner(32, 64), 16), 32) is None  # moved by half a block
    assert blocks(np.arange(64)[::-1], 32) is None  # turned round
    assert blocks(np.concatenate([np.arange(32), np.arange(32)]), 32) is not None


@given(st.integers(1, 100), st.integers(1, 40), st.integers(1, 8))
def test_repetitions_fit(embd: int, ratio: int, head_ratio: int) -> None:
    times = repetitions(embd, embd * ratio, 32, 32 * head_ratio)
    assert times >= 1 and embd * times <= embd * ratio
    if ratio % head_ratio == 0:  # then both norms have the same factor
        assert times * head_ratio == ratio


def test_scaled_positions_need_heads_as_they_are() -> None:
    keys = {"general.architecture": "qwen3moe", "qwen3moe.rope.scaling.type": "yarn"}
    narrow = Shape(embd=64, ff=32, heads=4, heads_kv=2, head_dim=16, layers=1, experts=4, used=2, vocab=256)
    wide = replace(narrow, embd=128, head_dim=32)
    Layout(keys, narrow, replace(wide, head_dim=16), None)
    Layout(keys | {"qwen3moe.rope.scaling.type": "none"}, narrow, wide, None)
    with pytest.raises(InputError):
        Layout(keys, narrow, wide, None)


def test_heads_without_room() -> None:
    assert not GroupedHeads(8, 2, 9, 3).fits()  # of three heads each, groups of four need two


@pytest.mark.parametrize("type_", [GgmlType.Q4_0, GgmlType.Q8_0, GgmlType.Q4_K, GgmlType.Q5_0])
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
