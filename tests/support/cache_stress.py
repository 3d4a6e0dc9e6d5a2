"""Moves experts at random as fast as possible while other threads check the bytes of resident experts.

    python -m tests.support.cache_stress SECONDS [DEVICE]   (with MOEEDGE_LIBRARY and LD_PRELOAD also under a sanitizer)

One thread replaces the plan without waiting for the last one, another demands experts and waits for them; readers pin
experts as a computation does, compare their slots with the file and unpin them; one more empties it now and then, and
of a cache in RAM another one changes how many slots it uses. Prints "done" if every byte was right.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moeedge import native
from moeedge.errors import BackendError
from moeedge.native.abi import ReadFault
from moeedge.native.cache import ExpertCache
from tests.support.experts import (
    ExpertFile,
    acquire,
    assert_balanced,
    assert_bytes,
    fail_reads,
    pairs,
    read,
    release,
    write_experts,
)

RATIO = 0.2
MIN_CHECKED = 100


class Stress:
    """The threads' common state."""

    def __init__(self, model: ExpertFile, cache: ExpertCache, end_s: float) -> None:
        self.model, self.cache, self.end_s = model, cache, end_s
        self.everything = pairs(*((layer, e) for layer in range(model.n_layers) for e in range(model.n_experts)))
        self.truth = {
            (layer, role): [model.bytes_of(layer, expert, role) for expert in range(model.n_experts)]
            for layer in range(model.n_layers)
            for role in model.roles(layer)
        }
        self.n_slots = cache.info.n_slots
        self.errors: list[BaseException] = []
        self.n_checked = 0

    def is_over(self) -> bool:
        return time.monotonic() > self.end_s or bool(self.errors)

    def plan(self) -> None:
        """Random uploads; everything is a victim."""
        rng = np.random.default_rng(1)
        while not self.is_over():
            order = rng.permutation(len(self.everything))
            n_uploads = int(rng.integers(1, len(order)))
            uploads = self.everything[order[:n_uploads]]
            priority = rng.integers(0, 5, n_uploads).astype(np.uint8)
            utility = rng.random(len(order)).astype(np.float32)
            self.cache.plan(uploads, priority, self.everything[np.argsort(utility)], np.sort(utility))
            if rng.random() < 0.1:
                self.cache.residency()
                assert_balanced(self.cache, self.n_slots)

    def demand(self) -> None:
        """Demand a few experts of a layer at a time, all others are victims; batches of any size."""
        rng = np.random.default_rng(4)
        while not self.is_over():
            layer = int(rng.integers(self.model.n_layers))
            wanted = rng.integers(0, self.model.n_experts, 4).astype(np.int32)
            victims = self.everything[rng.permutation(len(self.everything))]
            utility = np.sort(rng.random(len(victims))).astype(np.float32)
            assert 0 <= self.cache.demand(layer, wanted, victims, utility, 0.01) <= len(set(wanted.tolist()))
            self.cache.set_batch(int(rng.integers(0, 5)))
            self.cache.set_readers(int(rng.integers(1, 6)), int(rng.choice([4096, 10_000, 1 << 20])))

    def read(self, seed: int) -> None:
        """Pin a few experts of a layer at a time, check the bytes of the resident ones, unpin them."""
        rng = np.random.default_rng(seed)
        while not self.is_over():
            layer = int(rng.integers(self.model.n_layers))
            wanted = rng.integers(0, self.model.n_experts, 8)
            slots = acquire(self.cache, layer, wanted.tolist())
            try:
                for expert in wanted[slots >= 0].tolist():
                    self.check(layer, expert)
            finally:
                release(self.cache, layer, slots)

    def check(self, layer: int, expert: int) -> None:
        for role in self.model.roles(layer):
            expected = self.truth[layer, role][expert]
            assert read(self.cache, layer, expert, role, len(expected)) == expected, (layer, expert, role)
        self.n_checked += 1

    def clear(self) -> None:
        while not self.is_over():
            time.sleep(0.05)
            self.cache.clear()

    def limit(self) -> None:
        """Any number of slots, all of them now and then."""
        rng = np.random.default_rng(5)
        while not self.is_over():
            self.cache.limit(int(rng.integers(1, 2 * self.n_slots)))
            self.cache.set_utilities(rng.random((self.model.n_layers, self.model.n_experts)).astype(np.float32))

    def guard(self, work: Callable[..., None], *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self.errors.append(error)


def stress(
    model: ExpertFile, seconds: float, *, device: str = "emulated", link_bytes_per_s: float = 0.0, ratio: float = RATIO
) -> int:
    """Runs the threads for that long; returns how many experts were checked."""
    config = model.config(ratio, device=device, link_bytes_per_s=link_bytes_per_s)
    with ExpertCache(config) as cache:
        if device == "ram":
            fail_reads(cache, ReadFault.EIO, 50)  # which the next attempt overcomes
        state = Stress(model, cache, time.monotonic() + seconds)
        jobs = [(state.plan,), (state.demand,), (state.read, 2), (state.read, 3), (state.clear,)]
        if device == "ram":
            jobs.append((state.limit,))
        threads = [threading.Thread(target=state.guard, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if state.errors:
            raise state.errors[0]
        assert cache.drain(30)
        assert_balanced(cache)
        assert cache.stats().pinned == 0
        assert cache.stats().failed == 0
        assert_bytes(cache, model)
        assert cache.stats().uploads > 0
    return state.n_checked


def churn(model: ExpertFile, *, device: str = "emulated") -> None:
    """Caches that are opened, used and closed in the middle of moving."""
    for ratio in (0.0, 0.1, 1.0):
        with ExpertCache(model.config(ratio, device=device, n_stage=2)) as cache:
            cache.plan(pairs(*((0, e) for e in range(8))), np.ones(8, np.uint8), pairs((0, 0)), np.zeros(1, np.float32))
    try:
        cache.residency()
    except BackendError:
        return
    raise AssertionError("a closed cache was read")


def main(arguments: list[str]) -> None:
    native.attach()
    with tempfile.TemporaryDirectory() as folder:
        model = write_experts(Path(folder) / "experts.bin", n_layers=6, n_experts=16, wide_layers=(1, 4))
        for device in arguments[1:] or ["emulated", "ram"]:
            n_checked = stress(model, float(arguments[0]), device=device)
            assert n_checked >= MIN_CHECKED, n_checked
            churn(model, device=device)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
