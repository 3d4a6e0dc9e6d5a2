"""Maps of dimensions: attention, rotation and normalisation give the same results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.lab.widen.maps import GroupedHeads, Rotary, blocks, corner, product, repeated, repetitions


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


def test_heads_without_room() -> None:
    assert not GroupedHeads(4, 2, 4, 1).fits()
    assert not GroupedHeads(4, 2, 6, 4).fits()  # not in equal groups
    assert GroupedHeads(4, 2, 4, 4).fits()  # every head with keys of its own
    assert not GroupedHeads(8, 2, 4, 4).fits()


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


@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 9), st.sampled_from([1, 4, 32]))
def test_maps_of_entire_blocks(n: int, times: int, extra: int, size: int) -> None:
    places = repeated(n * size, (n * times + extra) * size, times)
    expected = repeated(n, n * times + extra, times)
    found = blocks(places, size)
    assert found is not None and np.array_equal(found, expected)


def test_maps_that_split_blocks() -> None:
    assert blocks(corner(48, 96), 32) is None  # half a block and zeros
    assert blocks(corner(32, 80), 32) is None  # half a block at the end
    assert blocks(np.roll(corner(32, 64), 16), 32) is None  # moved by half a block
    assert blocks(np.arange(64)[::-1], 32) is None  # turned round
    assert blocks(np.concatenate([np.arange(32), np.arange(32)]), 32) is not None


def test_products() -> None:
    places = product(np.array([1, -1, 0]), np.array([0, -1, 1]), 2)
    assert places.tolist() == [2, -1, 3, -1, -1, -1, 0, -1, 1]


@given(st.integers(1, 100), st.integers(1, 40), st.integers(1, 8))
def test_repetitions_fit(embd: int, ratio: int, head_ratio: int) -> None:
    times = repetitions(embd, embd * ratio, 32, 32 * head_ratio)
    assert times >= 1 and embd * times <= embd * ratio
    if ratio % head_ratio == 0:  # then both norms have the same factor
        assert times * head_ratio == ratio
