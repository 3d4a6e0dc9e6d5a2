"""The copy stream and the slots behind it: carries plans out, one expert after the other, as time allows.

The rules are those of the engine's mover: a plan replaces what is still queued, what is in flight goes on; an upload
takes a free slot, or that of the plan's lowest victim that is not in use; without either it is left out. What the
computation waits for (`demand`) goes before everything that is queued, into a staging buffer.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, Plan
from moeedge.sim.clock import Clock, Log, Process, Signal, Span
from moeedge.sim.machine import Machine

ABSENT, RESIDENT, IN_FLIGHT = 0, 1, 2
Cell = tuple[int, int]  # layer, expert


class Demand:
    """One transfer that the computation waits for."""

    def __init__(self, layer: int, n_experts: int, beside_ns: int) -> None:
        self.layer = layer
        self.n_experts = n_experts
        self.beside_ns = beside_ns  # for what else is moved
        self.arrived = Signal()
        self.start_ns = 0


class Mover:
    """Holds `resident`, uint8 [n_layers, n_experts], for the policy to look at."""

    def __init__(self, clock: Clock, log: Log, machine: Machine, shape: CacheShape, *, batched: bool) -> None:
        self.shape = shape
        self.resident: NDArray[np.uint8] = np.zeros((shape.n_layers, shape.n_experts), dtype=np.uint8)
        self.n_uploads = 0  # experts moved, on demand or not
        self.step = 0
        self._clock, self._log, self._machine = clock, log, machine
        self._batched = batched
        self._free = [int(n) for n in shape.capacity]
        self._queue: deque[Cell] = deque()
        self._victims: list[deque[Cell]] = [deque() for _ in range(shape.n_groups)]
        self._demands: deque[Demand] = deque()
        self._staged: set[Cell] = set()
        self._pinned: set[Cell] = set()
        self._arrivals: dict[Cell, Signal] = {}
        self._first = True  # of its plan
        self._work = Signal()
        self._drained = Signal()

    def push(self, plan: Plan) -> None:
        """A new plan; what lies in the staging buffer and is to stay takes its slot at once."""
        self._queue.clear()
        for group in self._victims:
            group.clear()
        for layer, expert in plan.victims.tolist():
            self._victims[self.shape.group[layer]].append((layer, expert))
        for layer, expert in plan.uploads.tolist():
            cell = (layer, expert)
            if cell not in self._staged:
                self._queue.append(cell)
            elif self.resident[cell] == ABSENT and self._take_slot(layer):
                self.resident[cell] = RESIDENT
        self._first = True
        self._wake()

    def clear_staging(self) -> None:
        """The step is over: what is in the staging buffer and was not kept is gone."""
        self._staged.clear()

    def pin(self, layer: int, experts: list[int]) -> None:
        """These are in use: no upload takes their slots until the next call."""
        self._pinned = {(layer, expert) for expert in experts}

    def demand(self, layer: int, experts: list[int], beside_ns: int = 0) -> Demand:
        """Moves the experts in one transfer, before everything that is queued."""
        wanted = Demand(layer, len(experts), beside_ns)
        self._demands.append(wanted)
        self._staged.update((layer, expert) for expert in experts)
        self._wake()
        return wanted

    def arrival(self, layer: int, expert: int) -> Signal | None:
        """The end of the transfer that brings this expert; None where it is not in flight."""
        return self._arrivals.get((layer, expert))

    def drained(self) -> Signal:
        """Nothing is queued or in flight any more."""
        if self._queue or self._demands or self._arrivals:
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

    def _serve(self, wanted: Demand) -> Process:
        machine, wanted.start_ns = self._machine, self._clock.now_ns
        ns = machine.latency_ns + wanted.n_experts * machine.demand_ns + wanted.beside_ns
        self._note("demand", ns, wanted.layer, wanted.n_experts)
        yield ns
        self.n_uploads += wanted.n_experts
        wanted.arrived.fire(self._clock)

    def _upload(self, cell: Cell) -> Process:
        layer, _ = cell
        if self.resident[cell] != ABSENT or cell in self._staged or not self._take_slot(layer):
            return
        self.resident[cell] = IN_FLIGHT
        arrived = self._arrivals[cell] = Signal()
        ns = self._machine.transfer_ns
        if self._first or not self._batched:
            ns += self._machine.latency_ns
        self._first = False
        self._note("upload", ns, layer, 1)
        yield ns
        self.resident[cell] = RESIDENT
        self.n_uploads += 1
        del self._arrivals[cell]
        arrived.fire(self._clock)

    def _take_slot(self, layer: int) -> bool:
        """A slot of the layer's group is free now, at the cost of a victim if need be."""
        group = int(self.shape.group[layer])
        if self._free[group] > 0:
            self._free[group] -= 1
            return True
        kept: list[Cell] = []
        found = False
        victims = self._victims[group]
        while victims and not found:
            victim = victims.popleft()
            if self.resident[victim] == RESIDENT and victim in self._pinned:
                kept.append(victim)
            elif self.resident[victim] == RESIDENT:
                self.resident[victim] = ABSENT
                found = True
        victims.extendleft(reversed(kept))
        return found

    def _note(self, kind: str, ns: int, layer: int, n: int) -> None:
        now_ns = self._clock.now_ns
        self._log.add(Span("link", kind, now_ns, now_ns + ns, self.step, layer, n))

    def _wake(self) -> None:
        if not self._work.fired:
            self._work.fire(self._clock)
