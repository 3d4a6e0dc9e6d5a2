"""Between a policy and its store: what is called in which order, the thread that plans, and what both are shown."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeedge.experts import Resident
from moeedge.native.abi import Phase
from moeedge.native.sensor import Frame
from moeedge.policies import base as policies
from moeedge.policies.base import ExecutionModel, ExpertPrediction, LookaheadStatus, Observation, Plan
from moeedge.scheduler.driver import StepDriver
from moeedge.scheduler.manager import PlanningThread
from moeedge.scheduler.native_io import RoutingReader
from moeedge.scheduler.prediction import PredictionAccuracy
from moeedge.scheduler.stats import PlacementStats
from moeedge.scheduler.tiers import RamStore

LAYERS, EXPERTS = 2, 4
NOTHING: Any = np.zeros((LAYERS, EXPERTS))


def make_plan(layer: int = 0) -> Plan:
    return Plan(
        tau=np.ones(LAYERS, dtype=np.float32),
        utility=np.zeros((LAYERS, EXPERTS), dtype=np.float32),
        uploads=np.array([[layer, 1]], dtype=np.int32),
        priority=np.ones(1, dtype=np.uint8),
        victims=np.zeros((0, 2), dtype=np.int32),
        victim_utility=np.zeros(0, dtype=np.float32),
    )


class Store:
    def __init__(self) -> None:
        self.pushed: list[Plan] = []

    def residency(self) -> Resident:
        return np.zeros((LAYERS, EXPERTS), dtype=np.uint8)

    def push(self, plan: Plan) -> None:
        self.pushed.append(plan)


class Policy(policies.Policy):
    """Records its calls."""

    name = "recorder"

    def __init__(self, *required_inputs: str) -> None:
        self.required_inputs = frozenset(required_inputs)
        self.calls: list[tuple[Any, ...]] = []

    def observe(self, observation: Observation) -> None:
        self.calls.append(("observe",))

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        self.calls.append(("plan", list(tokens), prediction))
        return make_plan()

    def reset(self) -> None:
        self.calls.append(("reset",))


class LayerwisePolicy(Policy):
    execution_model = ExecutionModel(prefetch_within_step=True)

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        self.calls.append(("plan_layer", layer))
        return make_plan(layer)


class JudgingPolicy(Policy):
    """Does not read drafts after its first observation."""

    @property
    def lookahead(self) -> LookaheadStatus:
        is_used = ("observe",) not in self.calls
        return LookaheadStatus(is_used, reason="it does not pay here", reads_drafts=is_used)


def test_a_step_is_observed_planned_twice_and_pushed_twice() -> None:
    policy, store = Policy(), Store()
    driver = StepDriver(policy, store)
    driver.begin_text()
    driver.observe(Observation(NOTHING, 1, 0))
    driver.plan_next([7])
    assert store.pushed == []
    first = driver.push()
    second_plan = driver.plan_draft([7, 8, 9])
    assert driver.push() is second_plan
    assert policy.calls == [("reset",), ("observe",), ("plan", [7], None), ("plan", [7, 8, 9], None)]
    assert store.pushed == [first, second_plan]
    assert driver.push() is None


def test_no_plan_is_made_for_drafts_that_the_policy_does_not_read() -> None:
    policy, store = JudgingPolicy(), Store()
    driver = StepDriver(policy, store)
    for _ in range(2):
        first = driver.plan_next([7])
        driver.push()
        draft = driver.plan_draft([7, 8, 9])
        driver.push()
        driver.observe(Observation(NOTHING, 3, 0))
    assert draft is first
    assert len(store.pushed) == 3
    assert not driver.reads_drafts and not policy.lookahead.used
    # a batch that no plan was made for since the last observation gets one
    assert driver.plan_draft([1, 2]) is driver.pending
    assert Policy().lookahead is None


def test_hidden_states_reach_only_a_policy_that_reads_them() -> None:
    states = np.zeros((2, 3), dtype=np.float32)
    for required, reads in (("draft-states", True), ("router-scores", False)):
        policy = Policy(required)
        StepDriver(policy, Store()).plan_draft([1, 2], hidden_states=states)
        prediction = policy.calls[-1][2]
        assert (prediction is not None) == reads
        if reads:
            assert prediction.hidden_states is states and prediction.layer_ids.shape[0] == LAYERS
            made = ExpertPrediction(np.zeros((LAYERS, 1, 1), dtype=np.int32))
            StepDriver(policy, Store()).plan_draft([1], made, states)
            assert policy.calls[-1][2] is made, "a prediction goes before hidden states"


def test_the_filter_changes_every_plan_of_a_batch() -> None:
    seen: list[slice | None] = []

    def drop_uploads(plan: Plan, prediction: ExpertPrediction | None, layers: slice | None) -> Plan:
        seen.append(layers)
        return replace(plan, uploads=plan.uploads[:0], priority=plan.priority[:0])

    store = Store()
    driver = StepDriver(Policy(), store)
    driver.filter_plan = drop_uploads
    driver.plan_next([1])
    driver.push()
    driver.plan_draft([1, 2], layers=slice(0, 1))
    driver.push()
    assert [len(plan.uploads) for plan in store.pushed] == [0, 0]
    assert seen == [None, slice(0, 1)]


@pytest.mark.parametrize(
    ("policy", "execution_model", "plans"),
    [
        (Policy(), None, False),
        (LayerwisePolicy(), None, True),
        (LayerwisePolicy(), ExecutionModel(), False),  # another execution model is obeyed instead of the policy's
    ],
)
def test_layers_are_planned_for_policies_that_do(
    policy: Policy, execution_model: ExecutionModel | None, plans: bool
) -> None:
    store = Store()
    driver = StepDriver(policy, store, execution_model=execution_model)
    driver.push_layer(1)
    assert driver.plans_layers == plans
    assert [plan.uploads.tolist() for plan in store.pushed] == ([[[1, 1]]] if plans else [])


def test_calls_run_in_order_next_to_the_caller() -> None:
    planning, seen, go = PlanningThread(), [], threading.Event()
    planning.submit(lambda: seen.append(go.wait(10)))
    for number in range(20):
        planning.submit(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert seen == []
    go.set()
    planning.wait()
    assert seen == [True, *range(20)]
    planning.wait()  # nothing to wait for
    planning.close()
    planning.close()


def test_an_error_is_raised_where_the_caller_waits() -> None:
    planning, seen = PlanningThread(), []
    planning.submit(lambda: 1 // 0)
    planning.submit(lambda: seen.append(1))
    with pytest.raises(ZeroDivisionError):
        planning.wait()
    assert seen == [1]
    planning.wait()
    planning.submit(lambda: 1 // 0)
    planning.close()
    assert not any(thread.name.startswith("moeedge-planning") for thread in threading.enumerate())


def test_an_interrupted_wait_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    planning, go, seen = PlanningThread(), threading.Event(), []
    planning.submit(lambda: seen.append(go.wait(10)))

    def interrupted(_condition: threading.Condition, _timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            planning.wait()
    go.set()
    planning.wait()
    assert seen == [True]
    planning.close()


def test_experts_that_the_device_holds_go_first_from_ram() -> None:
    seen: list[Any] = []
    score = np.array([[0.5, 2.0, 1.0]])
    cache, policy = SimpleNamespace(set_utilities=seen.append, residency=None), SimpleNamespace(score=score)
    tier: Any = SimpleNamespace(cache=cache, driver=SimpleNamespace(policy=policy), held_above=None)
    store: Any = RamStore(tier)
    store.push(None)
    tier.held_above = np.array([[False, True, False]])
    store.push(None)
    assert seen[0].tolist() == score.tolist()
    assert seen[1].argmin() == 1 and seen[1][0, [0, 2]].tolist() == [0.5, 1.0]


def test_predictions_are_counted_from_nothing() -> None:
    accuracy = PredictionAccuracy()
    assert accuracy.share is None
    accuracy.add(np.array([[[0, 1], [2, 3]]], dtype=np.int32), np.array([[[1, 5], [6, 7]]], dtype=np.int32))
    assert (accuracy.n_predicted, accuracy.n_correct, accuracy.share) == (4, 1, 0.25)


@pytest.mark.parametrize(("layer_tokens", "is_usable"), [([3, 0], True), ([3, 3], True), ([3, 2], False)])
def test_scores_are_of_a_whole_batch(layer_tokens: list[int], is_usable: bool) -> None:
    """A layer without a router has none; one of another batch makes all of them useless."""
    rows = np.full((2, 4, 5), 0.2, dtype=np.float32)
    captured = SimpleNamespace(rows=rows, layer_tokens=np.array(layer_tokens))
    reader = RoutingReader.__new__(RoutingReader)
    reader._scores = SimpleNamespace(read=lambda flags: captured)  # type: ignore[assignment]
    scores = reader._router_scores(3)
    assert (scores is not None) == is_usable
    assert scores is None or scores.sum(axis=-1).T[0] == pytest.approx([float(n > 0) for n in layer_tokens])


def test_intervals_of_figures_are_of_both_tiers() -> None:
    newer, older = (PlacementStats(pairs=n, ram=PlacementStats(pairs=10 * n)) for n in (5, 2))
    assert (newer - older).pairs == 3 and (newer - older).ram == PlacementStats(pairs=30)
    assert (newer - PlacementStats()).ram == newer.ram


def test_frames_of_an_interrupted_prompt_belong_to_no_other() -> None:
    def frame(serial: int, expert: int, n: int) -> Frame:
        ids = np.full((1, n, 1), expert, dtype=np.int32)
        weights = np.ones_like(ids, dtype=np.float32)
        return Frame(serial, int(Phase.PREFILL), n, np.array([n], dtype=np.int32), ids, weights)

    frames = [frame(1, 3, 2), frame(2, 3, 8), frame(3, 0, 3), frame(4, 1, 2)]  # 3 and 4 are the prompt's last graphs
    sensor: Any = SimpleNamespace(frames_after=lambda serial: [each for each in frames if each.serial > serial])
    reader = RoutingReader.__new__(RoutingReader)
    reader._sensor, reader._scores, reader._last_serial = sensor, None, 0
    pieces = reader.prefill(np.array([[3, 2, 2, 0]], dtype=np.uint32), [5, 6, 7, 8, 9, 10, 11])
    assert [piece.n_tokens for piece in pieces] == [2, 3, 2]
    assert [piece.counts.tolist() for piece in pieces] == [[[0, 0, 2, 0]], [[3, 0, 0, 0]], [[0, 2, 0, 0]]]
