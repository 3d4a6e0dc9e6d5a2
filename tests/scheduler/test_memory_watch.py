"""A device that runs short of memory: when that is noticed, and what the cache gives back in mid-answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.errors import DeviceError, EngineError
from moeedge.native.cache import ExpertCache
from moeedge.run import Level, Notification
from tests.scheduler.conftest import N_PREDICT, PROMPT
from tests.scheduler.test_manager import N_EXPERTS, N_LAYERS, Pair, answer, check, config
from tests.support.hybrid import NeverPays
from tests.support.machine import MIB, FreeMemory
from tests.support.sessions import GREEDY


def test_shortage_is_what_the_reserve_lacks_at_two_readings() -> None:
    memory = FreeMemory()
    watch = memory.watch(400 * MIB)

    def at(time_s: float, free_mib: int) -> int:
        memory.time_s, memory.free_bytes = time_s, free_mib * MIB
        return watch.missing_bytes() // MIB

    def fail() -> None:
        raise DeviceError("The driver does not answer.", "Wait.")

    assert [at(0.1, 0), memory.n_readings] == [0, 0], "not before the interval is over"
    assert [at(1, 1000), at(2, 250), at(3, 201), at(4, 200)] == [0, 0, 0, 0], "less than the reserve, but not short"
    assert [at(5, 100), at(6, 300), at(7, 100), at(8, 150)] == [0, 0, 0, 250], "two in a row"
    assert [at(9, 0), at(9.1, 0), at(10, 0)] == [0, 0, 400], "the next shortage needs two readings again"
    watch.read = fail
    assert [at(11, 0), at(12, 0)] == [0, 0]


def test_memory_may_be_taken_after_it_was_free_for_ten_seconds() -> None:
    memory = FreeMemory()
    watch = memory.watch(400 * MIB)

    def taken(free_mib: int, n_readings: int) -> list[int]:
        found = []
        memory.free_bytes = free_mib * MIB
        for _ in range(n_readings):
            memory.time_s += 0.5
            assert watch.missing_bytes() == 0
            found.append(watch.take_spare_bytes() // MIB)
        return found

    taken(799, 1)  # the first interval
    assert taken(799, 30) == [0] * 30, "not twice the reserve"
    assert taken(1000, 19) == [0] * 19
    assert taken(799, 1) == [0], "in a row"
    assert taken(800, 25) == [0] * 19 + [400] + [0] * 5, "once"


def governed_answer(session: Session, reserve_bytes: int, free_at: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """The answer's tokens, and the number of slots after each step, at whose end so much memory is free."""
    memory = FreeMemory(reserve_bytes)
    manager = session.placement
    manager.tiers[0].watch = memory.watch(reserve_bytes)
    generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True)
    n_slots = []
    for step, _ in enumerate(generation):
        memory.time_s += 1.0
        memory.free_bytes = free_at(step)
        n_slots.append(manager.cache.info.n_slots)
    return generation.tokens, n_slots


def slot_bytes_of(session: Session) -> int:
    return int(session.placement.cache.groups()[2].max())


@pytest.mark.parametrize("policy", ["spac", "lfu", "fate", "sp-moe-prefetch"])
def test_cache_gives_slots_back_in_mid_answer(policy: str, pair: Pair, reference: list[int]) -> None:
    warnings: list[str] = []

    def notify(text: str) -> None:
        if isinstance(text, Notification) and text.level is Level.WARNING:
            warnings.append(text)

    with Session.open(config(pair, 0.75, placement={"policy": policy})) as session:
        session.placement.run.show = notify
        size = slot_bytes_of(session)
        free = {3: 0, 4: 0, 6: 4 * size, 7: 4 * size}
        tokens, n_slots = governed_answer(session, 10 * size, lambda step: free.get(step, 10 * size))
        check(session, PROMPT, reference, tokens)
        smaller = [n for n, before in zip(n_slots[1:], n_slots, strict=False) if n != before]
        assert (n_slots[0], smaller[0]) == (36, 26)
        assert len(warnings) == len(smaller)
        stats = session.placement_stats()
        assert stats.slots_total == session.placement.cache.info.n_slots == smaller[-1]
        assert stats.state == "shrunk"
        assert stats.uploads - stats.evictions == stats.slots_used <= smaller[-1]
        assert stats.blocks >= N_LAYERS * stats.steps, "counters go on"
        assert stats.pairs_hit > 0


def test_a_cache_that_is_off_gives_slots_back_as_well(pair: Pair, reference: list[int]) -> None:
    """Its slots are on the device while steps are computed without it."""
    with Session.open(config(pair, 0.75)) as session:
        manager = session.placement
        manager.governor = NeverPays()
        reserve_bytes = 10 * slot_bytes_of(session)

        def free_at(step: int) -> int:
            assert step == 0 or not manager.active
            return 0 if step in (3, 4) else reserve_bytes

        check(session, PROMPT, reference, governed_answer(session, reserve_bytes, free_at)[0])
        assert manager.cache.info.n_slots == 26 and not manager.active and manager.first.state == "shrunk"
        manager.attach()
        manager.governor = None
        check(session, PROMPT, reference, answer(session))
        assert manager.active and manager.cache.stats().slots_used > 0


@pytest.mark.parametrize("opens_again", [True, False])
def test_cache_without_room_is_off_and_the_answer_goes_on(
    pair: Pair, reference: list[int], monkeypatch: pytest.MonkeyPatch, opens_again: bool
) -> None:
    """All of its memory is needed, or the cache cannot be opened with fewer slots."""
    open_cache = ExpertCache._open

    def fail_with_slots(cache: ExpertCache) -> None:
        if cache._config.ratio > 0:
            raise EngineError("There is no memory.")
        open_cache(cache)

    warnings = list[str]()
    with Session.open(config(pair, 0.5)) as session, monkeypatch.context() as patch:
        manager = session.placement
        manager.run.show, manager._op_offload = warnings.append, False
        reserve_bytes = manager.cache.info.pool_bytes if opens_again else 10 * slot_bytes_of(session)
        if not opens_again:
            patch.setattr(ExpertCache, "_open", fail_with_slots)
        tokens, _ = governed_answer(session, reserve_bytes, lambda step: 0 if step > 4 else reserve_bytes)
        check(session, PROMPT, reference, tokens)
        assert manager.cache.info.n_slots == manager.cache.info.pool_bytes == 0 and not manager.active
        assert len(warnings) == 1 and "is off" in warnings[0] and "Prompts" in warnings[0]
        assert answer(session, n_predict=8)
        patch.undo()
        manager.tiers[0].resize(N_LAYERS * N_EXPERTS // 2)
        assert manager.active and np.all(manager.cache.residency() == 0)
