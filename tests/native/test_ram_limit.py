"""A cache in RAM that gives slots back keeps its most useful experts, and no computation notices."""

from __future__ import annotations

import platform
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moeedge.errors import MoeedgeError
from moeedge.experts import Residency
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_tensors
from moeedge.native.abi import Repack
from moeedge.native.cache import CacheConfig, ExpertCache
from tests.conftest import TinyFactory
from tests.support.hybrid import MANY_EXPERTS
from tests.support.hybrid_driver import churn
from tests.support.ram_driver import decode, ram_context

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
    everything = np.argwhere(np.ones((cache.info.n_layers, cache.info.n_experts))).astype(np.int32)
    cache.plan(everything, np.zeros(len(everything), np.uint8), everything[:0], np.zeros(0, np.float32))
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
    tensors, files = expert_tensors(wide)
    content = np.memmap(files[0], dtype=np.uint8, mode="r")
    for tensor in tensors:
        for expert in np.flatnonzero(now[tensor.layer])[:8]:
            start = tensor.offset + int(expert) * tensor.stride
            found = cache.read(tensor.layer, int(expert), tensor.role, tensor.stride)
            assert np.array_equal(np.frombuffer(found, np.uint8), content[start : start + tensor.stride])


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


@pytest.mark.parametrize("repack", [Repack.NONE, Repack.ALL])
def test_answers_are_the_same_while_the_limit_changes(tiny: TinyFactory, repack: Repack) -> None:
    path = tiny("qwen3moe", experts=MANY_EXPERTS)
    with ram_context(path, 1.0, repack=repack) as (context, _cache):
        expected = decode(context)
    failures: list[BaseException] = []
    stop = threading.Event()
    numbers = random.Random(3)
    with ram_context(path, 0.5, repack=repack) as (context, cache):
        most = cache.info.n_slots

        def change() -> None:
            try:
                while not stop.wait(0.002):
                    cache.limit(numbers.randint(1, most))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=change)
        with churn(cache, seed=4):
            thread.start()
            try:
                for _ in range(8):
                    assert all(map(np.array_equal, decode(context), expected))
            finally:
                stop.set()
                thread.join()
            assert not failures
            assert cache.stats().pinned == 0 and cache.stats().failed == 0
        # only now: while plans keep coming the cache need not become idle
        assert cache.drain(10.0)
        cache.limit(10)
        assert cache.stats().slots_used <= cache.info.n_slots


def test_what_a_computation_uses_stays(full: tuple[Context, ExpertCache]) -> None:
    _context, cache = full
    slots = cache.acquire(2, range(N_EXPERTS))
    cache.limit(40)
    assert resident(cache)[2].all()
    cache.release(2, slots)
    cache.limit(40)
    assert resident(cache).sum() == 40


def test_another_device_gives_no_single_slots_back(wide: Path) -> None:
    tensors, files = expert_tensors(wide)
    config = CacheConfig(
        device="emulated",
        files=files,
        tensors=tensors,
        n_layers=N_LAYERS,
        n_experts=N_EXPERTS,
        ratio=0.5,
        emulated_threads=1,
    )
    with ExpertCache.open(config) as cache, pytest.raises(MoeedgeError):
        cache.limit(10)
