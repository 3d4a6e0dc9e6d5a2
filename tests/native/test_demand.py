"""Loading on demand, ahead, and in batches: which experts arrive, which are evicted, the time on a paced link."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from moeedge.errors import BackendError
from moeedge.native.abi import Phase
from moeedge.native.cache import ExpertCache
from tests.support.experts import (
    NO_PAIRS,
    ExpertFile,
    ask,
    assert_balanced,
    assert_bytes,
    carry_out,
    demand,
    drain,
    resident,
)
from tests.support.ram_driver import ram_context


def test_demanded_experts_arrive_and_stay(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(4 / 32)) as cache:  # four slots
        assert demand(cache, 0, [1, 2, 1]) == 2
        assert resident(cache) == {(0, 1), (0, 2)}
        assert demand(cache, 0, [2, 3, 4], [(0, 2), (0, 1)]) == 3, "(0, 2) is needed, so (0, 1) is no matter either"
        assert resident(cache) == {(0, 1), (0, 2), (0, 3), (0, 4)}
        assert demand(cache, 1, [0, 5], [(0, 2), (0, 1), (0, 4)]) == 2
        assert resident(cache) == {(0, 3), (0, 4), (1, 0), (1, 5)}, "the lowest utilities went"
        assert_balanced(cache)
        assert_bytes(cache, experts)


@pytest.mark.flaky(reruns=2)
def test_a_demand_without_room_returns_at_once(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(2 / 32)) as cache:
        begin_s = time.monotonic()
        assert demand(cache, 2, [0, 1, 2, 3], wait_s=30.0) == 2
        assert time.monotonic() - begin_s < 10.0
        assert_balanced(cache)


@pytest.mark.parametrize("device", ["emulated", "ram"])
def test_a_demand_overtakes_what_is_planned(experts: ExpertFile, device: str) -> None:
    """Of a link, and of a disk whose reader has been given a few experts already, so that its threads have work."""
    rate = {"link_bytes_per_s" if device == "emulated" else "disk_bytes_per_s": experts.expert_bytes * 20.0}
    uploads = experts.everything[:16]
    with ExpertCache(experts.config(1.0, device=device, **rate)) as cache:
        if device == "ram":
            cache.set_readers(1, 4096)
        ask(cache, uploads)
        assert demand(cache, 3, [7, 2]) == 2
        assert len(resident(cache)) <= (4 if device == "ram" else 5), "what was queued before came before it"
        drain(cache)
        assert resident(cache) == {(3, 7), (3, 2), *uploads}, "and comes all the same"
        assert_balanced(cache)


@pytest.mark.parametrize("batch", [0, 1, 3, 64])
def test_batches_carry_the_right_bytes(experts: ExpertFile, batch: int) -> None:
    """Slots freed in any order, experts that are neighbours in the file and experts that are not."""
    rng = np.random.default_rng(batch)
    with ExpertCache(experts.config(12 / 32)) as cache:
        cache.set_batch(batch)
        for _ in range(12):
            there = sorted(resident(cache))
            wanted = [each for each in experts.everything if each not in there]
            rng.shuffle(wanted)
            n_free = 12 - len(there)
            victims = [there[i] for i in rng.permutation(len(there))]
            carry_out(cache, sorted(wanted[: n_free + len(victims) // 2]), victims=victims)
            assert_balanced(cache)
            assert_bytes(cache, experts)


@pytest.mark.flaky(reruns=2)
def test_a_batch_waits_for_the_link_once(experts: ExpertFile) -> None:
    latency_s = 0.03
    times_s = {}
    for batch in (1, 64):
        with ExpertCache(experts.config(1.0, link_latency_s=latency_s)) as cache:
            cache.set_batch(batch)
            begin_s = time.monotonic()
            carry_out(cache, experts.everything[:16])
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
        assert demand(cache, 0, [0, 1, 2]) == 3
        assert demand(cache, 1, [4], [(0, 0), (0, 1), (0, 2)]) == 1
        assert demand(cache, 2, [5]) == 0
        assert resident(cache) == {(0, 1), (0, 2), (1, 4)}
        assert demand(cache, 2, [5], [(1, 4), (0, 1), (0, 2)]) == 1
        assert resident(cache) == {(0, 1), (0, 2), (2, 5)}, "a victim of the earlier demand was evicted"


def test_the_least_useful_go_for_what_is_read_ahead(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(4 / 32, device="ram")) as cache:  # four slots
        for layer, wanted in ((0, [1, 2, 3, 4]), (1, [0, 5])):
            cache._call("read_ahead", layer, np.array(wanted, np.int32), len(wanted))
            drain(cache)
            assert resident(cache) == {(0, 1), (0, 2), (0, 3), (0, 4)}, "their layer's turn has not come yet"
        assert (cache.stats().ahead, cache.stats().ahead_used) == (4, 0)
        assert_balanced(cache)
        assert_bytes(cache, experts)


def test_a_prompt_reads_what_is_absent_once(tiny_moe: Path) -> None:
    """A batch that needs all experts keeps those of later layers; by use alone nearly all would be read again."""
    tokens = np.random.default_rng(7).integers(0, 256, 300).tolist()
    with ram_context(tiny_moe, 0.75) as (context, cache):
        n_all = cache.info.n_layers * cache.info.n_experts
        for turn in range(3):
            before = cache.stats()
            context.clear()
            context.decode(tokens, phase=Phase.PREFILL, logits="all")  # so that the last layer has all tokens, too
            now = cache.stats()
            n_read = now.uploads - before.uploads
            n_absent = n_all if turn == 0 else n_all - cache.info.n_slots
            assert n_absent - 2 <= n_read <= (n_absent if turn == 0 else 3 * n_absent)
            assert now.ahead_used <= now.ahead
            assert turn > 0 or now.ahead_used > 0


def test_bad_arguments(experts: ExpertFile) -> None:
    with ExpertCache(experts.config(0.5)) as cache:
        with pytest.raises(BackendError, match="does not have"):
            demand(cache, 0, [99])
        with pytest.raises(BackendError, match="does not have"):
            demand(cache, 0, [1], [(0, 99)])
        with pytest.raises(ValueError, match="utility"):
            cache.demand(0, np.zeros(1, np.int32), NO_PAIRS, np.zeros(2, np.float32), 1.0)
        with pytest.raises(BackendError, match="negative"):
            cache.set_batch(-1)
    with ExpertCache(experts.config(0.5, device="ram")) as cache:
        for layer, expert in ((0, 8), (0, -1), (4, 0)):
            with pytest.raises(BackendError):
                cache._call("read_ahead", layer, np.array([expert], np.int32), 1)
