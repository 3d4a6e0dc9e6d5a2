"""A cache in RAM that gives slots back keeps its most useful experts, and no computation notices."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from moeedge.errors import MoeedgeError
from moeedge.experts import Residency
from moeedge.llama.context import Context
from moeedge.native.cache import ExpertCache
from tests.conftest import TinyFactory
from tests.support.cache_stress import MIN_CHECKED, stress
from tests.support.experts import acquire, ask, assert_bytes, model_experts, release, write_experts
from tests.support.hybrid import MANY_EXPERTS
from tests.support.hybrid_driver import churn
from tests.support.ram_driver import decode, ram_context
from tests.support.threads import meanwhile

N_LAYERS, N_EXPERTS = 4, 64


@pytest.fixture(scope="module")
def wide(tiny: TinyFactory) -> Path:
    """Its experts take many pages."""
    return tiny("qwen3moe", layers=N_LAYERS, embd=256, experts=N_EXPERTS, expert_ff=256)


@pytest.fixture
def full(wide: Path) -> Iterator[tuple[Context, ExpertCache]]:
    """All experts are resident."""
    with ram_context(wide, 1.0) as (context, cache):
        load_all(cache)
        yield context, cache


def load_all(cache: ExpertCache) -> None:
    ask(cache, list(np.ndindex(cache.info.n_layers, cache.info.n_experts)))
    assert cache.drain(30.0)


def resident(cache: ExpertCache) -> np.ndarray:
    return np.asarray(cache.copy_residency() == Residency.RESIDENT)


def memory_bytes() -> int:
    """Of this process, resident."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


@pytest.mark.parametrize("n_slots", [1, 40, 200, 256])
def test_the_most_useful_experts_stay(full: tuple[Context, ExpertCache], wide: Path, n_slots: int) -> None:
    _context, cache = full
    utilities = np.random.default_rng(n_slots).permutation(N_LAYERS * N_EXPERTS).astype(np.float32)
    cache.set_utilities(utilities.reshape(N_LAYERS, N_EXPERTS))
    cache.limit(n_slots)
    now = resident(cache)
    assert cache.info.n_slots == now.sum() == n_slots == cache.stats().slots_used
    assert cache.groups()[1].sum() == n_slots
    assert utilities[now.ravel()].min() == N_LAYERS * N_EXPERTS - n_slots, "one group: the best of all"
    assert assert_bytes(cache, model_experts(wide)) == n_slots


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/self/smaps_rollup")
def test_the_memory_goes_back_and_is_taken_again(full: tuple[Context, ExpertCache]) -> None:
    context, cache = full
    expected = decode(context)
    before, pool_bytes = memory_bytes(), cache.info.pool_bytes
    cache.limit(64)
    assert cache.info.pool_bytes == pool_bytes // 4
    assert before - memory_bytes() > 0.7 * pool_bytes
    assert all(map(np.array_equal, decode(context), expected))
    cache.limit(1 << 30)
    assert cache.info.n_slots == N_LAYERS * N_EXPERTS
    load_all(cache)
    assert resident(cache).all()
    assert memory_bytes() > before - 0.1 * pool_bytes
    assert all(map(np.array_equal, decode(context), expected))


def test_answers_are_the_same_while_the_limit_changes(tiny: TinyFactory) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with ram_context(path, 1.0) as (context, _cache):
        expected = decode(context)
    numbers = random.Random(3)
    with ram_context(path, 0.5) as (context, cache):
        most = cache.info.n_slots

        def change() -> None:
            cache.limit(numbers.randint(1, most))
            time.sleep(0.002)

        with churn(cache, seed=4), meanwhile(change):
            for _ in range(8):
                assert all(map(np.array_equal, decode(context), expected))
        assert cache.stats().pinned == 0 and cache.stats().failed == 0
        # only now: while plans keep coming the cache need not become idle
        assert cache.drain(10.0)
        assert cache.stats().slots_used <= cache.info.n_slots


def test_what_a_computation_uses_goes_after_it(full: tuple[Context, ExpertCache]) -> None:
    _context, cache = full
    slots = acquire(cache, 2, range(N_EXPERTS))
    cache.limit(40)
    assert resident(cache)[2].all()
    before = memory_bytes()
    is_beyond = slots >= 40
    release(cache, 2, slots)
    assert resident(cache).sum() == cache.stats().slots_used == 40
    assert resident(cache)[2].sum() == N_EXPERTS - is_beyond.sum()
    freed_bytes = int(is_beyond.sum() * cache.groups()[2][0])
    assert before - memory_bytes() > 0.7 * freed_bytes > 0


def test_a_copy_that_moves_is_never_seen_half_written(tmp_path: Path) -> None:
    """Of experts that take hundreds of pages, while others load, use and evict them."""
    model = write_experts(tmp_path / "experts.bin", n_layers=6, n_experts=16, width=256)
    assert stress(model, 3.0, device="ram", ratio=0.6) > MIN_CHECKED


def test_what_is_on_its_way_goes_as_it_arrives(wide: Path) -> None:
    with ram_context(wide, 1.0, disk_bytes_per_s=100e6) as (context, cache):
        expected = decode(context)
        cache.clear()
        ask(cache, list(np.ndindex(N_LAYERS, N_EXPERTS)))
        while cache.stats().slots_used < 20 or not cache.stats().in_flight:
            time.sleep(0.001)
        cache.limit(8)
        assert cache.drain(30.0)
        assert cache.stats().slots_used == resident(cache).sum() <= 8
        assert all(map(np.array_equal, decode(context), expected)), "that of a wanted one after its use"
        assert cache.drain(30.0)
        assert cache.stats().slots_used == resident(cache).sum() <= 8


@pytest.mark.flaky(reruns=2)
def test_what_is_used_as_its_turn_comes_moves_in_the_next(tmp_path: Path) -> None:
    """It is the most useful of all, so that its turn comes before the copies of 124 others."""
    model = write_experts(tmp_path / "experts.bin", n_layers=4, n_experts=64, width=512, sparse=True)
    with ExpertCache(model.config(1.0, device="ram")) as cache:
        load_all(cache)
        cache.set_utilities(np.arange(256, dtype=np.float32).reshape(4, 64))
        slots = acquire(cache, 3, range(60, 64))
        thread = Thread(target=cache.limit, args=(128,))
        thread.start()
        time.sleep(0.005)
        release(cache, 3, slots)
        thread.join()
        assert resident(cache)[3, 60:].all()


def stalls(cache: ExpertCache, n_slots: int) -> list[float]:
    """Seconds of each use of experts, by another thread, that began and ended within cache.limit(n_slots)."""
    spans: list[tuple[float, float]] = []

    def use() -> None:
        start_s = time.perf_counter()
        release(cache, 3, acquire(cache, 3, range(4)))
        spans.append((start_s, time.perf_counter()))
        time.sleep(0.0005)

    with meanwhile(use):
        start_s = time.perf_counter()
        cache.limit(n_slots)
        end_s = time.perf_counter()
    return [end - start for start, end in spans if start > start_s and end < end_s]


def test_no_computation_waits_until_the_memory_is_given_back(tmp_path: Path) -> None:
    """256 MB of experts are copied, and as much memory is given back, in a tenth of a second or more."""
    model = write_experts(tmp_path / "experts.bin", n_layers=4, n_experts=64, width=512, sparse=True)
    measured = []
    with ExpertCache(model.config(1.0, device="ram")) as cache:
        for _ in range(3):
            cache.limit(1 << 30)
            cache.clear()
            load_all(cache)
            # slots are filled from the first on: the most useful experts are in the last ones
            cache.set_utilities(np.arange(256, dtype=np.float32).reshape(4, 64))
            found = stalls(cache, 128)
            now = resident(cache)
            assert now[2:].sum() >= 124, "what was not used has moved"
            measured.append((len(found), max(found, default=0.0), bool(now[3, :4].any())))
            # the copies of 128 experts let others pass, and what was used meanwhile has moved, too
            if measured[-1][0] > 20 and measured[-1][1] < 0.05 and measured[-1][2]:
                return
    raise AssertionError(f"other programs may take the processor once: {measured}")


def test_another_device_gives_no_single_slots_back(wide: Path) -> None:
    with ExpertCache(model_experts(wide).config(0.5)) as cache, pytest.raises(MoeedgeError):
        cache.limit(10)
