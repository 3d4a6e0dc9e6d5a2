"""A device that runs short of memory: when that is noticed, and what the cache gives back in mid-answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.errors import DeviceError, EngineError
from moeedge.hardware.devices import ResolvedDevice, VramReading
from moeedge.native.cache import ExpertCache
from moeedge.run import Level, Notification
from moeedge.scheduler.slot_memory import MemoryWatch
from tests.conftest import TinyFactory
from tests.scheduler.test_manager import (
    GREEDY,
    N_EXPERTS,
    N_LAYERS,
    N_PREDICT,
    PROMPT,
    answer,
    check,
    config,
    stats_of,
)
from tests.support.hybrid import NeverPays
from tests.support.stock import StockContext

MIB = 2**20
DEVICE = ResolvedDevice("gpu", ggml_name="GPU0", label="GPU0")


@dataclass
class Machine:
    """Free memory and a clock, both set by hand."""

    free_bytes: int = 1000 * MIB
    time_s: float = 0.0
    answers: bool = True
    n_readings: int = field(default=0)

    def read(self, _device: ResolvedDevice) -> VramReading | None:
        self.n_readings += 1
        if not self.answers:
            raise DeviceError("The driver does not answer.", "Wait.")
        return VramReading(8000 * MIB - self.free_bytes, self.free_bytes, 8000 * MIB, "test")

    def watch(self, reserve_bytes: int) -> MemoryWatch:
        return MemoryWatch(DEVICE, reserve_bytes, read=self.read, clock=lambda: self.time_s)


def test_shortage_is_what_the_reserve_lacks_at_two_readings() -> None:
    machine = Machine()
    watch = machine.watch(400 * MIB)

    def at(time_s: float, free_mib: int) -> int:
        machine.time_s, machine.free_bytes = time_s, free_mib * MIB
        return watch.missing_bytes() // MIB

    assert [at(0.1, 0), machine.n_readings] == [0, 0], "not before the interval is over"
    assert [at(1, 1000), at(2, 250), at(3, 201), at(4, 200)] == [0, 0, 0, 0], "less than the reserve, but not short"
    assert [at(5, 100), at(6, 300), at(7, 100), at(8, 150)] == [0, 0, 0, 250], "two in a row"
    assert [at(9, 0), at(9.1, 0), at(10, 0)] == [0, 0, 400], "the next shortage needs two readings again"
    machine.answers = False
    assert [at(11, 0), at(12, 0)] == [0, 0]


def test_memory_may_be_taken_after_it_was_free_for_ten_seconds() -> None:
    machine = Machine()
    watch = machine.watch(400 * MIB)

    def taken(free_mib: int, n_readings: int) -> list[int]:
        found = []
        machine.free_bytes = free_mib * MIB
        for _ in range(n_readings):
            machine.time_s += 0.5
            assert watch.missing_bytes() == 0
            found.append(watch.take_spare_bytes() // MIB)
        return found

    taken(799, 1)  # the first interval
    assert taken(799, 30) == [0] * 30, "not twice the reserve"
    assert taken(1000, 19) == [0] * 19
    assert taken(799, 1) == [0], "in a row"
    assert taken(800, 25) == [0] * 19 + [400] + [0] * 5, "once"


@pytest.fixture(scope="module")
def pair(tiny: TinyFactory) -> tuple[Path, Path]:
    return tiny("qwen3moe"), tiny("qwen3")


@pytest.fixture(scope="module")
def reference(pair: tuple[Path, Path]) -> Iterator[list[int]]:
    with StockContext(pair[0]) as stock:
        yield stock.greedy(PROMPT, N_PREDICT)[0]


@pytest.mark.parametrize(
    "placement",
    [{"policy": "spac"}, {"policy": "lfu"}, {"policy": "fate"}, {"policy": "sp-moe-prefetch"}],
    ids=lambda placement: placement["policy"],
)
def test_cache_gives_slots_back_in_mid_answer(
    placement: dict[str, str], pair: tuple[Path, Path], reference: list[int]
) -> None:
    machine = Machine()
    warnings: list[str] = []

    def notify(text: str) -> None:
        if isinstance(text, Notification) and text.level is Level.WARNING:
            warnings.append(text)

    with Session.open(config(pair, 0.75, placement=placement)) as session:
        manager = session.placement
        assert manager is not None
        manager.run.show = notify
        slot_bytes = int(manager.cache.groups()[2].max())
        machine.free_bytes = 10 * slot_bytes
        manager._watch = machine.watch(10 * slot_bytes)
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True)
        n_slots = []
        for step, _ in enumerate(generation):
            machine.time_s += 1.0
            machine.free_bytes = {3: 0, 4: 0, 6: 4 * slot_bytes, 7: 4 * slot_bytes}.get(step, 10 * slot_bytes)
            n_slots.append(manager.cache.info.n_slots)
        check(session, PROMPT, reference, generation.tokens)
        smaller = [n for n, before in zip(n_slots[1:], n_slots, strict=False) if n != before]
        assert n_slots[0] == 36
        assert smaller[0] == 26
        assert len(warnings) == len(smaller)
        stats = stats_of(session)
        assert stats.slots_total == manager.cache.info.n_slots == smaller[-1]
        assert stats.uploads - stats.evictions == stats.slots_used <= smaller[-1]
        assert stats.blocks >= N_LAYERS * stats.steps, "counters go on"
        assert stats.pairs_hit > 0


def test_a_cache_that_is_off_gives_slots_back_as_well(pair: tuple[Path, Path], reference: list[int]) -> None:
    """Its slots are on the device while steps are computed without it."""
    machine = Machine()
    with Session.open(config(pair, 0.75)) as session:
        manager = session.placement
        assert manager is not None
        manager.governor = NeverPays()
        reserve_bytes = 10 * int(manager.cache.groups()[2].max())
        machine.free_bytes = reserve_bytes
        manager._watch = machine.watch(reserve_bytes)
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True)
        for step, _ in enumerate(generation):
            machine.time_s += 1.0
            machine.free_bytes = 0 if step in (3, 4) else reserve_bytes
            assert step == 0 or not manager.active
        check(session, PROMPT, reference, generation.tokens)
        assert manager.cache.info.n_slots == 26 and not manager.active
        manager.attach()
        manager.governor = None
        check(session, PROMPT, reference, answer(session))
        assert manager.active and manager.cache.stats().slots_used > 0


def test_cache_without_room_is_off_and_the_answer_goes_on(pair: tuple[Path, Path], reference: list[int]) -> None:
    machine = Machine()
    with Session.open(config(pair, 0.5)) as session:
        manager = session.placement
        assert manager is not None
        machine.free_bytes = manager.cache.info.pool_bytes
        manager._watch = machine.watch(machine.free_bytes)
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True)
        for step, _ in enumerate(generation):
            machine.time_s += 1.0
            machine.free_bytes = 0 if step > 4 else machine.free_bytes
        check(session, PROMPT, reference, generation.tokens)
        assert manager.cache.info.n_slots == manager.cache.info.pool_bytes == 0
        assert not manager.active
        tokens = session.generate(PROMPT, n_predict=8, sampling=GREEDY, ignore_eos=True)
        assert len(list(tokens)) > 0
        manager.resize(N_LAYERS * N_EXPERTS // 2)
        assert manager.active
        assert np.all(manager.cache.residency() == 0)


def test_cache_that_cannot_be_opened_again_is_off_and_the_answer_goes_on(
    pair: tuple[Path, Path], reference: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cache = ExpertCache._open

    def fail_with_slots(cache: ExpertCache) -> None:
        if cache._config.ratio > 0:
            raise EngineError("There is no memory.")
        open_cache(cache)

    machine, warnings = Machine(), list[str]()
    with Session.open(config(pair, 0.75)) as session:
        manager = session.placement
        assert manager is not None
        manager.run.show = warnings.append
        reserve_bytes = 10 * int(manager.cache.groups()[2].max())
        machine.free_bytes = reserve_bytes
        manager._watch, manager._op_offload = machine.watch(reserve_bytes), False
        monkeypatch.setattr(ExpertCache, "_open", fail_with_slots)
        generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True)
        for step, _ in enumerate(generation):
            machine.time_s += 1.0
            machine.free_bytes = 0 if step > 4 else reserve_bytes
        check(session, PROMPT, reference, generation.tokens)
        assert manager.cache.info.n_slots == 0 and not manager.active
        assert len(warnings) == 1 and "is off" in warnings[0] and "Prompts" in warnings[0]
        again = session.generate(PROMPT, n_predict=8, sampling=GREEDY, ignore_eos=True)
        assert len(list(again)) > 0
