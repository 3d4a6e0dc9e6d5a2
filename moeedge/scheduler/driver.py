"""The protocol between a policy and the store of its experts. One step of speculative decoding, seen from the policy:

    observe     the activations of the batch that was verified
    plan_next   the next batch, of which only the target's own token is known
    push        the store moves experts while the draft model works
    plan_draft  the entire next batch: that token and the drafts
    push        the store moves what the drafts changed, then the batch is verified
    push_layer  before each layer of the verification, for policies that plan layer by layer
    plan_load   as a layer is computed, for policies that keep what is loaded on demand (replay and simulator)

Engine, calibration, replay and simulator drive policies through this class alone, so that a policy sees the same calls
in the same order wherever it runs. It has no clock: the caller counts time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import IntArray, Resident
from moeedge.policies.base import ExecutionModel, ExpertPrediction, Observation, Plan, Policy

# changes a new plan: (plan, the prediction that it was made from, layers to plan for, None: all) -> plan
PlanFilter = Callable[[Plan, ExpertPrediction | None, slice | None], Plan]


class ExpertStore(Protocol):
    """Holds experts on a device: the native cache in the engine, slots in the replay, the mover in the simulator."""

    def residency(self) -> Resident:
        """[n_layers, n_experts]: bool, or uint8 of `Residency`."""

    def push(self, plan: Plan) -> object:
        """Replaces the queued transfers by those of `plan`."""


class StepDriver:
    """Drives one policy over one store. execution_model: obeyed instead of the policy's own.

    refills: its `refills_within_step` is obeyed, too.
    """

    def __init__(
        self,
        policy: Policy,
        store: ExpertStore,
        *,
        execution_model: ExecutionModel | None = None,
        refills: bool = False,
    ) -> None:
        self.store = store
        self._refills = refills
        # applied to every plan of `plan_next` and `plan_draft`, e.g. to keep only what was predicted
        self.filter_plan: PlanFilter | None = None
        self._execution_model = execution_model
        self.pushed: Plan | None = None  # the last plan that `push` handed over
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Goes on with that policy, a fresh one of the same kind where the store has other slots now."""
        self.policy = policy
        self.pending: Plan | None = None  # made, and not pushed yet
        self._obeyed = self._execution_model or policy.execution_model
        self._newest: Plan | None = None  # made since the last observation

    @property
    def plans_layers(self) -> bool:
        """Whether `push_layer` does anything."""
        return self._obeyed.prefetch_within_step or (self._refills and self._obeyed.refills_within_step)

    @property
    def keeps_loads(self) -> bool:
        """Whether `plan_load` returns plans."""
        return self._obeyed.keeps_loads

    @property
    def reads_drafts(self) -> bool:
        """Whether the next batch's drafts may change the plan."""
        lookahead = self.policy.lookahead
        return lookahead is None or lookahead.reads_drafts

    def begin_text(self) -> None:
        """A new conversation begins; the policy may keep what it learned about the model."""
        self._newest = None
        self.policy.reset()

    def observe(self, observation: Observation) -> None:
        """The activations of a verification, a plain decode or a prefill."""
        self._newest = None
        self.policy.observe(observation)

    def plan_next(self, tokens: Sequence[int]) -> Plan:
        """Plans for the next batch before it is drafted; `tokens` is its first token, or empty where it is unknown."""
        return self._plan(tokens, None, None)

    def plan_draft(
        self,
        tokens: Sequence[int],
        prediction: ExpertPrediction | None = None,
        hidden_states: NDArray[np.float32] | None = None,
        *,
        layers: slice | None = None,
    ) -> Plan:
        """Plans for a batch whose tokens are known: the token emitted last, and the drafts.

        prediction: of the batch's experts. hidden_states: float32 [n_states, n_embd], the draft's, of the batch's first
        tokens, for a policy that reads them if there is no prediction. layers: handed to `filter_plan`. Where the
        policy does not read drafts, the plan of `plan_next` stands: it is returned, and nothing is pending.
        """
        if self._newest is not None and not self.reads_drafts:
            return self._newest
        if prediction is None and hidden_states is not None and "draft-states" in self.policy.required_inputs:
            none = np.empty((len(self.store.residency()), 0, 0), dtype=np.int32)
            prediction = ExpertPrediction(layer_ids=none, hidden_states=hidden_states)
        return self._plan(tokens, prediction, layers)

    def push(self) -> Plan | None:
        """Hands the pending plan to the store and returns it; None where there is none."""
        plan, self.pending = self.pending, None
        if plan is not None:
            self.store.push(plan)
            self.pushed = plan
        return plan

    def push_layer(self, layer: int, prediction: ExpertPrediction | None = None) -> None:
        """Plans and pushes at once before `layer` of a verification, where the policy plans layer by layer."""
        if self.plans_layers:
            self.store.push(self.policy.plan_layer(layer, self.store.residency(), prediction))

    def plan_load(self, layer: int, counts: IntArray) -> Plan | None:
        """The slots for what `layer` with activations `counts` [n_experts] lacks now; None where it keeps no loads."""
        return self.policy.plan_load(layer, counts, self.store.residency()) if self.keeps_loads else None

    def _plan(self, tokens: Sequence[int], prediction: ExpertPrediction | None, layers: slice | None) -> Plan:
        plan = self.policy.plan(self.store.residency(), tokens, prediction)
        if self.filter_plan is not None:
            plan = self.filter_plan(plan, prediction, layers)
        self.pending = self._newest = plan
        return plan
