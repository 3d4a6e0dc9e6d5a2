"""Discrete events: a clock, signals between processes, and streams of work, the copy stream with its slots among them.

A process is a generator. It yields the nanoseconds that it sleeps (an integer), or a Signal that it waits for:

    def worker():
        yield 50            # resumes 50 ns later
        yield signal        # resumes once signal.fire() was called; at once if it was called before

Times are integers and the heap orders equal times by a counter, so the same input gives the same events everywhere.

The copy stream executes plans one expert after the other, as time allows. The rules are those of the engine's mover. A
plan replaces what is still queued; what is in flight goes on. An upload takes a free slot, or that of the plan's lowest
victim that is not in use; without either it is left out. Experts that the computation waits for (`demand`) go before
everything that is queued, into a staging buffer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency
from moeedge.lab.sim.step_costs import StepCosts
from moeedge.policies.base import CacheShape, Plan

Process = Generator["int | Signal", None, None]


class Signal:
    """An event that fires once; processes wait for it."""

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Process] = []

    def fire(self, clock: Clock) -> None:
        """Resumes all waiting processes now, in the order in which they began to wait."""
        self.fired = True
        waiting, self.waiting = self.waiting, []
        for process in waiting:
            clock.schedule(process, clock.now_ns)


class Clock:
    """Runs processes in the order of time: one heap of (time, counter, process)."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._count = 0
        self._heap: list[tuple[int, int, Process]] = []

    def schedule(self, process: Process, when_ns: int) -> None:
        """Resumes `process` at `when_ns`, not before now, after all that were scheduled for that time before."""
        heapq.heappush(self._heap, (when_ns, self._count, process))
        self._count += 1

    def start(self, process: Process) -> None:
        self.schedule(process, self.now_ns)

    def run(self) -> None:
        """Runs until the heap is empty; processes that still wait for a signal are dropped."""
        while self._heap:
            self.now_ns, _, process = heapq.heappop(self._heap)
            awaited = next(process, None)
            while isinstance(awaited, Signal) and awaited.fired:
                awaited = next(process, None)
            if isinstance(awaited, Signal):
                awaited.waiting.append(process)
            elif awaited is not None:  # it goes on
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


Expert = tuple[int, int]  # layer, expert


@dataclass(eq=False)
class Demand:
    """One transfer that the computation waits for."""

    n_experts: int
    rest_ns: int  # time of what is moved in addition to the experts
    arrived: Signal = field(default_factory=Signal)
    start_ns: int = 0


class Mover:
    """An expert store (scheduler/driver.py) with time; `resident` is uint8 [n_layers, n_experts] of Residency."""

    def __init__(self, clock: Clock, costs: StepCosts, shape: CacheShape, *, batched: bool) -> None:
        self.shape = shape
        self.resident: NDArray[np.uint8] = np.zeros((shape.n_layers, shape.n_experts), dtype=np.uint8)
        self.n_uploads = 0  # experts moved, on demand or not
        self.busy_ns = 0
        self._clock, self._costs = clock, costs
        self._batched = batched
        self._free = [int(n) for n in shape.capacity]
        self._queue: deque[Expert] = deque()
        self._victims: list[list[Expert]] = [[] for _ in range(shape.n_groups)]
        self._demands: deque[Demand] = deque()
        self._staged: set[Expert] = set()
        self._pinned: set[Expert] = set()
        self.arrivals: dict[Expert, Signal] = {}  # the ends of the uploads in flight that no computation waits for
        self._is_first = True  # upload of its plan
        self._work = Signal()
        self._drained = Signal()

    def residency(self) -> NDArray[np.uint8]:
        """`resident`, which changes as time goes by."""
        return self.resident

    def push(self, plan: Plan) -> None:
        """Replaces the queue by a plan; experts in the staging buffer that are to stay take their slots at once."""
        self._queue.clear()
        for group in self._victims:
            group.clear()
        for layer, expert in plan.victims.tolist():
            self._victims[self.shape.group[layer]].append((layer, expert))
        for layer, expert in plan.uploads.tolist():
            if (layer, expert) not in self._staged:
                self._queue.append((layer, expert))
            elif self.resident[layer, expert] == Residency.ABSENT and self._take_slot(layer):
                self.resident[layer, expert] = Residency.RESIDENT
        self._is_first = True
        self._wake()

    def clear_staging(self) -> None:
        """Drops the experts of the staging buffer that no plan kept: the step is over."""
        self._staged.clear()

    def pin(self, layer: int, experts: list[int]) -> None:
        """Marks experts as in use: no upload takes their slots until the next call."""
        self._pinned = {(layer, expert) for expert in experts}

    def demand(self, layer: int, experts: list[int], rest_ns: int = 0) -> Demand:
        """Moves the experts in one transfer, before everything that is queued."""
        demand = Demand(len(experts), rest_ns)
        self._demands.append(demand)
        self._staged.update((layer, expert) for expert in experts)
        self._wake()
        return demand

    def drained(self) -> Signal:
        """Fires once nothing is queued or in flight."""
        if self._queue or self._demands or self.arrivals:
            self._drained = Signal()
        return self._drained

    def process(self) -> Process:
        """The copy stream."""
        while True:
            if self._demands:
                yield from self._serve(self._demands.popleft())
            elif self._queue:
                yield from self._upload(self._queue.popleft())
            else:
                self._drained.fire(self._clock)
                self._work = Signal()
                yield self._work

    def _serve(self, demand: Demand) -> Process:
        demand.start_ns = self._clock.now_ns
        ns = self._costs.latency_ns + demand.n_experts * self._costs.demand_ns + demand.rest_ns
        self.busy_ns += ns
        yield ns
        self.n_uploads += demand.n_experts
        demand.arrived.fire(self._clock)

    def _upload(self, expert: Expert) -> Process:
        layer, _ = expert
        if self.resident[expert] != Residency.ABSENT or expert in self._staged or not self._take_slot(layer):
            return
        self.resident[expert] = Residency.IN_FLIGHT
        arrived = self.arrivals[expert] = Signal()
        ns = self._costs.transfer_ns
        if self._is_first or not self._batched:
            ns += self._costs.latency_ns
        self._is_first = False
        self.busy_ns += ns
        yield ns
        self.resident[expert] = Residency.RESIDENT
        self.n_uploads += 1
        del self.arrivals[expert]
        arrived.fire(self._clock)

    def _take_slot(self, layer: int) -> bool:
        """Takes a slot of the layer's group, if need be that of a victim; False where there is none."""
        group = int(self.shape.group[layer])
        if self._free[group] > 0:
            self._free[group] -= 1
            return True
        victims = self._victims[group]
        for victim in victims:
            if self.resident[victim] == Residency.RESIDENT and victim not in self._pinned:
                self.resident[victim] = Residency.ABSENT
                victims.remove(victim)
                return True
        return False

    def _wake(self) -> None:
        if not self._work.fired:
            self._work.fire(self._clock)
