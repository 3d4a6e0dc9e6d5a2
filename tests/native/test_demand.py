"""On-demand loading and batched transfers: which experts arrive, which are evicted, the time on a paced link."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from moeedge.errors import BackendError
from moeedge.native.cache import ExpertCache
from tests.support.experts import ExpertFile, ask, assert_balanced, assert_bytes, resident, write_experts

NOBODY = np.zeros((0, 2), dtype=np.int32)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin")


def demand(
    cache: ExpertCache, layer: int, wanted: list[int], victims: list[tuple[int, int]], wait_s: float = 5.0
) -> int:
    pairs = np.array(victims, dtype=np.int32).reshape(-1, 2)
    return cache.demand(layer, np.array(wanted, np.int32), pairs, np.arange(len(pairs), dtype=np.float32), wait_s)


def test_demanded_experts_arrive_and_stay(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(4 / 32)) as cache:  # four slots
        assert demand(cache, 0, [1, 2, 1], []) == 2
        assert resident(cache) == {(0, 1), (0, 2)}
        assert demand(cache, 0, [2, 3, 4], [(0, 2), (0, 1)]) == 3, "(0, 2) is needed, so (0, 1) is no matter either"
        assert resident(cache) == {(0, 1), (0, 2), (0, 3), (0, 4)}
        assert demand(cache, 1, [0, 5], [(0, 2), (0, 1), (0, 4)]) == 2
        assert resident(cache) == {(0, 3), (0, 4), (1, 0), (1, 5)}, "the lowest utilities went"
        assert_balanced(cache)
        assert_bytes(cache, experts)


def test_a_demand_without_room_returns_at_once(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(2 / 32)) as cache:
        begin_s = time.monotonic()
        assert demand(cache, 2, [0, 1, 2, 3], [], wait_s=30.0) == 2
        assert time.monotonic() - begin_s < 10.0
        assert_balanced(cache)


def test_a_demand_overtakes_the_queue(experts: ExpertFile) -> None:
    bytes_per_expert = sum(tensor.stride for tensor in experts.tensors[:3])
    with ExpertCache(experts.config(1.0, link_bytes_per_s=bytes_per_expert / 0.05)) as cache:
        ask(cache, [(0, expert) for expert in range(8)])
        assert demand(cache, 3, [7], []) == 1
        assert len(resident(cache)) <= 4, "what was queued before came before it"
        cache.drain(5.0)
        assert resident(cache) == {(3, 7), *((0, expert) for expert in range(8))}, "and comes all the same"


@pytest.mark.parametrize("batch", [0, 1, 3, 64])
def test_batches_carry_the_right_bytes(experts: ExpertFile, batch: int) -> None:
    """Slots freed in any order, experts that are neighbours in the file and experts that are not."""
    rng = np.random.default_rng(batch)
    with ExpertCache(experts.config(12 / 32)) as cache:
        cache.set_batch(batch)
        for _ in range(12):
            there = sorted(resident(cache))
            wanted = [(layer, expert) for layer in range(4) for expert in range(8) if (layer, expert) not in there]
            rng.shuffle(wanted)
            n_free = 12 - len(there)
            victims = [there[i] for i in rng.permutation(len(there))]
            ask(cache, sorted(wanted[: n_free + len(victims) // 2]), victims=victims)
            cache.drain(5.0)
            assert_balanced(cache)
            assert_bytes(cache, experts)


def test_a_batch_waits_for_the_link_once(tmp_path: Path) -> None:
    latency_s, model = 0.03, write_experts(tmp_path / "experts.bin")
    times_s = {}
    for batch in (1, 64):
        with ExpertCache(model.config(1.0, link_latency_s=latency_s)) as cache:
            cache.set_batch(batch)
            begin_s = time.monotonic()
            ask(cache, [(layer, expert) for layer in range(2) for expert in range(8)])
            cache.drain(10.0)
            times_s[batch] = time.monotonic() - begin_s
            assert cache.stats().uploads == 16
            n_transfers = cache.stats().transfers
            # one per layer; if the mover already waits when the batch size is set, the first expert goes alone
            assert n_transfers == 16 if batch == 1 else 2 <= n_transfers <= 3
    assert times_s[1] >= 0.9 * 16 * latency_s
    assert 0.9 * 2 * latency_s - 0.02 <= times_s[64] < times_s[1] * 0.6


def test_victims_of_a_demand_end_with_it(experts: ExpertFile) -> None:
    """Its victims hold for that demand only: neither a plan nor the next demand evicts them."""
    with ExpertCache(experts.config(3 / 32)) as cache:
        assert demand(cache, 0, [0, 1, 2], []) == 3
        assert demand(cache, 1, [4], [(0, 0), (0, 1), (0, 2)]) == 1
        assert demand(cache, 2, [5], []) == 0
        assert resident(cache) == {(0, 1), (0, 2), (1, 4)}
        assert demand(cache, 2, [5], [(1, 4), (0, 1), (0, 2)]) == 1
        assert resident(cache) == {(0, 1), (0, 2), (2, 5)}, "a victim of the earlier demand was evicted"


def test_bad_demands(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(0.5)) as cache:
        with pytest.raises(BackendError, match="does not have"):
            demand(cache, 0, [99], [])
        with pytest.raises(BackendError, match="does not have"):
            demand(cache, 0, [1], [(0, 99)])
        with pytest.raises(ValueError, match="utility"):
            cache.demand(0, np.zeros(1, np.int32), NOBODY, np.zeros(2, np.float32), 1.0)
        with pytest.raises(BackendError, match="negative"):
            cache.set_batch(-1)
