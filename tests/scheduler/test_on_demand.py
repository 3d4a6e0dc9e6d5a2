"""Loading on demand with a real cache: every layer keeps its share of the slots, and what is foretold stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moeedge.native import Block
from moeedge.native.abi import Phase
from moeedge.native.cache import ExpertCache
from moeedge.policies.base import CacheShape, PolicyConfig
from moeedge.policies.registry import make_policy
from moeedge.scheduler.on_demand import LayerHook
from tests.support.experts import resident, write_experts

LAYERS, EXPERTS, SHARE = 4, 8, 2


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ExpertCache]:
    with ExpertCache.open(write_experts(tmp_path / "experts.bin").config(SHARE / EXPERTS)) as opened:
        yield opened


@pytest.fixture
def within(cache: ExpertCache) -> LayerHook:
    """With the experts 0 and 1 of every layer, in the order of the layers."""
    group, capacity, _ = cache.groups()
    policy = make_policy("lru", CacheShape(LAYERS, EXPERTS, group, capacity), PolicyConfig(gamma=4))
    made = LayerHook(cache, policy, load_misses=True)
    made.on = True
    for layer in range(LAYERS):
        need(made, layer, 0, 1)
    return made


def need(within: LayerHook, layer: int, *experts: int) -> None:
    within(Block(layer, Phase.VERIFY, np.array([experts], dtype=np.int32), None))


def held(cache: ExpertCache, layer: int) -> set[int]:
    return {expert for where, expert in resident(cache) if where == layer}


def test_a_layer_makes_room_among_its_own(cache: ExpertCache, within: LayerHook) -> None:
    need(within, 2, 0)
    need(within, 2, 5)
    assert held(cache, 2) == {0, 5}, "1 was used longest ago"
    assert all(held(cache, layer) == {0, 1} for layer in (0, 1, 3))
    assert (within.needed, within.loaded, within.late, within.stops, within.uncached) == (10, 9, 0, 5, 0)


def test_what_a_layer_lends_comes_back(cache: ExpertCache, within: LayerHook) -> None:
    need(within, 3, 4, 5, 6)
    assert held(cache, 3) == {4, 5, 6} and len(held(cache, 0)) == 1, "layer 0 was used longest ago"
    lent = ({0, 1} - held(cache, 0)).pop()
    need(within, 0, lent)
    assert held(cache, 0) == {0, 1} and len(held(cache, 3)) == SHARE, "from the layer above its share"


def test_what_is_foretold_stays_until_it_is_used(cache: ExpertCache, within: LayerHook) -> None:
    foretold = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
    foretold[1, [0, 7]] = True
    victims = within.make_room(foretold, np.array([[1, 7]], dtype=np.int32))
    assert victims.tolist() == [[1, 1]], "the layer is at its share, and its 0 is foretold"
    need(within, 1, 5)
    assert held(cache, 1) == {0, 5}, "0 is foretold, 1 is not"
    nothing = within.make_room(np.zeros_like(foretold), np.zeros((0, 2), dtype=np.int32))
    assert nothing.shape == (0, 2)


def test_prompts_and_a_device_that_is_off_load_nothing(cache: ExpertCache, within: LayerHook) -> None:
    before = resident(cache)
    within(Block(0, Phase.PREFILL, np.array([[6]], dtype=np.int32), None))
    within.on = False
    need(within, 0, 6)
    assert resident(cache) == before
