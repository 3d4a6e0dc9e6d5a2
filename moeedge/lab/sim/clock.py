"""Discrete events: a clock, signals between processes, and streams of work.

A process is a generator. It yields the nanoseconds that it sleeps (an integer), or a Signal that it waits for:

    def worker():
        yield 50            # resumes 50 ns later
        yield signal        # resumes once signal.fire() was called; at once if it was called before

Times are integers and the heap orders equal times by a counter, so the same input gives the same events everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator

Process = Generator["int | Signal", None, None]


def to_ns(seconds: float) -> int:
    """Nanoseconds, rounded."""
    return round(seconds * 1e9)


class Signal:
    """An event that fires once; processes wait for it."""

    def __init__(self) -> None:
        self.fired = False
        self._waiting: list[Process] = []

    def wait(self, process: Process) -> None:
        """Resumes `process` when the signal fires."""
        self._waiting.append(process)

    def fire(self, clock: Clock) -> None:
        """Resumes all waiting processes now, in the order in which they began to wait."""
        self.fired = True
        waiting, self._waiting = self._waiting, []
        for process in waiting:
            clock.schedule(process, clock.now_ns)


class Clock:
    """Runs processes in the order of time: one heap of (time, counter, process)."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._count = 0
        self._heap: list[tuple[int, int, Process]] = []

    def schedule(self, process: Process, when_ns: int) -> None:
        """Resumes `process` at `when_ns`, after all that were scheduled for that time before. ValueError if past."""
        if when_ns < self.now_ns:
            raise ValueError(f"{when_ns} ns is over: it is {self.now_ns} ns")
        heapq.heappush(self._heap, (when_ns, self._count, process))
        self._count += 1

    def start(self, process: Process) -> None:
        """Starts a new process now."""
        self.schedule(process, self.now_ns)

    def run(self) -> None:
        """Runs until the heap is empty; processes that still wait for a signal are dropped."""
        while self._heap:
            self.now_ns, _, process = heapq.heappop(self._heap)
            self._advance(process)

    def _advance(self, process: Process) -> None:
        try:
            awaited = next(process)
            while isinstance(awaited, Signal) and awaited.fired:
                awaited = next(process)
        except StopIteration:
            return
        if isinstance(awaited, Signal):
            awaited.wait(process)
        else:
            self.schedule(process, self.now_ns + awaited)


class Stream:
    """A device that works on one piece after the other, first in, first out: the GPU, the CPU's threads, the link."""

    def __init__(self) -> None:
        self.free_ns = 0
        self.busy_ns = 0

    def submit(self, now_ns: int, ns: int) -> int:
        """Queues work of `ns` nanoseconds and returns when it ends."""
        self.free_ns = max(now_ns, self.free_ns) + ns
        self.busy_ns += ns
        return self.free_ns
