"""Simulated time: one heap of (time, number, process); the number makes ties deterministic.

A process is a generator. It yields how long it wants to sleep (nanoseconds, an integer), or a Signal that it waits for:

    def worker():
        yield 50            # 50 ns later
        yield signal        # when signal.fire() was called; at once if it was before

Times are integers, so that the same input gives the same events on every machine.

What happened, when and where: spans of time on the streams of a machine, and their log.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from dataclasses import dataclass, field

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
            requested = next(process)
            while isinstance(requested, Signal) and requested.fired:
                requested = next(process)
        except StopIteration:
            return
        if isinstance(requested, Signal):
            requested.wait(process)
        else:
            self.schedule(process, self.now_ns + requested)


STREAMS = ("draft", "gpu", "cpu", "link", "host")


@dataclass(frozen=True)
class Span:
    """One piece of work of a stream; what concerns no layer or expert holds -1."""

    stream: str  # of STREAMS
    kind: str  # draft, dense, experts, upload, demand, plan
    start_ns: int
    end_ns: int
    step: int
    layer: int = -1
    n: int = 0  # experts, or tokens of a draft

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns

    def line(self) -> str:
        """One line of the log: tab-separated, in the order of the fields."""
        return f"{self.start_ns}\t{self.end_ns}\t{self.stream}\t{self.kind}\t{self.step}\t{self.layer}\t{self.n}"


@dataclass
class Log:
    """Spans in the order in which they were decided on, if `kept`; the busy time of each stream in any case."""

    kept: bool = True
    spans: list[Span] = field(default_factory=list)
    busy_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))

    def add(self, span: Span) -> None:
        """Notes one piece of work; empty ones leave no trace."""
        if span.ns <= 0:
            return
        self.busy_ns[span.stream] += span.ns
        if self.kept:
            self.spans.append(span)

    def of_step(self, step: int) -> list[Span]:
        """The spans of one step, transfers that began in it included."""
        return [span for span in self.spans if span.step == step]

    def text(self) -> str:
        """The whole log: a header and one line per span."""
        header = "start_ns\tend_ns\tstream\tkind\tstep\tlayer\tn\n"
        return header + "".join(span.line() + "\n" for span in self.spans)


class Stream:
    """Work that is done one after the other, first in first out: the GPU, the CPU pool."""

    def __init__(self, name: str, log: Log) -> None:
        self.name = name
        self.free_ns = 0
        self._log = log

    def submit(self, now_ns: int, ns: int, kind: str, step: int, layer: int = -1, n: int = 0) -> int:
        """Queues work of `ns`; when it will be done."""
        start_ns = max(now_ns, self.free_ns)
        self.free_ns = start_ns + ns
        self._log.add(Span(self.name, kind, start_ns, self.free_ns, step, layer, n))
        return self.free_ns
