"""Loading on demand with a real cache: every layer keeps its share of the slots, and predicted experts stay."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moeedge.native.cache import ExpertCache
from moeedge.policies.base import ExpertPrediction, Plan
from moeedge.scheduler.native_io import cache_shape
from moeedge.scheduler.on_demand import OnDemandLoader, predicted_uploads
from tests.support.experts import resident, write_experts

LAYERS, EXPERTS, SHARE = 4, 8, 2


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ExpertCache]:
    with ExpertCache(write_experts(tmp_path / "experts.bin").config(SHARE / EXPERTS)) as opened:
        yield opened


@pytest.fixture
def loader(cache: ExpertCache) -> OnDemandLoader:
    """With the experts 0 and 1 of every layer, in the order of the layers."""
    loader = OnDemandLoader(cache)
    for layer in range(LAYERS):
        need(loader, layer, 0, 1)
    return loader


def need(loader: OnDemandLoader, layer: int, *experts: int) -> None:
    loader.load(layer, np.array(experts, dtype=np.int32))


def held(cache: ExpertCache, layer: int) -> set[int]:
    return {expert for where, expert in resident(cache) if where == layer}


def test_a_layer_makes_room_among_its_own(cache: ExpertCache, loader: OnDemandLoader) -> None:
    need(loader, 2, 0)
    need(loader, 2, 5)
    assert held(cache, 2) == {0, 5}, "1 is the least recently used"
    assert all(held(cache, layer) == {0, 1} for layer in (0, 1, 3))
    assert (loader.loaded, loader.uncached) == (9, 0)


def test_a_slot_lent_to_another_layer_comes_back(cache: ExpertCache, loader: OnDemandLoader) -> None:
    need(loader, 3, 4, 5, 6)
    assert held(cache, 3) == {4, 5, 6} and len(held(cache, 0)) == 1, "layer 0 is the least recently used"
    lent = ({0, 1} - held(cache, 0)).pop()
    need(loader, 0, lent)
    assert held(cache, 0) == {0, 1} and len(held(cache, 3)) == SHARE, "from the layer above its share"


def test_a_predicted_expert_stays_until_it_is_used(cache: ExpertCache, loader: OnDemandLoader) -> None:
    predicted = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
    predicted[1, [0, 7]] = True
    victims = loader.make_room(predicted, np.array([[1, 7]], dtype=np.int32))
    assert victims.tolist() == [[1, 1]], "the layer is at its share, and its 0 is predicted"
    need(loader, 1, 5)
    assert held(cache, 1) == {0, 5}, "0 is predicted, 1 is not"
    no_victims = loader.make_room(np.zeros_like(predicted), np.zeros((0, 2), dtype=np.int32))
    assert no_victims.shape == (0, 2)


def plan_of(*uploads: tuple[int, int], n_victims: int) -> Plan:
    """Priorities fall in this order; victims are the last experts of the layers."""
    n = len(uploads)
    return Plan(
        tau=np.ones(LAYERS, dtype=np.float32),
        utility=np.zeros((LAYERS, EXPERTS), dtype=np.float32),
        uploads=np.array(uploads, dtype=np.int32).reshape(n, 2),
        priority=np.arange(n, 0, -1, dtype=np.uint8),
        victims=np.array([[layer, EXPERTS - 1] for layer in range(n_victims)], dtype=np.int32),
        victim_utility=np.arange(n_victims, dtype=np.float32),
    )


def prediction_of(*experts: tuple[int, int]) -> ExpertPrediction:
    """Of one token that uses at most two experts of a layer."""
    ids = np.full((LAYERS, 1, 2), -1, dtype=np.int32)
    for layer, expert in experts:
        ids[layer, 0, int(ids[layer, 0, 0] >= 0)] = expert
    return ExpertPrediction(ids)


def test_only_predicted_experts_are_uploaded(cache: ExpertCache, loader: OnDemandLoader) -> None:
    """The others are loaded as needed; room is made by the loader, whatever the policy's victims."""
    only_predicted = partial(predicted_uploads, cache_shape(cache), loader)
    plan = plan_of((1, 7), (1, 6), (2, 5), (3, 4), n_victims=3)
    found = only_predicted(plan, prediction_of((1, 7), (3, 4)), None)
    assert found.uploads.tolist() == [[1, 7], [3, 4]] and found.priority.tolist() == [4, 1]
    assert found.victims.tolist() == [[1, 0], [3, 0]] and (np.diff(found.victim_utility) > 0).all()
    found = only_predicted(plan, prediction_of((1, 7), (3, 4)), slice(2, 4))
    assert found.uploads.tolist() == [[3, 4]]
    assert len(only_predicted(plan, None, None).uploads) == 0


def test_where_the_cpu_computes_misses_only_a_plan_for_some_layers_is_filtered(cache: ExpertCache) -> None:
    only_predicted = partial(predicted_uploads, cache_shape(cache), None)
    plan = plan_of((1, 7), (1, 6), (2, 5), n_victims=3)
    assert only_predicted(plan, prediction_of((1, 7)), None) is plan
    found = only_predicted(plan, prediction_of((1, 7), (2, 5)), slice(1, 2))
    assert found.uploads.tolist() == [[1, 7]] and found.victims.tolist() == plan.victims.tolist()
    found = only_predicted(plan, prediction_of((1, 7)), slice(2, 3))
    assert len(found.uploads) == len(found.victims) == len(found.victim_utility) == 0
