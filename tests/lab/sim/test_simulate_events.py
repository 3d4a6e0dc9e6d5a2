"""The clock, the copy stream, the rules of execution and the calls to a GPU, against times worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeedge.experts import Residency, Resident
from moeedge.lab.sim.execution import CAUSES, Execution, TimeBreakdown
from moeedge.lab.sim.model_shape import entry_of, pick, read_data
from moeedge.lab.sim.noisy_predictor import PredictorAccuracy
from moeedge.lab.sim.step_costs import TOKENS_MAX, Calls, Handoff, StepCosts, find_handoff
from moeedge.lab.sim.streams import Clock, Mover, Signal
from moeedge.lab.traces.schedule import Batch
from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan

CPU, DEVICE, MOVE, LATENCY, DENSE, HEAD, DRAFT, SYNC = 1000, 100, 400, 10, 50, 7, 300, 20


def costs(**changes: object) -> StepCosts:
    tokens = np.minimum(np.arange(TOKENS_MAX + 1), 1).astype(np.int64)
    values: dict[str, object] = {
        "cpu_ns": tokens * CPU, "device_ns": tokens * DEVICE, "block_ns": 0, "sync_ns": SYNC, "transfer_ns": MOVE,
        "demand_ns": MOVE, "latency_ns": LATENCY, "dense_ns": DENSE, "head_ns": HEAD, "draft_ns": DRAFT,
        "schedule_ns": 0,
    }  # fmt: skip
    return StepCosts(**(values | changes))


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
    policy = Fixed(shape, uploads, execution_model)
    time = Execution(costs(**changes), shape, policy, steps, accuracy=PredictorAccuracy(), warm_steps=1).run()
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
        clock.start(process)
    clock.run()
    assert log == [("b", 10), ("a", 20), ("c", 20), ("b", 30), ("a", 30), ("c", 30), ("late", 40), ("late", 40)]


def test_without_residents_the_cpu_computes_everything() -> None:
    time = run(ExecutionModel(), [])
    assert time.total_ns == DENSE + 2 * CPU + HEAD
    assert time.ns["cpu"] == 2 * CPU and time.hits.pairs_hit == 0


def test_cpu_and_device_work_at_the_same_time() -> None:
    time = run(ExecutionModel(), [(0, 0)], transfer_ns=0, latency_ns=0)
    assert time.total_ns == DENSE + SYNC + CPU + HEAD
    parts = {"dense": DENSE + HEAD, "host": SYNC, "device": DEVICE, "cpu": CPU - DEVICE}
    assert time.ns == dict.fromkeys(CAUSES, 0) | parts
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
            mover.push(plan(shape, absent, resident))
            for _ in range(3):
                yield wait_ns
                assert np.count_nonzero(mover.resident) <= capacity
                assert all(mover.resident[expert] == Residency.RESIDENT for expert in pinned)

    clock.start(mover.process())
    clock.start(driver())
    clock.run()


def calls(fixed_ns: float, n_bytes: float = 0, *, blocking: bool = False) -> Calls:
    return Calls(fixed_s=fixed_ns * 1e-9, n_bytes=n_bytes, blocking=blocking)


DOWN_NS, SUBMIT_NS, JOIN_NS, UP_NS = 30, 7, 1, 3
ONE = {"down": calls(20, 10, blocking=True), "submit": calls(SUBMIT_NS), "join": calls(JOIN_NS), "up": calls(UP_NS)}
HANDOFF = Handoff(
    one=ONE, nine=ONE, cpu_region_s=5e-9, token_divide_s=2e-9, pageable_bytes_per_s=1e9, cpu_regions=2, divides=True,
)  # fmt: skip
RECORDS = Path(__file__).parents[3] / "docs" / "benchmarks"
FREE: dict[str, object] = {"transfer_ns": 0, "latency_ns": 0, "link_bytes_per_s": 1e12}  # uploads take no time


def fixed_s(handoff: Handoff, link_bytes_per_s: float, n_tokens: int = 1) -> float:
    """All that a layer costs apart from its experts."""
    moments = ("down", "submit", "join", "up")
    calls_s = sum(handoff.seconds(moment, n_tokens, link_bytes_per_s) for moment in moments)
    return calls_s + handoff.divide_s(n_tokens) + handoff.cpu_regions * handoff.cpu_region_s


def test_blocking_copies_take_the_rate_of_pageable_memory() -> None:
    assert HANDOFF.seconds("down", 1, 1e12) == pytest.approx(DOWN_NS * 1e-9)
    assert HANDOFF.seconds("down", 18, 1e12) == pytest.approx((DOWN_NS + 10) * 1e-9)  # twice the bytes of nine tokens
    fixed_ns = DOWN_NS + SUBMIT_NS + JOIN_NS + UP_NS + 2 + 2 * 5
    assert fixed_s(HANDOFF, 1e12) == pytest.approx(fixed_ns * 1e-9)
    times = pick(read_data("handoffs.json")["calls"], "chosen")
    stock = find_handoff("--n-cpu-moe").one["down"]  # two blocking copies, a wait and a synchronisation
    assert stock.fixed_s == pytest.approx(2 * times["blocking_copy_s"] + times["wait_s"] + times["sync_s"])
    assert (stock.n_bytes, stock.blocking) == (8224, True)


@pytest.mark.parametrize("hit", [0, 1, 2])
def test_a_divided_layer_by_hand(hit: int) -> None:
    """Experts 0 and 1 are used; `hit` of them are on the device."""
    found = run(ExecutionModel(), [(0, expert) for expert in range(hit)], handoff=HANDOFF, **FREE)
    before_ns = DOWN_NS + 2 + (SUBMIT_NS if hit else 0)
    after_ns = UP_NS + 5 + (JOIN_NS if hit else 0)
    halves_ns = max(hit * DEVICE, (2 - hit) * CPU + (5 if hit < 2 else 0))
    assert found.total_ns == DENSE + HEAD + before_ns + halves_ns + after_ns == sum(found.ns.values())
    assert found.ns["host"] == before_ns + after_ns


def test_a_half_that_is_launched_ahead_hides_the_way_down() -> None:
    ahead = replace(HANDOFF, launched_ahead=True)
    found = run(ExecutionModel(), [(0, 0), (0, 1)], handoff=ahead, **FREE)
    assert found.total_ns == DENSE + HEAD + 2 * DEVICE + JOIN_NS + UP_NS + 5  # longer than the way down
    slow = run(ExecutionModel(), [(0, 0)], handoff=ahead, **FREE)
    assert slow.total_ns == DENSE + HEAD + DOWN_NS + 2 + CPU + 5 + JOIN_NS + UP_NS + 5


def test_a_whole_layer_on_the_device_exchanges_nothing() -> None:
    layers = ExecutionModel(layerwise=True)
    found = run(layers, [(0, 0), (0, 1)], handoff=HANDOFF, **FREE)
    assert found.total_ns == DENSE + HEAD + 2 * DEVICE and found.ns["host"] == 0


@pytest.mark.parametrize(
    ("program", "file", "lane"),
    [
        ("--n-cpu-moe", "round-trips-0.6.0.json", "stock"),
        ("launched ahead", "round-trips.json", "moeedge-0.5-ahead"),
    ],
)
def test_the_calls_are_those_that_were_counted(program: str, file: str, lane: str) -> None:
    """Per layer, of one token and of nine; bytes of a block's two halves depend on the hit rate."""
    record = json.loads((RECORDS / file).read_text(encoding="utf-8"))
    entry = entry_of(read_data("handoffs.json")["programs"], program)
    for n_tokens, moments in ((1, entry["one"]), (9, entry["nine"])):
        counted = next(row for row in record["rows"] if (row["lane"], row["n_tokens"]) == (lane, n_tokens))["per_layer"]
        total = sum((Counter(each) for each in moments.values()), Counter[str]())
        for name in ("gets", "sets", "gets_async", "sets_async", "copies", "launches"):
            assert total[name] == pytest.approx(counted[name], abs=0.05), name
        assert total["waits"] + total["syncs"] == pytest.approx(counted["syncs"], abs=0.05)
        assert moments["up"]["bytes_up"] == pytest.approx(counted["bytes_up"], rel=0.01) or "divides" in entry
        assert moments["down"]["bytes_down"] <= counted["bytes_down"] * 1.01


def test_every_handoff_of_a_program_is_described() -> None:
    programs, data = read_data("programs.json")["programs"], read_data("handoffs.json")
    named = {entry["handoff"] for entry in programs.values() if "handoff" in entry}
    assert named <= set(data["programs"])
    assert all(entry["source"] for entry in data["programs"].values())
    assert set(data["calls"]) - {"sources"} == set(data["calls"]["sources"])
    assert np.isfinite([fixed_s(find_handoff(name), 25e9) for name in data["programs"]]).all()
