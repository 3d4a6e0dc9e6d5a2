"""Slots in RAM while other programs take memory and give it back, between computations and in a prompt."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.hardware.devices import VramReading
from moeedge.native.cache import ExpertCache
from moeedge.run import Level, Notification, Run
from moeedge.scheduler import slot_memory
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.native_io import CacheStore
from moeedge.scheduler.slot_memory import LOST, SlotMemory, slots_of
from tests.conftest import TinyFactory
from tests.support.experts import model_experts
from tests.support.machine import FreeMemory, Here
from tests.support.sessions import answered

N_LAYERS, N_EXPERTS = 3, 16
N_ALL = N_LAYERS * N_EXPERTS
RESERVE_SLOTS = 10
TOKENS = np.random.default_rng(5).integers(0, 256, 200).tolist()


class Slots(SlotMemory):
    """The memory of a cache in RAM for all experts, and the machine's: neither short nor ample."""

    def __init__(self, path: Path, *, is_full: bool = True) -> None:
        cache = ExpertCache(model_experts(path).config(1.0, device="ram"))
        if is_full:
            CacheStore(cache).push_uploads(np.argwhere(np.ones((N_LAYERS, N_EXPERTS))).astype(np.int32))
            assert cache.drain(20)
            assert cache.stats().slots_used == N_ALL
        _, capacity, expert_bytes = cache.groups()
        self.slot_bytes = int((capacity * expert_bytes).sum()) // cache.info.n_slots
        self.machine = FreeMemory(step_s=1.0)
        self.free(2 * RESERVE_SLOTS - 1)
        super().__init__(cache, path, N_LAYERS, self.machine.watch(RESERVE_SLOTS * self.slot_bytes))

    def free(self, n_slots: int) -> None:
        """So much memory is free from now on."""
        self.machine.free_bytes = n_slots * self.slot_bytes

    @property
    def n_slots(self) -> int:
        return self.cache.info.n_slots

    def updated(self, n_times: int) -> list[Level]:
        """Of the notifications of so many turns of the thread."""
        for _ in range(n_times):
            self.update()
        return levels(self.check())


Open = Callable[[float], Slots]


@pytest.fixture
def opened(tiny_moe: Path, here: Here) -> Iterator[Open]:
    """Opens the memory of a full cache; its thread checks it at each interval."""
    memories: list[Slots] = []

    def open_memory(interval_s: float) -> Slots:
        here.set_memory_interval(interval_s)
        memories.append(Slots(tiny_moe))
        return memories[-1]

    yield open_memory
    for memory in memories:
        memory.close()
        memory.cache.close()


@pytest.fixture
def memory(opened: Open) -> Slots:
    """Its thread never checks."""
    return opened(1000)


def wait_until(happened: Callable[[], bool]) -> None:
    """Up to 20 s."""
    end_s = time.monotonic() + 20
    while not happened() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert happened()


def levels(found: list[Notification]) -> list[Level]:
    return [note.level for note in found]


def test_a_thread_gives_slots_back_and_takes_them_again(opened: Open) -> None:
    memory = opened(0.005)
    assert memory.check() == [] and memory.n_slots == N_ALL
    memory.free(2)
    wait_until(lambda: memory.n_slots < N_ALL)
    memory.free(RESERVE_SLOTS)
    n_left = memory.n_slots
    assert N_LAYERS <= n_left <= N_ALL - 8
    assert memory.cache.stats().slots_used <= n_left
    assert set(levels(memory.check())) == {Level.WARNING}, "the next check returns what the thread did"
    memory.free(1000)
    wait_until(lambda: memory.n_slots == N_ALL)
    assert levels(memory.check()) == [Level.NOTICE]
    memory.close()
    assert not any(thread.name == "moeedge-memory" for thread in threading.enumerate())
    memory.free(0)
    assert memory.check() == memory.check() == [], "it checks no more"


def test_a_check_neither_gives_slots_back_nor_waits_for_that(memory: Slots) -> None:
    """It is called between two steps: the copies of experts would hold the answer up."""
    memory.free(0)
    assert [memory.check() for _ in range(8)] == [[]] * 8
    assert memory.n_slots == N_ALL
    memory.update()
    memory.update()
    assert memory.n_slots < N_ALL
    with memory._lock:  # as if the thread were copying
        checking = threading.Thread(target=memory.check, daemon=True)
        checking.start()
        checking.join(20)
        assert not checking.is_alive()
    assert levels(memory.check()) == [Level.WARNING], "once it is done"


def test_a_slot_for_each_layer_stays_so_that_it_recovers(memory: Slots) -> None:
    memory.free(-(10**6))
    assert memory.updated(8) == [Level.WARNING], "once"
    assert 0 < memory.n_slots <= N_LAYERS
    memory.free(1000)
    assert memory.updated(25) == [Level.NOTICE]
    assert memory.n_slots == N_ALL


def test_room_for_an_allocation(memory: Slots) -> None:
    size = memory.slot_bytes
    assert [slots_of(memory.cache, n) for n in (0, 1, 2 * size, -size // 2, -3 * size)] == [0, 1, 2, 0, -3]
    memory.free(RESERVE_SLOTS + 5)
    memory.make_room(5 * size)
    assert memory.n_slots == N_ALL and memory.check() == []
    memory.make_room(20 * size)
    assert N_ALL - 17 <= memory.n_slots <= N_ALL - 15
    assert levels(memory.check()) == [Level.WARNING]
    memory.free(0)
    memory.make_room(1 << 50)
    assert 0 < memory.n_slots <= N_LAYERS


def test_empty_slots_leave_room_as_well(tiny_moe: Path, here: Here) -> None:
    """They will be filled, so memory that is free now is not free for others; they give none back."""
    here.set_memory_interval(1000)
    memory = Slots(tiny_moe, is_full=False)
    memory.free(30 + RESERVE_SLOTS)
    memory.make_room(10 * memory.slot_bytes)
    assert 18 <= memory.n_slots <= 20
    memory.check()
    memory.free(RESERVE_SLOTS // 2 - 1)
    assert memory.updated(2) == [Level.WARNING]
    assert memory.n_slots == N_LAYERS, "none holds an expert"
    memory.close()
    memory.cache.close()


def test_trouble_is_notified_once(memory: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are not understood, then a lost cache."""
    monkeypatch.setattr(memory.cache, "trouble", lambda: (False, 3))
    assert [levels(memory.check()), memory.check()] == [[Level.WARNING], []]
    assert not memory.lost
    read_ahead: list[Path] = []
    monkeypatch.setattr(slot_memory, "let_experts_read_ahead", read_ahead.append)
    monkeypatch.setattr(memory.cache, "trouble", lambda: (True, 0))
    memory.free(0)
    assert [memory.check(), memory.check(), memory.check()] == [[LOST], [], []]
    assert memory.lost and len(read_ahead) == 1
    assert memory.n_slots <= N_LAYERS, "the page cache needs the memory"


@pytest.mark.parametrize("closes_cache", [True, False])
def test_the_thread_ends_with_its_memory(tiny_moe: Path, here: Here, closes_cache: bool) -> None:
    here.set_memory_interval(0.005)
    memory = Slots(tiny_moe)
    thread, cache = memory._thread, memory.cache
    assert thread.is_alive()
    if closes_cache:
        cache.close()
    else:
        del memory
    thread.join(20)
    assert not thread.is_alive()
    cache.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork with threads
def test_a_forked_process_does_not_wait_for_the_thread(memory: Slots) -> None:
    with memory._lock:  # as if the thread were checking
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            with memory._locked():
                memory.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert memory.check() == []


@pytest.mark.usefixtures("cache_folder")
def test_slots_go_between_answers(tiny: TinyFactory, here: Here) -> None:
    """A chat waits for a message: a thread gives memory back, and the next answer says so."""
    path = tiny("qwen3moe", experts=64)
    here.set_memory_interval(0.02)
    config = EngineConfig(model=path, n_ctx=512, n_threads=1, gamma=0, device="none", ram=64 << 20)
    said: list[Notification] = []
    with Session.open(config, run=Run(said.append)) as session:
        manager, cache = session.placement, session.placement.cache
        expected = answered(session, TOKENS, 6).tokens
        n_used = cache.stats().slots_used
        slot_bytes = int(cache.groups()[2].max())
        machine = FreeMemory(5 * slot_bytes, step_s=0.3)
        said.clear()
        manager.tiers[0].slots.watch = machine.watch(40 * slot_bytes)
        wait_until(lambda: cache.stats().slots_used <= n_used - 30)
        machine.free_bytes = 50 * slot_bytes
        assert said == [], "not into a line that is being typed"
        wait_until(lambda: session.watch_memory() or bool(said))  # the thread takes slots, then notes it
        assert set(levels(said)) == {Level.WARNING}
        session.target.clear()
        assert answered(session, TOKENS, 6).tokens == expected
        machine.free_bytes = 0  # while it closes


@pytest.mark.usefixtures("cache_folder")
def test_slots_go_within_a_prompt_and_come_back(tiny: TinyFactory, here: Here) -> None:
    path = tiny("qwen3moe", layers=4, embd=256, experts=64, expert_ff=256)
    here.set_memory_interval(0.005)
    placement = PlacementConfig(disk_bytes_per_s=60e6)
    config = EngineConfig(model=path, n_ctx=512, n_threads=1, gamma=0, device="none", ram=64 << 20, placement=placement)
    said: list[Notification] = []
    with Session.open(config) as session:
        manager, cache, target = session.placement, session.placement.cache, session.target
        manager.run.show = lambda text: said.append(text) if isinstance(text, Notification) else None
        expected = answered(session, TOKENS, 6).tokens
        n_opened = cache.info.n_slots
        slot_bytes = int(cache.groups()[2].max())
        cache.clear()
        target.clear()

        machine = FreeMemory(40 * slot_bytes, step_s=0.3)
        in_prompt: list[int] = []

        def read() -> VramReading:
            if in_prompt:
                machine.free_bytes = (5 if cache.stats().slots_used > 100 else 30) * slot_bytes
            return machine.read()

        def look() -> bool:
            if target.n_past == 0:
                in_prompt.append(cache.info.n_slots)
            return False

        manager.tiers[0].slots.watch = machine.watch(40 * slot_bytes)
        manager.tiers[0].slots.watch.read = read
        assert answered(session, TOKENS, 6, run=Run(cancelled=look)).tokens == expected
        assert in_prompt[0] == n_opened > in_prompt[-1], "in the middle of its only batch"
        assert cache.info.n_slots <= 100
        assert cache.stats().slots_used > 4, "it was not opened again"
        assert set(levels(said)) == {Level.WARNING}

        said.clear()
        in_prompt.clear()
        machine.free_bytes = 1000 * slot_bytes
        target.clear()
        end_s = time.monotonic() + 20
        while Level.NOTICE not in levels(said) and time.monotonic() < end_s:
            target.clear()
            answered(session, TOKENS[:20], 10)
        assert cache.info.n_slots == n_opened
        assert levels(said) == [Level.NOTICE]
