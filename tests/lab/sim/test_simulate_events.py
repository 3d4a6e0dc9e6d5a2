"""The clock, the copy stream and the rules of execution, against times worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeedge.experts import Residency, Resident
from moeedge.lab.sim.clock import Clock, Signal
from moeedge.lab.sim.execution import CAUSES, Execution, TimeBreakdown
from moeedge.lab.sim.mover import Mover
from moeedge.lab.sim.noisy_predictor import NoisyPredictor, PredictorAccuracy
from moeedge.lab.sim.step_costs import TOKENS_MAX, StepCosts
from moeedge.lab.traces.schedule import Batch
from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan

CPU, DEVICE, MOVE, LATENCY, DENSE, HEAD, DRAFT, SYNC = 1000, 100, 400, 10, 50, 7, 300, 20


def costs(**changes: object) -> StepCosts:
    tokens = np.minimum(np.arange(TOKENS_MAX + 1), 1).astype(np.int64)
    values: dict[str, object] = {
        "cpu_ns": tokens * CPU,
        "device_ns": tokens * DEVICE,
        "block_ns": 0,
        "sync_ns": SYNC,
        "transfer_ns": MOVE,
        "demand_ns": MOVE,
        "latency_ns": LATENCY,
        "dense_ns": DENSE,
        "head_ns": HEAD,
        "draft_ns": DRAFT,
        "schedule_ns": 0,
    }
    return StepCosts(**(values | changes))  # type: ignore[arg-type]


def plan(shape: CacheShape, uploads: Sequence[tuple[int, int]], victims: Sequence[tuple[int, int]] = ()) -> Plan:
    return Plan(
        tau=np.ones(shape.n_layers, dtype=np.float32),
        utility=np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32),
        uploads=np.array(uploads, dtype=np.int32).reshape(-1, 2),
        priority=np.ones(len(uploads), dtype=np.uint8),
        victims=np.array(victims, dtype=np.int32).reshape(-1, 2),
        victim_utility=np.zeros(len(victims), dtype=np.float32),
    )


class Fixed:
    """Loads the same experts in the first plan, and nothing after."""

    name = "fixed"
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape, uploads: Sequence[tuple[int, int]], execution_model: ExecutionModel) -> None:
        self.shape, self.uploads, self.execution_model = shape, list(uploads), execution_model

    def observe(self, observation: Observation) -> None: ...

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        uploads, self.uploads = self.uploads, []
        return plan(self.shape, uploads)

    def reset(self) -> None: ...


def run(
    execution_model: ExecutionModel, uploads: Sequence[tuple[int, int]], n_drafts: int = 0, **changes: object
) -> TimeBreakdown:
    """One layer of four experts, of which every token uses 0 and 1; the second of two steps counts."""
    shape = CacheShape.uniform(1, 4, 4)
    ids = np.array([[[0, 1]] * (n_drafts + 1)], dtype=np.int32)
    counts = np.array([[n_drafts + 1, n_drafts + 1, 0, 0]], dtype=np.int32)
    known = {"ids": ids, "counts": counts, "n_tokens": ids.shape[1], "n_accepted": n_drafts}
    steps = [Batch(**known, is_first=index == 0) for index in range(2)]
    execution = Execution(
        costs(**changes),
        shape,
        Fixed(shape, uploads, execution_model),
        steps,
        accuracy=PredictorAccuracy(),
        warm_steps=1,
    )
    time = execution.run()
    assert sum(time.ns[cause] for cause in CAUSES) == time.total_ns
    return time


def test_processes_run_in_the_order_of_time_and_then_of_number() -> None:
    clock, log = Clock(), []
    bell = Signal()

    def walker(name: str, ns: int) -> Iterator[int | Signal]:
        yield ns
        log.append((name, clock.now_ns))
        yield bell
        log.append((name, clock.now_ns))

    def ringer() -> Iterator[int | Signal]:
        yield 30
        bell.fire(clock)

    for process in (walker("a", 20), walker("b", 10), walker("c", 20), ringer(), walker("late", 40)):
        clock.start(process)  # type: ignore[arg-type]
    clock.run()
    assert log == [("b", 10), ("a", 20), ("c", 20), ("b", 30), ("a", 30), ("c", 30), ("late", 40), ("late", 40)]


def test_scheduling_in_the_past_is_refused() -> None:
    clock = Clock()

    def sleeper() -> Iterator[int]:
        yield 5

    clock.start(sleeper())  # type: ignore[arg-type]
    clock.run()
    with pytest.raises(ValueError, match="is over"):
        clock.schedule(sleeper(), 3)  # type: ignore[arg-type]


def test_without_residents_the_cpu_computes_everything() -> None:
    time = run(ExecutionModel(), [])
    assert time.total_ns == DENSE + 2 * CPU + HEAD
    assert time.ns["cpu"] == 2 * CPU and time.hits.pairs_hit == 0


def test_cpu_and_device_work_at_the_same_time() -> None:
    time = run(ExecutionModel(), [(0, 0)], transfer_ns=0, latency_ns=0)
    assert time.total_ns == DENSE + SYNC + CPU + HEAD
    assert time.ns == dict.fromkeys(CAUSES, 0) | {
        "dense": DENSE + HEAD,
        "host": SYNC,
        "device": DEVICE,
        "cpu": CPU - DEVICE,
    }
    assert (time.hits.pairs, time.hits.pairs_hit) == (2, 1)


def test_resident_experts_need_no_cpu() -> None:
    time = run(ExecutionModel(), [(0, 0), (0, 1)], n_drafts=3)
    assert time.total_ns == 3 * DRAFT + DENSE + 2 * DEVICE + HEAD
    assert time.tokens == 4


def test_misses_are_moved_on_demand_while_hits_are_computed() -> None:
    time = run(ExecutionModel(device_only=True), [(0, 0)])
    assert time.total_ns == DENSE + LATENCY + MOVE + DEVICE + HEAD
    assert time.ns["load"] == LATENCY + MOVE - DEVICE
    assert time.hits.uploads == 1


def test_an_absent_layer_is_streamed_entirely() -> None:
    execution_model = ExecutionModel(device_only=True, layerwise=True)
    time = run(execution_model, [(0, 0)], dense_demand_ns=5)
    assert time.total_ns == DENSE + LATENCY + 4 * MOVE + 5 + 2 * DEVICE + HEAD
    assert time.hits.uploads == 4 and time.hits.pairs_hit == 0


def test_only_experts_in_use_are_moved_where_a_layer_is_not_moved_entirely() -> None:
    time = run(ExecutionModel(device_only=True, layerwise=True), [], whole_layers=False)
    assert time.total_ns == DENSE + LATENCY + 2 * MOVE + 2 * DEVICE + HEAD


def test_a_batch_of_uploads_waits_once() -> None:
    times = {}
    for batched in (False, True):
        clock, shape = Clock(), CacheShape.uniform(1, 4, 4)
        mover = Mover(clock, costs(), shape, batched=batched)
        mover.push(plan(shape, [(0, 0), (0, 1), (0, 2)]))
        clock.start(mover.process())
        clock.run()
        assert mover.resident[0].tolist() == [Residency.RESIDENT] * 3 + [0]
        times[batched] = clock.now_ns
    assert times == {False: 3 * (MOVE + LATENCY), True: 3 * MOVE + LATENCY}


experts = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=12, unique=True)


@settings(deadline=None, max_examples=60)
@given(plans=st.lists(st.tuples(experts, st.integers(0, 900), experts), max_size=8), capacity=st.integers(0, 6))
def test_slots_are_never_exceeded_and_pinned_experts_stay(
    plans: list[tuple[list[tuple[int, int]], int, list[tuple[int, int]]]], capacity: int
) -> None:
    clock, shape = Clock(), CacheShape.uniform(3, 5, capacity)
    mover = Mover(clock, costs(), shape, batched=False)

    def driver() -> Iterator[int | Signal]:
        for uploads, wait_ns, used in plans:
            resident = [tuple(expert) for expert in np.argwhere(mover.resident == Residency.RESIDENT).tolist()]
            pinned = [expert for expert in used if expert in resident and expert[0] == 0]
            mover.pin(0, [expert for _, expert in pinned])
            absent = [expert for expert in uploads if mover.resident[expert] == 0]
            mover.push(plan(shape, absent, resident))  # type: ignore[arg-type]
            for _ in range(3):
                yield wait_ns
                assert np.count_nonzero(mover.resident) <= capacity
                assert all(mover.resident[expert] == Residency.RESIDENT for expert in pinned)

    clock.start(mover.process())
    clock.start(driver())  # type: ignore[arg-type]
    clock.run()


def test_gates_look_over_dense_layers() -> None:
    """As in the engine: at the next layers that have experts, however many dense ones lie between."""
    ids = np.arange(6 * 2 * 2, dtype=np.int32).reshape(6, 2, 2) % 8
    ids[[1, 2, 4]] = -1
    predictor = NoisyPredictor(np.ones((6, 8)), PredictorAccuracy(next_gate=1.0, reach=2), 0)
    predicted = predictor.predict(ids)
    first, last = predicted.of_gates(0), predicted.of_gates(5)
    assert first is not None and last is not None
    assert np.array_equal(first.layer_ids[[3, 5]], ids[[3, 5]])
    assert (first.layer_ids[[0, 1, 2, 4]] == -1).all()
    assert (last.layer_ids == -1).all()
