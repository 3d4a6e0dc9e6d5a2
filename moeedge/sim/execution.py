"""One run: draft, verify layer by layer, observe, plan, on the streams of a machine; the policy's traits are the rules.

  hybrid       (the default) what is resident is computed by the device, the rest by the CPU, at the same time
  device only  what is missing is moved on demand and computed on the device; resident experts go first
  layerwise    a layer is on one side as a whole; device only, a missing one is streamed through

A step's time is the sum of its parts, for each of which the device is working or waits for one cause:

  draft   the draft model            dense   attention, routers and the rest
  device  experts on the device      cpu     waiting for experts on the CPU
  load    waiting for a transfer that was demanded
  link    waiting for the link, which is busy with what nobody waits for, or for a prefetch that comes late
  host    synchronisation, observing and planning
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, LayerPolicy, Observation, Policy
from moeedge.sim.clock import Clock, Log, Process, Span, Stream
from moeedge.sim.machine import Machine
from moeedge.sim.mover import RESIDENT, Demand, Mover
from moeedge.sim.noisy_predictor import NoisyPredictorInTime
from moeedge.trace.schedule import Batch

CAUSES = ("draft", "dense", "device", "cpu", "load", "link", "host")
_PARTS = 16  # of drafting, after each of which a policy that looks at the draft plans anew


@dataclass
class TimeBreakdown:
    """Nanoseconds by cause, and what was hit, over some steps."""

    ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    total_ns: int = 0
    steps: int = 0
    tokens: int = 0  # of text
    pairs: int = 0
    pairs_hit: int = 0
    unique: int = 0
    unique_hit: int = 0
    uploads: int = 0


class Execution:
    """Runs `steps`; the first `warm_steps` verifications are not accounted for. `traits`: other than the policy's."""

    def __init__(
        self,
        machine: Machine,
        shape: CacheShape,
        policy: Policy,
        steps: Sequence[Batch],
        *,
        stand_in: NoisyPredictorInTime,
        execution_model: ExecutionModel | None = None,
        warm_steps: int = 0,
        keep_log: bool = False,
    ) -> None:
        self.clock = Clock()
        self.log = Log(kept=keep_log)
        self.gpu, self.cpu = Stream("gpu", self.log), Stream("cpu", self.log)
        self.machine, self.shape, self.policy = machine, shape, policy
        self.execution_model = policy.execution_model if execution_model is None else execution_model
        self.mover = Mover(self.clock, self.log, machine, shape, batched=self.execution_model.batched_io)
        self.account = TimeBreakdown()
        self.step_ns: list[int] = []  # of every verification accounted for
        self._steps, self._warm_steps, self._stand_in = steps, warm_steps, stand_in
        self._number = 0  # of the verification

    def run(self) -> TimeBreakdown:
        """The whole simulation."""
        self.clock.start(self.mover.process())
        self.clock.start(self._process())
        self.clock.run()
        return self.account

    def _process(self) -> Process:
        for step, following in zip(self._steps, [*self._steps[1:], None], strict=True):
            if step.is_first:
                self.policy.reset()
            if step.prefill:
                yield from self._end(step, following)
                continue
            self.mover.step = self._number
            start_ns, uploads = self.clock.now_ns, self.mover.n_uploads
            self._stand_in.begin(step.ids)
            yield from self._draft(step)
            yield from self._verify(step.counts)
            yield from self._end(step, following)
            account = self.account
            account.uploads += self.mover.n_uploads - uploads
            account.total_ns += self.clock.now_ns - start_ns
            account.steps += 1
            account.tokens += step.n_accepted + 1
            self.step_ns.append(self.clock.now_ns - start_ns)
            self._number += 1
            if self._number == self._warm_steps:
                self.account = TimeBreakdown()
                self.step_ns.clear()

    def _draft(self, step: Batch) -> Process:
        """The draft model's tokens, one by one, and the plan for the batch that they make."""
        known = [] if step.tokens is None else step.tokens.tolist()
        hinted = "draft-inputs" in self.policy.required_inputs
        n_drafts = step.n_tokens - 1
        n_parts = max(_PARTS // n_drafts, 1) if hinted and n_drafts else 1
        for token in range(1, n_drafts + 1):
            now_ns, ns = self.clock.now_ns, self.machine.draft_ns
            self.log.add(Span("draft", "draft", now_ns, now_ns + ns, self._number, n=token))
            for part in range(1, n_parts + 1):
                yield ns * part // n_parts - ns * (part - 1) // n_parts
                if hinted:
                    hints = self._stand_in.of_draft(token, part / n_parts)
                    self.mover.push(self.policy.plan(self.mover.resident, known[:token], hints))
                elif token == n_drafts and known:  # without tokens there is nothing new since the plan before
                    hidden_states = step.hidden_states if "draft-states" in self.policy.required_inputs else None
                    told = (
                        None
                        if hidden_states is None
                        else ExpertPrediction.of_hidden_states(hidden_states, len(step.ids))
                    )
                    self.mover.push(self.policy.plan(self.mover.resident, known, told))
        self.account.ns["draft"] += n_drafts * self.machine.draft_ns
        if hinted:  # what was foretold while drafting must be there before verification begins (SP-MoE, section 3.2)
            since_ns = self.clock.now_ns
            yield self.mover.drained()
            self.account.ns["link"] += self.clock.now_ns - since_ns

    def _verify(self, counts: NDArray[np.int32]) -> Process:
        for layer in range(self.shape.n_layers):
            yield from self._on_gpu("dense", self.machine.dense_ns, layer)
            if self.shape.group[layer] >= 0:
                self._plan_layer(layer)
                yield from self._experts(layer, counts[layer])
        if self.machine.head_demand_ns:
            yield from self._loaded(self.mover.demand(-1, [], self.machine.head_demand_ns))
        yield from self._on_gpu("dense", self.machine.head_ns)

    def _plan_layer(self, layer: int) -> None:
        policy = self.policy
        if self.execution_model.prefetch_within_step and isinstance(policy, LayerPolicy):
            hints = self._stand_in.of_gates(layer) if "block-inputs" in policy.required_inputs else None
            self.mover.push(policy.plan_layer(layer, self.mover.resident, hints))

    def _experts(self, layer: int, counts: NDArray[np.int32]) -> Process:
        used = np.flatnonzero(counts)
        tokens = counts[used]
        there = self.mover.resident[layer, used] == RESIDENT
        account, execution_model = self.account, self.execution_model
        if execution_model.layerwise and not there.all():
            there = np.zeros_like(there)
        account.pairs += int(tokens.sum())
        account.pairs_hit += int(tokens[there].sum())
        account.unique += used.size
        account.unique_hit += int(np.count_nonzero(there))
        hits, misses = used[there], used[~there]
        self.mover.pin(layer, hits.tolist())
        if execution_model.device_only:
            yield from self._on_device(layer, counts, hits, misses)
        else:
            yield from self._on_both(layer, counts, hits, misses)
        self.mover.pin(layer, [])

    def _on_both(
        self, layer: int, counts: NDArray[np.int32], hits: NDArray[np.intp], misses: NDArray[np.intp]
    ) -> Process:
        machine, now_ns, number = self.machine, self.clock.now_ns, self._number
        if hits.size and misses.size:
            yield from self._on_host(machine.sync_ns)
            now_ns = self.clock.now_ns
        device_ns = machine.block_ns + self._sum(machine.device_ns, counts, hits) if hits.size else 0
        cpu_ns = self._sum(machine.cpu_ns, counts, misses)
        done_ns = now_ns
        if device_ns:
            done_ns = self.gpu.submit(now_ns, device_ns, "experts", number, layer, hits.size)
        if cpu_ns:
            done_ns = max(done_ns, self.cpu.submit(now_ns, cpu_ns, "experts", number, layer, misses.size))
        self.account.ns["device"] += device_ns
        self.account.ns["cpu"] += done_ns - now_ns - device_ns
        yield done_ns - now_ns

    def _on_device(
        self, layer: int, counts: NDArray[np.int32], hits: NDArray[np.intp], misses: NDArray[np.intp]
    ) -> Process:
        machine, mover = self.machine, self.mover
        coming = [(int(one), mover.arrival(layer, int(one))) for one in misses]
        wanted = [one for one, arrived in coming if arrived is None]
        if self.execution_model.layerwise and wanted:  # a layer in one transfer
            moved = list(range(self.shape.n_experts)) if machine.whole_layers else wanted
            demands = [(wanted, mover.demand(layer, moved, machine.dense_demand_ns))]
        else:
            demands = [([one], mover.demand(layer, [one])) for one in wanted]
        block_ns = machine.block_ns + self._sum(machine.device_ns, counts, hits)
        yield from self._on_gpu("device", block_ns, layer, hits.size)
        for one, arrived in coming:
            if arrived is not None:
                since_ns = self.clock.now_ns
                yield arrived
                self.account.ns["link"] += self.clock.now_ns - since_ns
                yield from self._on_gpu("device", self._sum(machine.device_ns, counts, np.array([one])), layer, 1)
        for experts, demand in demands:
            yield from self._loaded(demand)
            ns = self._sum(machine.device_ns, counts, np.array(experts))
            yield from self._on_gpu("device", ns, layer, len(experts))

    def _loaded(self, demand: Demand) -> Process:
        """Waits for what was demanded: first for the link, then for the transfer."""
        since_ns = self.clock.now_ns
        yield demand.arrived
        now_ns = self.clock.now_ns
        queued_ns = min(max(demand.start_ns - since_ns, 0), now_ns - since_ns)
        self.account.ns["link"] += queued_ns
        self.account.ns["load"] += now_ns - since_ns - queued_ns

    def _end(self, step: Batch, following: Batch | None) -> Process:
        """Observing and planning, while nothing else can be done; the token that comes next is known."""
        if not step.prefill:
            yield from self._on_host(self.machine.schedule_ns)
        self._stand_in.learn(step.counts)
        self.policy.observe(
            Observation(step.counts, step.n_tokens, step.n_accepted, step.tokens, step.ids, None, prefill=step.prefill)
        )
        tokens = None if following is None or following.is_first else following.tokens
        known = [] if tokens is None else tokens[:1].tolist()
        self.mover.push(self.policy.plan(self.mover.resident, known))
        self.mover.clear_staging()

    def _on_gpu(self, cause: str, ns: int, layer: int = -1, n: int = 0) -> Process:
        if ns > 0:
            kind = "experts" if cause == "device" else cause
            done_ns = self.gpu.submit(self.clock.now_ns, ns, kind, self._number, layer, n)
            self.account.ns[cause] += done_ns - self.clock.now_ns
            yield done_ns - self.clock.now_ns

    def _on_host(self, ns: int) -> Process:
        if ns > 0:
            now_ns = self.clock.now_ns
            self.log.add(Span("host", "plan", now_ns, now_ns + ns, self._number))
            self.account.ns["host"] += ns
            yield ns

    @staticmethod
    def _sum(curve: NDArray[np.int64], counts: NDArray[np.int32], experts: NDArray[np.intp]) -> int:
        """Time of these experts, one after the other."""
        return int(curve[np.minimum(counts[experts], curve.size - 1)].sum())
