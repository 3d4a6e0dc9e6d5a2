"""Memory of slots: whether a device runs short of it, and slots in RAM that give it back and take it again.

llama.cpp and the kernels allocate during a decode, and some backends end the process where that fails (CUDA): when
another program takes memory, slots have to give some back before the rest is gone. Slots in RAM are memory that the
kernel can only swap, so that a thread reads the free memory also while a chat waits or a warm start fills the slots.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread

from moeedge.errors import MoeedgeError
from moeedge.hardware.devices import VramReading
from moeedge.llama.dense_weights import let_experts_read_ahead
from moeedge.native.cache import ExpertCache
from moeedge.run import Level, Notification
from moeedge.units import format_bytes

_INTERVAL_S = 0.5  # between two checks by the thread
_READING_INTERVAL_S = 0.5  # between two readings
_SHORT = 0.5  # of the reserve: what is left is short below this share, so that small changes free nothing
_AMPLE = 2.0  # of the reserve: from this share on there is memory to take
_AMPLE_READINGS = 20  # in a row: a program that comes and goes should not make the cache shrink and grow all the time
_READINGS = 2  # in a row that agree: a program that starts frees some of its memory at once
LOST = "Experts can no longer be loaded into RAM: the mapped file is read from here on, which is slow."


def slots_of(cache: ExpertCache, n_bytes: int) -> int:
    """The number of slots that take at least so many bytes; of a negative number, at most."""
    _, capacity, expert_bytes = cache.groups()
    return -(-n_bytes * cache.info.n_slots // int((capacity * expert_bytes).sum()))


@dataclass(eq=False)
class MemoryWatch:
    """Reads the free memory of a device, or of this machine, now and then."""

    reserve_bytes: int  # what is to stay free
    read: Callable[[], VramReading | None]
    clock: Callable[[], float] = time.monotonic
    free_bytes: int = 0  # at the last reading
    _n_short: int = 0
    _n_ample: int = 0

    def __post_init__(self) -> None:
        self._next_s = self.clock() + _READING_INTERVAL_S

    def missing_bytes(self) -> int:
        """Bytes to free so that the reserve is free again, 0 without a shortage; cheap enough for every step."""
        if self.clock() < self._next_s:
            return 0
        self._next_s = self.clock() + _READING_INTERVAL_S
        spare_bytes, reserve_bytes = self.read_spare_bytes(), self.reserve_bytes
        is_known = spare_bytes is not None
        self.free_bytes = 0 if spare_bytes is None else spare_bytes + reserve_bytes
        self._n_ample = self._n_ample + 1 if is_known and self.free_bytes >= _AMPLE * reserve_bytes else 0
        self._n_short = self._n_short + 1 if is_known and self.free_bytes < _SHORT * reserve_bytes else 0
        if self._n_short < _READINGS:
            return 0
        self._n_short = 0
        return self.reserve_bytes - self.free_bytes

    def read_spare_bytes(self) -> int | None:
        """Free bytes above the reserve, negative where it is short, by a reading at once; None where unknown."""
        with suppress(MoeedgeError):  # a driver that does not answer
            reading = self.read()
            return None if reading is None else reading.free_bytes - self.reserve_bytes
        return None

    def take_spare_bytes(self) -> int:
        """How much has been free for a while by the readings of `missing_bytes`; then 0, until it has been again."""
        if self._n_ample < _AMPLE_READINGS:
            return 0
        self._n_ample = 0
        return self.free_bytes - self.reserve_bytes


class SlotMemory:
    """Gives slots of a cache in RAM back where memory runs short, and tells the user of trouble with the cache.

    n_layers: with experts in host memory; so many slots always stay. watch: of the machine's memory. lost: experts can
    no longer be loaded. Any thread may call; a forked process does not have this object's thread.
    """

    def __init__(self, cache: ExpertCache, model: Path, n_layers: int, watch: MemoryWatch) -> None:
        self.cache, self.watch = cache, watch
        self.lost = self._warned_unknown = self._closed = False
        self._model, self._n_layers, self._n_slots_opened = model, n_layers, cache.info.n_slots
        self._waiting: list[Notification] = []  # to be returned by the next `check`
        self._lock, self._process = Lock(), os.getpid()
        self._stop = Event()
        arguments = (weakref.ref(self), self._stop)
        self._thread = Thread(target=_update_periodically, args=arguments, name="moeedge-memory", daemon=True)
        self._thread.start()

    def check(self) -> list[Notification]:
        """Checks the cache; returns the notifications since the last call, those of the thread too.

        Also during a decode, and cheap enough for every step: a thread that works just then makes it return none.
        """
        lock, notifications = self._locked(), list[Notification]()
        if lock.acquire(blocking=False):
            try:
                self._check_cache()
                notifications, self._waiting = self._waiting, []
            finally:
                lock.release()
        return notifications

    def make_room(self, n_bytes: int) -> None:
        """Gives so many slots back, empty ones too, that `n_bytes` can be allocated and the reserve stays free."""
        with self._locked():
            spare_bytes = self.watch.read_spare_bytes()
            if spare_bytes is None:
                return
            n_left = self.cache.stats().slots_used - slots_of(self.cache, n_bytes - spare_bytes)
            self._limit(n_left, f"{format_bytes(n_bytes)} of memory are needed")

    def close(self) -> None:
        """Ends the thread. `check` then returns the notifications that are left. May be called twice."""
        self._closed = True
        if self._thread.is_alive():  # not in a forked process, where the event's lock may be held for ever
            self._stop.set()
            self._thread.join()

    def update(self) -> None:
        """Checks the cache and the free memory: the thread's work. Keeps the notifications for the next `check`."""
        with self._locked():
            self._check_cache()
            self._check_memory()

    def _locked(self) -> Lock:
        if self._process != os.getpid():  # the thread may have held the lock when this process was forked
            self._lock, self._process = Lock(), os.getpid()
        return self._lock

    def _check_cache(self) -> None:
        if self.lost or self._closed:
            return
        self.lost, n_unknown = self.cache.trouble()
        if self.lost:
            with suppress(MoeedgeError):  # a file that is gone
                let_experts_read_ahead(self._model)
            with suppress(MoeedgeError):
                self.cache.limit(0)  # the page cache needs the memory
            self._warn(LOST)
        elif n_unknown and not self._warned_unknown:
            self._warned_unknown = True
            text = "The experts of some layers are read from the file at each use, which is slow: moeedge does not"
            self._warn(f"{text} recognise how these layers compute.")

    def _warn(self, text: str, level: Level = Level.WARNING) -> None:
        self._waiting.append(Notification(text, level))

    def _check_memory(self) -> None:
        if self.lost or self._closed:
            return
        missing_bytes = self.watch.missing_bytes()
        # memory of slots is taken as experts arrive: those that hold nothing give nothing back
        if missing_bytes:
            n_left = self.cache.stats().slots_used - slots_of(self.cache, missing_bytes)
            self._limit(n_left, f"Only {format_bytes(self.watch.free_bytes)} of memory are free")
        elif self.cache.info.n_slots < self._n_slots_opened:
            self._take(self.watch.take_spare_bytes())

    def _limit(self, n_left: int, reason: str) -> None:
        """Leaves about `n_left` slots if there are more, but one per layer: with fewer it could not grow again."""
        n_left = max(n_left, self._n_layers)
        if n_left < self.cache.info.n_slots:
            self._resize(n_left, f"{reason}: RAM now holds at most")

    def _take(self, spare_bytes: int) -> None:
        """Uses slots again that were given back."""
        n_slots = self.cache.stats().slots_used + slots_of(self.cache, spare_bytes)
        if spare_bytes > 0 and n_slots > self.cache.info.n_slots:
            reason = f"{format_bytes(self.watch.free_bytes)} of memory are free again"
            self._resize(min(n_slots, self._n_slots_opened), f"{reason}: RAM now holds up to", Level.NOTICE)

    def _resize(self, n_slots: int, text: str, level: Level = Level.WARNING) -> None:
        before = self.cache.info.n_slots
        self.cache.limit(n_slots)
        if (now := self.cache.info.n_slots) != before:
            self._warn(f"{text} {now:,} experts instead of {before:,}.", level)


def _update_periodically(memory: weakref.ref[SlotMemory], stop: Event) -> None:
    """The thread: until `stop` is set, the cache is closed, or no reference to the memory is left."""
    while not stop.wait(_INTERVAL_S):
        slots = memory()
        if slots is None:
            return
        try:
            slots.update()
        except MoeedgeError:  # the cache is closed
            return
        del slots
