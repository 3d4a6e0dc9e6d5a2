"""The protocol between a policy and its store: what is called, with which arguments, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moeedge.experts import Resident
from moeedge.policies import base as policies
from moeedge.policies.base import ExecutionModel, ExpertPrediction, LookaheadStatus, Observation, Plan
from moeedge.scheduler.driver import StepDriver

LAYERS, EXPERTS = 2, 4


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


def test_a_step_is_observed_planned_twice_and_pushed_twice() -> None:
    policy, store = Policy(), Store()
    driver = StepDriver(policy, store)
    driver.begin_text()
    driver.observe(Observation(np.zeros((LAYERS, EXPERTS)), 1, 0))  # type: ignore[arg-type]
    driver.plan_next([7])
    assert store.pushed == []
    first = driver.push()
    second_plan = driver.plan_draft([7, 8, 9])
    assert driver.push() is second_plan
    assert policy.calls == [("reset",), ("observe",), ("plan", [7], None), ("plan", [7, 8, 9], None)]
    assert store.pushed == [first, second_plan]
    assert driver.push() is None


class JudgingPolicy(Policy):
    """Does not read drafts after its first observation."""

    @property
    def lookahead(self) -> LookaheadStatus:
        is_used = ("observe",) not in self.calls
        return LookaheadStatus(is_used, reason="it does not pay here", reads_drafts=is_used)


def test_no_plan_is_made_for_drafts_that_the_policy_does_not_read() -> None:
    policy, store = JudgingPolicy(), Store()
    driver = StepDriver(policy, store)
    for _ in range(2):
        first = driver.plan_next([7])
        driver.push()
        draft = driver.plan_draft([7, 8, 9])
        driver.push()
        driver.observe(Observation(np.zeros((LAYERS, EXPERTS)), 3, 0))  # type: ignore[arg-type]
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


def test_a_prediction_goes_before_hidden_states() -> None:
    policy = Policy("draft-states")
    prediction = ExpertPrediction(np.zeros((LAYERS, 1, 1), dtype=np.int32))
    StepDriver(policy, Store()).plan_draft([1], prediction, np.zeros((1, 3), dtype=np.float32))
    assert policy.calls[-1][2] is prediction


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
