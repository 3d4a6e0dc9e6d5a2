"""Slots in RAM while other programs take memory and give it back, between computations."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moeedge.hardware.devices import ResolvedDevice, VramReading
from moeedge.llama.gguf_file import expert_tensors
from moeedge.native.cache import CacheConfig, ExpertCache
from moeedge.run import Level, Notification
from moeedge.scheduler import slot_memory
from moeedge.scheduler.native_io import CacheStore
from moeedge.scheduler.slot_memory import LOST, MemoryWatch, SlotMemory, slots_of

DEVICE = ResolvedDevice("ram", ggml_name="ram", label="RAM")
N_LAYERS, N_EXPERTS = 3, 16
RESERVE_SLOTS = 10


@dataclass
class Machine:
    """Free memory in slots; each reading of the clock is a second later."""

    slot_bytes: int
    free_slots: int = 2 * RESERVE_SLOTS - 1  # neither short nor ample
    time_s: float = 0.0

    def clock(self) -> float:
        self.time_s += 1.0
        return self.time_s

    def read(self, _device: ResolvedDevice) -> VramReading:
        free_bytes = self.free_slots * self.slot_bytes
        return VramReading(0, free_bytes, free_bytes, "test")


def open_full(path: Path) -> ExpertCache:
    """A cache in RAM with all experts."""
    tensors, files = expert_tensors(path)
    cache = ExpertCache(
        CacheConfig(device="ram", files=files, tensors=tensors, n_layers=N_LAYERS, n_experts=N_EXPERTS, ratio=1.0)
    )
    CacheStore(cache).push_uploads(np.argwhere(np.ones((N_LAYERS, N_EXPERTS))).astype(np.int32))
    assert cache.drain(20)
    assert cache.stats().slots_used == N_LAYERS * N_EXPERTS
    return cache


@pytest.fixture
def opened(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], tuple[SlotMemory, Machine]]]:
    """Opens the memory of a full cache; its thread checks it at each interval."""
    memories: list[SlotMemory] = []

    def open_memory(interval_s: float) -> tuple[SlotMemory, Machine]:
        monkeypatch.setattr(slot_memory, "_INTERVAL_S", interval_s)
        cache = open_full(tiny_moe)
        _, capacity, expert_bytes = cache.groups()
        machine = Machine(slot_bytes=int((capacity * expert_bytes).sum()) // cache.info.n_slots)
        watch = MemoryWatch(DEVICE, RESERVE_SLOTS * machine.slot_bytes, read=machine.read, clock=machine.clock)
        memories.append(SlotMemory(cache, tiny_moe, N_LAYERS, watch))
        return memories[-1], machine

    yield open_memory
    for memory in memories:
        memory.close()
        memory.cache.close()


def wait_until(happened: Callable[[], bool]) -> None:
    """Up to 20 s."""
    end_s = time.monotonic() + 20
    while not happened() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert happened()


def levels(found: list[Notification]) -> list[Level]:
    return [note.level for note in found]


def test_a_thread_gives_slots_back_and_takes_them_again(
    opened: Callable[[float], tuple[SlotMemory, Machine]],
) -> None:
    memory, machine = opened(0.005)
    n_all = N_LAYERS * N_EXPERTS
    assert memory.check() == [] and memory.cache.info.n_slots == n_all
    machine.free_slots = 2
    wait_until(lambda: memory.cache.info.n_slots < n_all)
    machine.free_slots = RESERVE_SLOTS
    n_left = memory.cache.info.n_slots
    assert N_LAYERS <= n_left <= n_all - 8
    assert memory.cache.stats().slots_used <= n_left
    assert set(levels(memory.check())) == {Level.WARNING}, "the next check returns what the thread did"
    machine.free_slots = 1000
    wait_until(lambda: memory.cache.info.n_slots == n_all)
    assert levels(memory.check()) == [Level.NOTICE]
    memory.close()
    assert not any(thread.name == "moeedge-memory" for thread in threading.enumerate())
    machine.free_slots = 0
    assert memory.check() == memory.check() == [], "it checks no more"


def test_a_check_neither_gives_slots_back_nor_waits_for_that(
    opened: Callable[[float], tuple[SlotMemory, Machine]],
) -> None:
    """It is called between two steps: the copies of experts would hold the answer up."""
    memory, machine = opened(1000)
    machine.free_slots = 0
    assert [memory.check() for _ in range(8)] == [[]] * 8
    assert memory.cache.info.n_slots == N_LAYERS * N_EXPERTS
    memory.update()
    memory.update()
    assert memory.cache.info.n_slots < N_LAYERS * N_EXPERTS
    with memory._lock:  # as if the thread were copying
        checking = threading.Thread(target=memory.check, daemon=True)
        checking.start()
        checking.join(20)
        assert not checking.is_alive()
    assert levels(memory.check()) == [Level.WARNING], "once it is done"


def updated(memory: SlotMemory, n_times: int) -> list[Notification]:
    """The notifications of so many turns of the thread."""
    for _ in range(n_times):
        memory.update()
    return memory.check()


def test_a_slot_for_each_layer_stays_so_that_it_recovers(
    opened: Callable[[float], tuple[SlotMemory, Machine]],
) -> None:
    memory, machine = opened(1000)
    machine.free_slots = -(10**6)
    assert levels(updated(memory, 8)) == [Level.WARNING], "once"
    assert 0 < memory.cache.info.n_slots <= N_LAYERS
    machine.free_slots = 1000
    assert levels(updated(memory, 25)) == [Level.NOTICE]
    assert memory.cache.info.n_slots == N_LAYERS * N_EXPERTS


def test_room_for_an_allocation(opened: Callable[[float], tuple[SlotMemory, Machine]]) -> None:
    memory, machine = opened(1000)
    machine.free_slots = RESERVE_SLOTS + 5
    n_all = N_LAYERS * N_EXPERTS
    memory.make_room(5 * machine.slot_bytes)
    assert memory.cache.info.n_slots == n_all and memory.check() == []
    memory.make_room(20 * machine.slot_bytes)
    assert n_all - 17 <= memory.cache.info.n_slots <= n_all - 15
    assert levels(memory.check()) == [Level.WARNING]
    machine.free_slots = 0
    memory.make_room(1 << 50)
    assert 0 < memory.cache.info.n_slots <= N_LAYERS


def test_empty_slots_leave_room_as_well(tiny_moe: Path) -> None:
    """They will be filled, so memory that is free now is not free for others."""
    tensors, files = expert_tensors(tiny_moe)
    config = CacheConfig(device="ram", files=files, tensors=tensors, n_layers=3, n_experts=16, ratio=1.0)
    with ExpertCache(config) as cache:
        machine = Machine(slot_bytes=slot_bytes_of(cache), free_slots=30 + RESERVE_SLOTS)
        watch = MemoryWatch(DEVICE, RESERVE_SLOTS * machine.slot_bytes, read=machine.read)
        memory = SlotMemory(cache, tiny_moe, N_LAYERS, watch)
        memory.make_room(10 * machine.slot_bytes)
        memory.close()
        assert 18 <= cache.info.n_slots <= 20


def slot_bytes_of(cache: ExpertCache) -> int:
    _, capacity, expert_bytes = cache.groups()
    return int((capacity * expert_bytes).sum()) // cache.info.n_slots


def test_a_lost_cache_is_notified_once(
    opened: Callable[[float], tuple[SlotMemory, Machine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, machine = opened(1000)
    read_ahead: list[Path] = []
    monkeypatch.setattr(slot_memory, "let_experts_read_ahead", read_ahead.append)
    monkeypatch.setattr(memory.cache, "trouble", lambda: (True, 0))
    machine.free_slots = 0
    assert [memory.check(), memory.check(), memory.check()] == [[LOST], [], []]
    assert memory.lost and len(read_ahead) == 1
    assert memory.cache.info.n_slots <= N_LAYERS, "the page cache needs the memory"


def test_blocks_that_are_not_understood_are_notified_once(
    opened: Callable[[float], tuple[SlotMemory, Machine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, _ = opened(1000)
    monkeypatch.setattr(memory.cache, "trouble", lambda: (False, 3))
    assert [levels(memory.check()), memory.check()] == [[Level.WARNING], []]
    assert not memory.lost


def test_the_thread_ends_with_its_memory(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_memory, "_INTERVAL_S", 0.005)
    for closes_cache in (True, False):
        cache = open_full(tiny_moe)
        machine = Machine(slot_bytes=slot_bytes_of(cache))
        memory = SlotMemory(cache, tiny_moe, N_LAYERS, MemoryWatch(DEVICE, 1, read=machine.read))
        thread = memory._thread
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
def test_a_forked_process_does_not_wait_for_the_thread(
    opened: Callable[[float], tuple[SlotMemory, Machine]],
) -> None:
    memory, _ = opened(1000)
    with memory._lock:  # as if the thread were checking
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            with memory._locked():
                memory.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert memory.check() == []


def test_slots_of_bytes(opened: Callable[[float], tuple[SlotMemory, Machine]]) -> None:
    memory, machine = opened(1000)
    bytes_of = machine.slot_bytes
    found = [slots_of(memory.cache, n) for n in (0, 1, 2 * bytes_of, -bytes_of // 2, -3 * bytes_of)]
    assert found == [0, 1, 2, 0, -3]
