"""The counting device itself: what it counts, what it executes late, which races it finds, how it fails."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.counting import DEVICE, CountingDevice, Flag, Kind, count
from tests.support.raw_ggml import Queue, Tensors, blocking_get, synchronize_event, tensors_and_queues, zeros

ONES = np.ones(64, np.float32)


def test_nothing_is_read_before_a_synchronisation(counting: CountingDevice) -> None:
    with counting.late(), tensors_and_queues(DEVICE) as (tensors, queue, _):
        found = zeros()
        queue.set(tensors["x"], ONES)
        queue.compute(tensors.graph)
        queue.get(tensors["double"], found)
        assert np.isnan(found).all()
        queue.synchronize()
        assert (found == 2).all()


def test_an_event_orders_two_queues(counting: CountingDevice) -> None:
    with counting.late(), tensors_and_queues(DEVICE) as (tensors, first, second):
        found = zeros()
        event = first.new_event()
        first.set(tensors["x"], ONES)
        first.record(event)
        second.wait_for(event)
        second.compute(tensors.graph)
        second.get(tensors["double"], found)
        second.record(event)
        synchronize_event(event)
        assert (found == 2).all()


@pytest.mark.parametrize("late", [0, 1])
def test_races_are_found(late: int, counting: CountingDevice) -> None:
    """Without the event; a blocking get, which no queue orders; a source that changes before it is copied."""
    counting.set("defer", late)
    with tensors_and_queues(DEVICE) as (tensors, first, second):
        counting.reset()
        first.set(tensors["x"], ONES)
        second.compute(tensors.graph)
        assert len(counting.hazards()) == 1 and "set x (queue" in counting.hazards()[0]
        first.synchronize()
        second.synchronize()

        counting.reset()
        first.compute(tensors.graph)
        blocking_get(tensors["double"], zeros())
        assert len(counting.hazards()) == 1 and "get double (host)" in counting.hazards()[0]
        first.synchronize()
        blocking_get(tensors["double"], zeros())
        assert len(counting.hazards()) == 1

        counting.reset()
        source = zeros()
        first.set(tensors["x"], source)
        source += 1
        first.synchronize()
        assert len(counting.hazards()) == late
    counting.set("defer", 0)


def test_what_is_counted(counting: CountingDevice) -> None:
    with tensors_and_queues(DEVICE) as (tensors, first, second):
        counting.reset()
        first.set(tensors["x"], ONES)
        first.compute(tensors.graph)
        first.synchronize()
        first.synchronize()  # finds nothing
        second.copy_from(first, tensors["double"], tensors["y"])
        second.synchronize()
        blocking_get(tensors["y"], zeros())
        timeline = counting.timeline()
        counting.check()
    counts = count(timeline)
    assert (counts.launches, counts.nodes, counts.sets_async, counts.copies, counts.gets) == (1, 1, 1, 1, 1)
    assert (counts.syncs, counts.waits, counts.round_trips) == (3, 3, 1)
    assert counts.bytes_up == counts.bytes_down == counts.bytes_copied == ONES.nbytes
    assert counts.bytes_pageable == 2 * ONES.nbytes  # NumPy's memory is not pinned
    launch = timeline[timeline["kind"] == Kind.GRAPH][0]
    assert launch["name"] == b"double" and launch["n_nodes"] == 1


def test_a_graph_can_fail(counting: CountingDevice) -> None:
    with tensors_and_queues(DEVICE) as (tensors, queue, _):
        queue.set(tensors["x"], ONES)
        with counting.failing(2):
            assert [queue.compute(tensors.graph) for _ in range(3)] == [0, -1, 0]
        with counting.failing(1, mode=1):
            assert [queue.compute(tensors.graph) for _ in range(3)] == [-1, -1, -1]
        assert queue.compute(tensors.graph) == 0


def test_memory_is_limited_and_taken_by_others(counting: CountingDevice) -> None:
    queue = Queue(DEVICE)
    counting.set("other_bytes", (8 << 30) - 4096 - counting.allocated_bytes)
    counting.reset()
    fitting, too_large = Tensors(queue, 64, ["x"]), Tensors(queue, 4096, ["x"])
    refused = counting.timeline()
    assert fitting.buffer and not too_large.buffer
    assert (refused["flags"][refused["kind"] == Kind.ALLOC] & Flag.FAILED).any()
    fitting.close()
    counting.set("other_bytes", 0)
    queue.close()
