"""One simulated run: draft, verify layer by layer, observe, plan, on the streams of a machine.

The policy's execution model says how missing experts are computed, and a step's time is the sum of its parts, CAUSES
(docs/lab/simulation.md, The model). What the host and the device exchange for a layer is a program's handoff
(moeedge.lab.sim.step_costs). While uploads are under way its copies to the device wait for a chunk, and the CPU shares
its memory with them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency
from moeedge.lab.sim.expert_budgets import BudgetedTrace, BudgetStats
from moeedge.lab.sim.noisy_predictor import BatchPredictions, NoisyPredictor, PredictorAccuracy
from moeedge.lab.sim.policy_replay import HitStats
from moeedge.lab.sim.step_costs import StepCosts, to_ns
from moeedge.lab.sim.streams import Clock, Demand, Mover, Process, Signal, Stream
from moeedge.lab.traces.schedule import Batch
from moeedge.policies.base import CacheShape, ExecutionModel, Plan, Policy
from moeedge.scheduler.driver import StepDriver

# each with the name of its seconds per token in a row of the simulator
CAUSES = {cause: f"{cause}_s" for cause in ("draft", "dense", "device")}
CAUSES |= {"cpu": "stall_cpu_s", "load": "stall_load_s", "link": "stall_link_s", "host": "host_s"}
_DRAFT_PARTS = 16  # of drafting a batch; a policy that reads the draft's hidden states plans anew after each


@dataclass
class TimeBreakdown:
    """Nanoseconds by cause, and hits, over some steps."""

    ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    total_ns: int = 0
    steps: int = 0
    tokens: int = 0  # of text
    hits: HitStats = field(default_factory=HitStats)

    @property
    def tpot_s(self) -> float:
        """Seconds per token of text."""
        return self.total_ns * 1e-9 / max(self.tokens, 1)

    def per_token_s(self, cause: str) -> float:
        """Seconds per token of text that one cause takes."""
        return self.ns[cause] * 1e-9 / max(self.tokens, 1)


class _Used(NamedTuple):
    """The experts that a batch uses of a layer."""

    layer: int
    counts: NDArray[np.int32]  # [n_experts]
    hits: NDArray[np.intp]
    misses: NDArray[np.intp]


class Execution:
    """Runs `batches` under one policy. The first `warm_steps` verifications are not in the time breakdown.

    accuracy, seed: of predictions. execution_model: obeyed instead of the policy's own. n_whole_layers: so many layers
    more, all of whose experts are on the device, use experts as the others do on average. budgeted: the expert budget
    of verifications.
    """

    def __init__(
        self,
        costs: StepCosts,
        shape: CacheShape,
        policy: Policy,
        batches: Sequence[Batch],
        *,
        accuracy: PredictorAccuracy,
        seed: int = 0,
        execution_model: ExecutionModel | None = None,
        warm_steps: int = 0,
        n_whole_layers: int = 0,
        budgeted: BudgetedTrace | None = None,
    ) -> None:
        self.clock = Clock()
        self.gpu, self.cpu = Stream(), Stream()
        self.costs, self.shape = costs, shape
        self.execution_model = execution_model or policy.execution_model
        self.mover = Mover(self.clock, costs, shape, batched=self.execution_model.batched_io)
        self.driver = StepDriver(policy, self.mover, execution_model=self.execution_model, refills=True)
        self.time = TimeBreakdown()
        self._batches, self._warm_steps = batches, warm_steps
        self._predictor = NoisyPredictor(np.ones((shape.n_layers, shape.n_experts)), accuracy, seed)
        self._reads_draft = "draft-inputs" in policy.required_inputs
        self._reads_blocks = "block-inputs" in policy.required_inputs
        self._n_whole_layers, self._budgeted = n_whole_layers, budgeted
        self._n_slots = int(shape.capacity.sum()) // costs.n_layouts
        self._n_tokens = 1  # of the batch that is being verified
        self._n_verified = 0  # the number of the verification
        self._bypasses_cache = False
        self._load_plan: Plan | None = None  # of the layer that is computed

    def run(self) -> TimeBreakdown:
        self.clock.start(self.mover.process())
        self.clock.start(self._process())
        self.clock.run()
        return self.time

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds that GPU, CPU and link worked, from the first verification on."""
        busy_ns = {"gpu": self.gpu.busy_ns, "cpu": self.cpu.busy_ns, "link": self.mover.busy_ns}
        return {name: ns * 1e-9 for name, ns in busy_ns.items()}

    def _process(self) -> Process:
        for batch, following in zip(self._batches, [*self._batches[1:], None], strict=True):
            if batch.is_first:
                self.driver.begin_text()
            if batch.prefill:
                yield from self._end(batch, following)
            else:
                yield from self._step(batch, following)

    def _step(self, batch: Batch, following: Batch | None) -> Process:
        start_ns, n_uploads = self.clock.now_ns, self.mover.n_uploads
        predicted = self._predictor.predict(batch.ids)
        yield from self._draft(batch, predicted)
        limit = self.execution_model.cached_tokens_max
        self._n_tokens = batch.n_tokens
        self._bypasses_cache = limit is not None and batch.n_tokens > limit
        batch = yield from self._verify(batch, predicted)
        yield from self._end(batch, following)
        time = self.time
        time.hits.uploads += self.mover.n_uploads - n_uploads
        time.total_ns += self.clock.now_ns - start_ns
        time.steps += 1
        time.tokens += batch.n_accepted + 1
        self._n_verified += 1
        if self._n_verified == self._warm_steps:
            self.time = TimeBreakdown()
            if self._budgeted is not None:
                self._budgeted.stats = BudgetStats()

    def _draft(self, batch: Batch, predicted: BatchPredictions) -> Process:
        """Drafts tokens one by one, and plans for the batch that they make."""
        known = batch.known_tokens
        n_drafts = batch.n_tokens - 1
        n_parts = max(_DRAFT_PARTS // n_drafts, 1) if self._reads_draft and n_drafts else 1
        for token in range(1, n_drafts + 1):
            ns = self.costs.draft_ns
            for part in range(1, n_parts + 1):
                yield ns * part // n_parts - ns * (part - 1) // n_parts
                if self._reads_draft:
                    self.driver.plan_draft(known[:token], predicted.of_draft(token, part / n_parts))
                elif token == n_drafts and len(known) > 1:  # without them there is no news since the plan before
                    self.driver.plan_draft(known, hidden_states=batch.hidden_states)
                self.driver.push()
        self.time.ns["draft"] += n_drafts * self.costs.draft_ns
        if self._reads_draft:  # predicted experts must be there before verification begins (SP-MoE, section 3.2)
            yield from self._wait_for_link(self.mover.drained())

    def _verify(self, batch: Batch, predicted: BatchPredictions) -> Generator[int | Signal, None, Batch]:
        """Computes the batch, and returns it under the expert budget."""
        n, n_others = self._n_whole_layers, np.count_nonzero(self.shape.group >= 0)
        if n:
            layers = [self._device_ns(each, np.flatnonzero(each), self.shape.n_experts) for each in batch.counts]
            yield from self._on_gpu("dense", n * self.costs.dense_ns)
            yield from self._on_gpu("device", n * sum(layers) // n_others)
        if self._budgeted is not None:
            batch = self._budgeted.limited(batch)
        for layer in range(self.shape.n_layers):
            yield from self._on_gpu("dense", self.costs.dense_ns)
            if self.shape.group[layer] >= 0:
                if self.driver.plans_layers:
                    self.driver.push_layer(layer, predicted.of_gates(layer) if self._reads_blocks else None)
                yield from self._experts(layer, batch.counts[layer])
        if self.costs.head_demand_ns:
            yield from self._loaded(self.mover.demand(-1, [], self.costs.head_demand_ns))
        yield from self._on_gpu("dense", self.costs.head_ns)
        return batch

    def _experts(self, layer: int, counts: NDArray[np.int32]) -> Process:
        used = np.flatnonzero(counts)
        is_hit = self.mover.resident[layer, used] == Residency.RESIDENT
        self._load_plan = None if self._bypasses_cache else self.driver.plan_load(layer, counts)
        leaves_out = self.driver.keeps_loads and not self._bypasses_cache and self._load_plan is None
        if leaves_out or (self.execution_model.layerwise and not is_hit.all()):
            is_hit = np.zeros_like(is_hit)
        self.time.hits.add(counts[used], is_hit)
        self.mover.pin(layer, used[is_hit].tolist())
        yield from self._compute(_Used(layer, counts, used[is_hit], used[~is_hit]))
        self.mover.pin(layer, [])

    def _compute(self, used: _Used) -> Process:
        costs, handoff = self.costs, self.costs.handoff
        if handoff is not None and self.execution_model.layerwise and not used.misses.size:
            yield from self._on_gpu("device", self._device_ns(used.counts, used.hits, self.shape.n_experts))
        elif not self.execution_model.device_only:
            yield from self._on_both(used)
        else:
            if handoff is not None:
                calls_ns = sum(costs.handoff_ns(moment, self._n_tokens) for moment in ("down", "submit"))
                yield from self._on_host(calls_ns + to_ns(handoff.divide_s(self._n_tokens)))
            yield from self._from_cache(used) if self.execution_model.keeps_loads else self._on_device(used)

    def _on_both(self, used: _Used) -> Process:
        """Both sides compute their part of a layer, with the calls of the program's handoff around them."""
        costs, n_tokens, hits, misses = self.costs, self._n_tokens, used.hits, used.misses
        is_uploading = bool(self.mover.arrivals)
        start_ns = self.clock.now_ns
        device_ns = self._device_ns(used.counts, hits, self._n_slots) if hits.size else 0
        cpu_ns = _sum_ns(costs.cpu_ns, used.counts, misses)
        if costs.handoff is None:
            ready_ns = device_starts_ns = start_ns + (costs.sync_ns if hits.size and misses.size else 0)
            after_ns = 0
        else:
            handoff = costs.handoff
            chunk_s = handoff.chunks_ahead * handoff.chunk_bytes / costs.link_bytes_per_s  # that a small copy waits for
            chunk_ns = to_ns(chunk_s) if is_uploading else 0
            region_ns = to_ns(handoff.cpu_region_s)
            ready_ns = start_ns + costs.handoff_ns("down", n_tokens) + to_ns(handoff.divide_s(n_tokens))
            after_ns = costs.handoff_ns("up", n_tokens) + chunk_ns + (handoff.cpu_regions - 1) * region_ns
            if handoff.launched_ahead and misses.size:  # the device computes them with a slot of zeros
                device_ns = (device_ns or costs.block_ns) + int(costs.device_ns[1])
            if hits.size:
                after_ns += costs.handoff_ns("join", n_tokens)
                if not handoff.launched_ahead:
                    ready_ns += costs.handoff_ns("submit", n_tokens) + chunk_ns
            device_starts_ns = start_ns if handoff.launched_ahead else ready_ns
            if is_uploading:
                cpu_ns = round(costs.busy_link_factor * cpu_ns)
            cpu_ns += region_ns if misses.size else 0
        device_done_ns = cpu_done_ns = ready_ns
        if device_ns:
            device_done_ns = max(ready_ns, self.gpu.submit(device_starts_ns, device_ns))
        if cpu_ns:
            cpu_done_ns = self.cpu.submit(ready_ns, cpu_ns)
        done_ns = max(device_done_ns, cpu_done_ns)
        self.time.ns["host"] += ready_ns - start_ns + after_ns
        self.time.ns["device"] += device_done_ns - ready_ns
        self.time.ns["cpu"] += done_ns - device_done_ns
        yield done_ns + after_ns - start_ns

    def _device_ns(self, counts: NDArray[np.int32], experts: NDArray[np.intp], n_tables: int = 0) -> int:
        """A block on the device, which passes over all `n_tables` experts of its tables where it has several tokens."""
        tiles = self.costs.tile_ns * n_tables if self._n_tokens > 1 else 0.0
        return self.costs.block_ns + round(tiles) + _sum_ns(self.costs.device_ns, counts, experts)

    def _on_device(self, used: _Used) -> Process:
        costs, mover, layer, counts = self.costs, self.mover, used.layer, used.counts
        arrivals = {expert: mover.arrivals.get((layer, expert)) for expert in used.misses.tolist()}
        absent = [expert for expert, arrived in arrivals.items() if arrived is None]
        if self.execution_model.layerwise and absent:  # a layer in one transfer
            moved = list(range(self.shape.n_experts)) if costs.whole_layers else absent
            demands = [(absent, mover.demand(layer, moved, costs.dense_demand_ns))]
        else:
            demands = [([expert], mover.demand(layer, [expert])) for expert in absent]
        yield from self._on_gpu("device", self._device_ns(counts, used.hits))
        for expert, arrived in arrivals.items():
            if arrived is not None:
                yield from self._wait_for_link(arrived)
                yield from self._on_gpu("device", _sum_ns(costs.device_ns, counts, np.array([expert])))
        for experts, demand in demands:
            yield from self._loaded(demand)
            yield from self._on_gpu("device", _sum_ns(costs.device_ns, counts, np.array(experts)))

    def _from_cache(self, used: _Used) -> Process:
        """The host waits for the routing; missing experts take the slots of the policy's plan; the layer follows."""
        yield from self._on_host(self.costs.sync_ns)
        if used.misses.size:
            yield from self._loaded(self.mover.demand(used.layer, used.misses.tolist()))
        if self._load_plan is not None:
            self.mover.push(self._load_plan)  # takes the experts from the staging buffer
        self.mover.clear_staging()
        yield from self._on_gpu("device", self._device_ns(used.counts, np.flatnonzero(used.counts)))

    def _wait_for_link(self, arrived: Signal) -> Process:
        since_ns = self.clock.now_ns
        yield arrived
        self.time.ns["link"] += self.clock.now_ns - since_ns

    def _loaded(self, demand: Demand) -> Process:
        """Waits for a transfer on demand: first for the link, then for the transfer."""
        since_ns = self.clock.now_ns
        yield demand.arrived
        now_ns = self.clock.now_ns
        queued_ns = min(max(demand.start_ns - since_ns, 0), now_ns - since_ns)
        self.time.ns["link"] += queued_ns
        self.time.ns["load"] += now_ns - since_ns - queued_ns

    def _end(self, batch: Batch, following: Batch | None) -> Process:
        """Observes and plans while nothing else can be done; the first token of the next batch is known."""
        if not batch.prefill:
            yield from self._on_host(self.costs.schedule_ns)
        self._predictor.learn(batch.counts)
        self.driver.observe(batch)
        self.driver.plan_next([] if following is None or following.is_first else following.known_tokens[:1])
        self.driver.push()
        self.mover.clear_staging()

    def _on_gpu(self, cause: str, ns: int) -> Process:
        if ns > 0:
            now_ns = self.clock.now_ns
            done_ns = self.gpu.submit(now_ns, ns)
            self.time.ns[cause] += done_ns - now_ns
            yield done_ns - now_ns

    def _on_host(self, ns: int) -> Process:
        if ns > 0:
            self.time.ns["host"] += ns
            yield ns


def _sum_ns(curve: NDArray[np.int64], counts: NDArray[np.int32], experts: NDArray[np.intp]) -> int:
    """Time of these experts, one after the other."""
    return int(curve[np.minimum(counts[experts], curve.size - 1)].sum())
