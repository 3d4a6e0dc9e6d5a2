"""One policy, or a bound, on the batches of a trace, with transfers that take no time (docs/lab/traces.md, Replay).

A policy plans as it does in the engine; its uploads are there at once, for policies that plan before every layer at the
next layer. The engine finds the same hits where it waits for transfers (tests/lab/sim/test_replay_engine.py).

Two bounds know the future. All layers share their slots; a policy that gives every layer its own slots is bounded as
well. A prefill is not a step: its uses are not hits, but belady may keep what it used.

oracle  Before every step the slots hold the experts that most of its tokens use.
belady  MIN with bypass (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
        5(2), 1966): after every step, of the resident and the just used experts, the slots keep those that are used
        again soonest. All experts of a step are used at once and a used expert need not stay, so the choice is one of
        intervals between two uses, at most as many at a time as there are slots: keeping those that end first is
        optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, IndexArray, IntArray
from moeedge.lab.sim.expert_budgets import BudgetedTrace
from moeedge.lab.sim.noisy_predictor import BatchPredictions
from moeedge.lab.traces.schedule import Batch
from moeedge.policies.base import CacheShape, ExpertPrediction, Plan, Policy
from moeedge.scheduler.driver import StepDriver
from moeedge.scheduler.stats import PlacementStats


class Slots:
    """The slots of a cache; `resident` is uint8 [n_layers, n_experts], 1 for an expert in a slot."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.resident = np.zeros((shape.n_layers, shape.n_experts), dtype=np.uint8)
        self._flat = self.resident.reshape(-1)  # a view
        self._held = [0] * shape.n_groups

    def push(self, plan: Plan) -> IndexArray:
        """Uploads in order, each into a free slot or that of its group's next victim; returns the flat ids uploaded.

        An upload that finds neither is left out.
        """
        n = self.shape.n_experts
        up: IndexArray = plan.uploads[:, 0] * np.intp(n) + plan.uploads[:, 1]  # flat ids
        down: IndexArray = plan.victims[:, 0] * np.intp(n) + plan.victims[:, 1]
        if up.size == 0:
            return up
        if self.shape.n_groups == 1:
            return self._fill(0, up, down)
        up_group, down_group = self.shape.group[up // n], self.shape.group[down // n]
        groups = range(self.shape.n_groups)
        return np.concatenate([self._fill(group, up[up_group == group], down[down_group == group]) for group in groups])

    def _fill(self, group: int, up: IndexArray, down: IndexArray) -> IndexArray:
        free = max(int(self.shape.capacity[group]) - self._held[group], 0)
        up = up[: free + down.size]
        n_out = max(up.size - free, 0)
        self._flat[down[:n_out]] = 0
        self._flat[up] = 1
        self._held[group] += up.size - n_out
        return up


@dataclass
class HitStats:
    """Hits and uploads, summed over batches that are not prompts."""

    pairs: int = 0  # (token, expert)
    pairs_hit: int = 0
    unique: int = 0  # distinct experts, summed over batches and layers
    unique_hit: int = 0
    uploads: int = 0  # experts moved to the device, on demand or not

    def add(self, counts: NDArray[np.integer[Any]], is_hit: NDArray[np.bool_]) -> None:
        """Adds experts by their activations and by whether they were resident; arrays of the same shape."""
        used = counts > 0
        self.pairs += int(counts.sum())
        self.pairs_hit += int(counts[is_hit].sum())
        self.unique += int(np.count_nonzero(used))
        self.unique_hit += int(np.count_nonzero(used & is_hit))

    @property
    def hit_rate_pairs(self) -> float:
        """Share of the pairs whose expert was resident; 0 without any."""
        return PlacementStats.hit_rate_pairs.compute(self) or 0.0

    @property
    def hit_rate_experts(self) -> float:
        """Share of the distinct experts that were resident; 0 without any."""
        return self.unique_hit / max(self.unique, 1)


# An expert of which so many activations are expected is called hot: at independent activations the chance of any is
# then one half. No data chose it
HOT_FROM = math.log(2.0)


@dataclass
class ReplayStats:
    """Hits of a policy or bound, what it moved, and how well it told hot from cold."""

    hits: HitStats = field(default_factory=HitStats)
    on_demand: int = 0  # of the uploads: loaded when they were needed
    bytes: int = 0  # of the uploads, where the sizes of experts are known
    judged: int = 0  # (batch, layer, expert) triples called hot or cold
    judged_right: int = 0
    until: list[tuple[int, int]] = field(default_factory=list)  # pairs hit and uploads, summed, as each batch ended
    budgeted: BudgetedTrace | None = None  # the expert budget that limited the batches, with its figures

    def add(self, batch: Batch, resident: BoolArray) -> None:
        """Adds a batch, whose layers found these experts [n_layers, n_experts]; of a prompt no hits."""
        if not batch.prefill:
            self.hits.add(batch.counts, resident)
        self.until.append((self.hits.pairs_hit, self.hits.uploads))


class PolicyReplay:
    """One policy with its slots: an expert store whose link carries a limited number of uploads.

    max_uploads: of plans, per layer and batch. expert_bytes: [n_layers]. fresh_policy: makes the policy that each text
    begins with; None: `policy` goes through all of them.
    """

    def __init__(
        self,
        policy: Policy,
        shape: CacheShape,
        *,
        max_uploads: float | None = None,
        expert_bytes: NDArray[np.int64] | None = None,
        fresh_policy: Callable[[], Policy] | None = None,
    ) -> None:
        self.slots = Slots(shape)
        self.stats = ReplayStats()
        self._driver = StepDriver(policy, self, refills=True)
        self._shape = shape
        self._expert_layers = shape.expert_layers
        self._execution_model, self._required_inputs = policy.execution_model, policy.required_inputs
        self._expert_bytes = expert_bytes
        self._fresh_policy = fresh_policy
        self._uploads_per_batch = None if max_uploads is None else max_uploads * self._expert_layers.size
        self._credit = 0.0  # uploads that the link could have carried until now and did not
        self._plan: Plan | None = None  # the newest
        self._is_planned = True  # since the last batch, if there was one
        self._loaded: BoolArray | None = None  # experts that the last batch of a device-only system loaded

    def run(self, batch: Batch, predictions: BatchPredictions | None = None) -> None:
        self._begin(batch)
        if not batch.prefill:
            self._plan_draft(batch, predictions)
        # before plans within the step, which may change the utilities; all of a text's first batch is new
        hot = None if batch.prefill or batch.is_first else self._expected_hot()
        found = self._compute(batch, predictions)
        if not batch.prefill and self._execution_model.device_only:
            self._loaded = (batch.counts > 0) & ~found
            self.stats.on_demand += np.count_nonzero(self._loaded)
            self._count_uploads(np.flatnonzero(self._loaded))
        if hot is not None:
            right = (hot == (batch.counts > 0))[self._expert_layers]
            self.stats.judged += right.size
            self.stats.judged_right += int(np.count_nonzero(right))
        self._driver.observe(batch)
        self._is_planned = False
        self.stats.add(batch, found)

    def residency(self) -> NDArray[np.uint8]:
        """uint8 [n_layers, n_experts], 1 for an expert in a slot."""
        return self.slots.resident

    def push(self, plan: Plan) -> None:
        """Carries out as much of a plan as the link allows."""
        if self._uploads_per_batch is not None:
            uploads, kept = plan.uploads, np.zeros(len(plan.uploads), dtype=np.bool_)
            if self._loaded is not None:  # by the last batch already
                kept = self._loaded[tuple(uploads.T)]
            kept |= np.cumsum(~kept) <= int(self._credit)
            plan = replace(plan, uploads=uploads[kept], priority=plan.priority[kept])
        moved = self.slots.push(plan)
        if self._loaded is not None and moved.size:
            moved = moved[~self._loaded.reshape(-1)[moved]]
        self._credit -= moved.size
        self._count_uploads(moved)

    def _begin(self, batch: Batch) -> None:
        """Plans after the batch before, as the engine does at once, now that the first token of this one is known."""
        if self._uploads_per_batch is not None and not batch.prefill:
            self._credit = min(self._credit, 1.0) + self._uploads_per_batch
        if not self._is_planned:
            self._plan_next([] if batch.is_first else batch.known_tokens[:1])
        if not batch.is_first:
            return
        if self._fresh_policy is not None:
            self._driver.use(self._fresh_policy())
        else:
            self._driver.begin_text()
        if not batch.prefill:  # the engine plans after a prompt; the trace lacks it
            self._plan_next(batch.known_tokens[:1])

    def _plan_next(self, tokens: list[int]) -> None:
        self._plan = self._driver.plan_next(tokens)
        self._driver.push()
        self._is_planned = True
        self._loaded = None  # what was not kept is dropped

    def _plan_draft(self, batch: Batch, predictions: BatchPredictions | None) -> None:
        """Plans for the drafts, where something is known of them."""
        early: ExpertPrediction | None = None
        if predictions is not None and "draft-inputs" in self._required_inputs:  # never computes its last token
            early = predictions.of_draft(max(batch.n_tokens - 1, 1))
        if len(batch.known_tokens) > 1 or early is not None:
            self._plan = self._driver.plan_draft(batch.known_tokens, early, batch.hidden_states)
            self._driver.push()

    def _compute(self, batch: Batch, predictions: BatchPredictions | None) -> BoolArray:
        """The experts that each layer finds, bool [n_layers, n_experts], where plans and loads change them between."""
        driver, resident = self._driver, self.slots.resident
        found: BoolArray = resident.astype(np.bool_)
        if driver.keeps_loads:
            if batch.n_tokens > (self._execution_model.cached_tokens_max or batch.n_tokens):
                return found
            found[:] = False
            for layer in self._expert_layers.tolist():
                plan = driver.plan_load(layer, batch.counts[layer])
                if plan is not None:
                    found[layer] = resident[layer] != 0
                    self.slots.push(plan)
        elif driver.plans_layers and not batch.prefill:
            if predictions is None and "block-inputs" in self._required_inputs:
                return found
            for layer in self._expert_layers.tolist():
                driver.push_layer(layer, None if predictions is None else predictions.of_gates(layer))
                found[layer] = resident[layer] != 0
        return found

    def _count_uploads(self, flat_ids: IndexArray) -> None:
        self.stats.hits.uploads += flat_ids.size
        if self._expert_bytes is not None and flat_ids.size:
            self.stats.bytes += int(self._expert_bytes[flat_ids // self._shape.n_experts].sum())

    def _expected_hot(self) -> BoolArray:
        """The experts that the newest plan expects to be used, bool [n_layers, n_experts]."""
        assert self._plan is not None
        expected = self._plan.expected
        return self._plan.utility >= 1.0 if expected is None else expected >= HOT_FROM


NEVER = np.iinfo(np.int32).max  # the next use of an expert that is not used again
_SPREAD = 0x9E3779B1  # Knuth's multiplicative hash: orders ids as if by chance

FlatIds = NDArray[np.int32]


NextUses = list[tuple[FlatIds, NDArray[np.int32]]]


def next_uses(batches: Iterable[Batch], n_flat: int) -> NextUses:
    """For every batch the flat ids [n] that it uses, and the batch [n] that uses each of them next (NEVER: none).

    The uses by prompts do not count as next ones. n_flat: layers times experts.
    """
    used = [(np.flatnonzero(batch.counts).astype(np.int32), batch.prefill) for batch in batches]
    coming = np.full(n_flat, NEVER, dtype=np.int32)
    found: NextUses = []
    for number, (flat_ids, prefill) in reversed([*enumerate(used)]):
        found.append((flat_ids, coming[flat_ids]))
        if not prefill:
            coming[flat_ids] = number
    return found[::-1]


class BoundReplay:
    """A bound with its slots: MIN with bypass where `uses` are given (Belady), else the one-step oracle."""

    def __init__(self, shape: CacheShape, uses: NextUses | None = None) -> None:
        self.stats = ReplayStats()
        n = shape.n_layers * shape.n_experts
        self._capacity = int(shape.capacity.sum())
        self._resident: BoolArray = np.zeros(n, dtype=np.bool_)  # by flat id
        self._uses = uses
        self._coming = np.full(n, NEVER, dtype=np.int32)  # the batch that uses each expert next

    def run(self, batch: Batch, predictions: BatchPredictions | None = None) -> None:
        """Replays the next batch; a bound needs no predictions."""
        found = self._resident
        if self._uses is not None:
            used, following = self._uses[len(self.stats.until)]
            self._coming[used] = following
            self._hold(self._used_soonest(used))
        elif not batch.prefill:
            self._hold(self._used_most(batch.counts.reshape(-1)))
            found = self._resident
        self.stats.add(batch, found.reshape(batch.counts.shape))

    def _hold(self, resident: BoolArray) -> None:
        self.stats.hits.uploads += int(np.count_nonzero(resident & ~self._resident))
        self._resident = resident

    def _used_most(self, counts: IntArray) -> BoolArray:
        """The experts with the highest `counts` [n] for which there are slots; of equal ones the resident ones.

        Slots that the step does not need stay as they are.
        """
        score = 2 * counts + self._resident
        best = (-score).argsort(kind="stable")  # a partition's choice among equals depends on the processor
        best = best[: self._capacity]
        kept: BoolArray = np.zeros(counts.size, dtype=np.bool_)
        kept[best[score[best] > 0]] = True
        return kept

    def _used_soonest(self, used: FlatIds) -> BoolArray:
        """Of the resident and the just `used` experts those that are used next soonest, none that is never used."""
        kept: BoolArray = self._resident.copy()
        kept[used[self._coming[used] < NEVER]] = True
        held = np.flatnonzero(kept)
        # of experts that are used next in the same batch no layer's come first, whatever the processor
        spread = held * _SPREAD & 0xFFFFFFFF
        kept[held[np.lexsort((spread, self._coming[held]))[self._capacity :]]] = False
        return kept
