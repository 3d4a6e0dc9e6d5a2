"""Simulated time: one heap of (time, number, process); the number makes ties deterministic.

A process is a generator. It yields how long it wants to sleep (nanoseconds, an integer), or a Signal that it waits for:

    def worker():
        yield 50            # 50 ns later
        yield signal        # when signal.fire() was called; at once if it was before

Times are integers, so that the same input gives the same events on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator

Process = Generator["int | Signal", None, None]


def to_ns(seconds: float) -> int:
    """Nanoseconds, rounded."""
    return round(seconds * 1e9)


class Signal:
    """Something that happens once."""

    def __init__(self) -> None:
        self.fired = False
        self._waiting: list[Process] = []

    def wait(self, process: Process) -> None:
        """Lets `process` go on when this fires."""
        self._waiting.append(process)

    def fire(self, clock: Clock) -> None:
        """It happened: whoever waits goes on, in the order in which it came to wait."""
        self.fired = True
        waiting, self._waiting = self._waiting, []
        for process in waiting:
            clock.schedule(process, clock.now_ns)


class Clock:
    """Runs processes in the order of time."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._number = 0
        self._heap: list[tuple[int, int, Process]] = []

    def schedule(self, process: Process, when_ns: int) -> None:
        """Lets `process` go on at `when_ns`, behind whatever was scheduled for that time before."""
        if when_ns < self.now_ns:
            raise ValueError(f"{when_ns} ns is over: it is {self.now_ns} ns")
        heapq.heappush(self._heap, (when_ns, self._number, process))
        self._number += 1

    def start(self, process: Process) -> None:
        """A new process, from now on."""
        self.schedule(process, self.now_ns)

    def run(self) -> None:
        """Until nothing is left to happen; processes that still wait for a signal are dropped."""
        while self._heap:
            self.now_ns, _, process = heapq.heappop(self._heap)
            self._advance(process)

    def _advance(self, process: Process) -> None:
        try:
            wish = next(process)
            while isinstance(wish, Signal) and wish.fired:
                wish = next(process)
        except StopIteration:
            return
        if isinstance(wish, Signal):
            wish.wait(process)
        else:
            self.schedule(process, self.now_ns + wish)
