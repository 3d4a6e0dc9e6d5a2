"""Replays a trace: every policy decides on its batches, with transfers that take no time.

Before each batch a policy plans as it does in the engine, once with the token that the target added and once with the
drafts, where the trace knows tokens. What it uploads is there at once. Then the batch comes, and what is resident
counts as found: of the (token, expert) pairs, and of the distinct experts. So a replay says what a policy foresees and
how much it moves for that; whether a link can keep up is the simulator's question, except that `max_uploads` can limit
what plans may move, alike for all policies.

Systems that compute everything on the device (`Traits.device_only`) load each missing expert when it is needed: one
transfer, which counts as an upload but not as found; what they then keep of it costs no second one. Those that plan
before every layer are given what they would know by then at once (scheduler/policy.py): with slots per layer that
comes to the same. Where a policy wants hidden states of layers, which traces lack, it goes by its cache alone, unless
moeedge/sim/foresight.py is asked to stand in for them (`ReplayConfig.accuracy`): where transfers take no time a
predictor that is nearly always right makes any cache nearly the oracle, so that such rows compare accuracies that
were put in. When what was foretold arrives is the simulator's question.

All policies and cache ratios go through the trace together, chunk by chunk: windows are counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExpertPrediction, Observation, Plan, Policy, PolicyConfig, check_plan
from moeedge.policies.registry import make_policy
from moeedge.sim.bounds import BOUNDS, Belady, NextUse, Oracle
from moeedge.sim.noisy_predictor import NoisyPredictor, source_of
from moeedge.sim.slots import Slots
from moeedge.trace.schedule import Batch, Chunk, Schedule

# An expert of which so many activations are expected is called hot. Activations come in bunches: of one expected the
# chance of any is below 1 - 1/e. Of 0.5 to 1.3 the best on gpt-oss-20b and Gemma, optimistic and pessimistic
HOT_FROM = 0.8


@dataclass(frozen=True)
class HitStats:
    """Sums over all batches that are not prompts."""

    pairs: int
    pairs_found: int
    experts: int  # distinct ones, summed over batches and layers
    experts_found: int
    uploads: int
    on_demand: int  # of the uploads: loaded when they were needed
    upload_bytes: int | None
    judged: int  # (batch, layer, expert) triples called hot or cold
    judged_right: int


@dataclass(frozen=True)
class ReplayRow:
    """One policy, cache ratio and model of rejected tokens.

    Shares are of what all batches used; uploads are per layer with experts and batch. None: not known, or not of this
    policy.
    """

    policy: str
    cache_ratio: float
    rejected_token_model: str  # optimistic, pessimistic or recorded
    hit_rate_pairs: float
    hit_rate_unique: float
    uploads_per_layer_step: float
    hot_cold_accuracy: float | None
    on_demand_per_layer_step: float
    bytes_per_step: float | None
    share_of_oracle: float | None  # of the one-step oracle's pairs
    oracle_hit_rate_pairs: float
    belady_hit_rate_unique: float
    slots: int
    prediction_source: str | None  # of the noisy predictor that stands in for hidden states
    predictor_accuracy: float | None
    token_ids: bool  # the trace knows them
    draft_hidden_states: bool  # the same
    profile: bool  # made from texts held out
    steps: int
    texts: int
    gamma: int
    acceptance: float | None
    tokens_per_step: float
    max_uploads: float | None
    seed: int
    model: str

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        return asdict(self)


@dataclass(eq=False)
class HitCounter:
    """Counts what a residency found, chunk by chunk."""

    shape: CacheShape
    expert_bytes: NDArray[np.int64] | None  # [n_layers]
    pairs: int = 0
    pairs_found: int = 0
    experts: int = 0
    experts_found: int = 0
    judged: int = 0
    judged_right: int = 0
    on_demand: int = 0
    bytes: int = 0
    _layers: NDArray[np.intp] = field(init=False)

    def __post_init__(self) -> None:
        self._layers = np.flatnonzero(self.shape.group >= 0)

    def add(self, chunk: Chunk, there: NDArray[np.bool_], hot: NDArray[np.bool_] | None) -> None:
        """there  [n_batches, n_layers, n_experts] resident as each batch began
        hot    the same shape, called hot before; the first batch of a text is not judged: nothing of it was known
        """
        counted = chunk.counted
        counts, there = (chunk.counts, there) if counted.all() else (chunk.counts[counted], there[counted])
        used = counts > 0
        self.pairs += int(counts.sum())
        self.pairs_found += int(counts[there].sum())
        self.experts += int(np.count_nonzero(used))
        self.experts_found += int(np.count_nonzero(used & there))
        if hot is not None:
            judged = np.flatnonzero(counted & [not batch.is_first for batch in chunk.batches])
            right = hot[judged] == (chunk.counts[judged] > 0)
            self.judged += judged.size * self._layers.size * self.shape.n_experts
            self.judged_right += int(np.count_nonzero(right[:, self._layers]))

    def add_missing(self, missing: NDArray[np.bool_]) -> None:
        """Experts [n_layers, n_experts] that were loaded on demand."""
        if self.expert_bytes is None:
            self.on_demand += int(np.count_nonzero(missing))
        else:
            per_layer = np.count_nonzero(missing, axis=1)
            self.on_demand += int(per_layer.sum())
            self.bytes += int(per_layer @ self.expert_bytes)

    def add_uploads(self, cells: NDArray[np.intp]) -> None:
        """Flat cells that a plan moved."""
        if self.expert_bytes is not None and cells.size:
            self.bytes += int(self.expert_bytes[cells // self.shape.n_experts].sum())

    def found(self, n_planned: int) -> HitStats:
        """The sums; `n_planned` uploads came from plans."""
        return HitStats(
            self.pairs,
            self.pairs_found,
            self.experts,
            self.experts_found,
            n_planned + self.on_demand,
            self.on_demand,
            None if self.expert_bytes is None else self.bytes,
            self.judged,
            self.judged_right,
        )


class PolicyReplay:
    """One policy with its slots."""

    def __init__(
        self,
        policy: Policy,
        shape: CacheShape,
        *,
        max_uploads: float | None = None,
        expert_bytes: NDArray[np.int64] | None = None,
        checked_cap: int | None = None,
    ) -> None:
        """max_uploads: what plans may move per layer and batch. checked_cap: check every plan, with this K."""
        self.policy = policy
        self.slots = Slots(shape)
        self.tally = HitCounter(shape, expert_bytes)
        self._shape = shape
        self._checked_cap = checked_cap
        self._per_step = None if max_uploads is None else max_uploads * np.count_nonzero(shape.group >= 0)
        self._credit = 0.0  # uploads that the link has carried until now and that were not asked for
        self._loaded: NDArray[np.bool_] | None = None  # what the last batch of a device-only system loaded
        self._n_planned = 0

    def run(self, chunk: Chunk, hints: Sequence[ExpertPrediction | None] | None = None) -> None:
        """All batches of the chunk; `hints` has an entry for each."""
        there = np.zeros(chunk.counts.shape, dtype=np.bool_)
        hot = np.zeros(chunk.counts.shape, dtype=np.bool_)
        device_only = self.policy.execution_model.device_only
        for index, batch in enumerate(chunk.batches):
            if batch.is_first:
                self.policy.reset()
            if not batch.prefill:
                plan = self._prepare(batch, None if hints is None else hints[index])
                np.copyto(there[index], self.slots.resident, casting="unsafe")
                if plan.expected is None:
                    np.greater_equal(plan.utility, 1.0, out=hot[index])
                else:
                    np.greater_equal(plan.expected, HOT_FROM, out=hot[index])
                if device_only:
                    self._loaded = (batch.counts > 0) & ~there[index]
                    self.tally.add_missing(self._loaded)
            self.policy.observe(
                Observation(
                    batch.counts,
                    batch.ids.shape[1],
                    batch.n_accepted,
                    batch.tokens,
                    batch.ids,
                    None,
                    prefill=batch.prefill,
                )
            )
        self.tally.add(chunk, there, hot)

    def found(self) -> HitStats:
        """The sums over all chunks."""
        return self.tally.found(self._n_planned)

    def _prepare(self, batch: Batch, hints: ExpertPrediction | None) -> Plan:
        """Plans as the engine does before a batch; returns the last plan."""
        if self._per_step is not None:
            self._credit = min(self._credit, 1.0) + self._per_step
        tokens = [] if batch.tokens is None else batch.tokens.tolist()
        if len(tokens) <= 1:
            return self._plan(tokens, hints)
        self._plan(tokens[:1], None)
        if batch.hidden_states is not None and "draft-states" in self.policy.required_inputs:
            hints = ExpertPrediction.of_hidden_states(batch.hidden_states, len(batch.ids))
        return self._plan(tokens, hints)

    def _plan(self, upcoming: list[int], hints: ExpertPrediction | None) -> Plan:
        plan = self.policy.plan(self.slots.resident, upcoming, hints)
        if self._checked_cap is not None:
            check_plan(plan, self._shape, self.slots.resident, self._checked_cap)
        if self._per_step is None:
            moved = self.slots.execute(plan)
        else:
            moved = self.slots.execute(plan, int(self._credit))
            self._credit -= moved.size
        if self._loaded is not None and moved.size:
            moved = moved[~self._loaded.reshape(-1)[moved]]
        self._n_planned += moved.size
        self.tally.add_uploads(moved)
        return plan


class _BoundReplay:
    """An oracle in a lane's place."""

    def __init__(self, bound: Oracle | Belady, shape: CacheShape) -> None:
        self._bound = bound
        self.tally = HitCounter(shape, None)

    def run(self, chunk: Chunk) -> None:
        self.tally.add(chunk, self._bound.run(chunk), None)

    def found(self) -> HitStats:
        return replace(self.tally.found(self._bound.n_uploads), upload_bytes=None)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What is replayed on a schedule."""

    policies: tuple[str, ...]  # none: the bounds alone
    ratios: tuple[float, ...]  # of the experts that fit the slots
    seed: int = 0
    max_uploads: float | None = None  # per layer and batch, of what plans move
    expert_bytes: NDArray[np.int64] | None = None  # [n_layers]
    profile: NDArray[np.int64] | None = None  # [n_layers, n_experts], activations elsewhere, for guided policies
    accuracy: dict[str, float] = field(default_factory=dict)  # of the stand-ins for hidden states

    def __post_init__(self) -> None:
        if not self.ratios:
            raise ValueError("nothing to replay: no cache ratio")
        if any(not 0 <= ratio <= 1 for ratio in self.ratios):
            raise ValueError("a cache ratio must be in [0, 1]")
        if self.max_uploads is not None and not self.max_uploads >= 0:
            raise ValueError(f"the uploads per layer and step must be >= 0, not {self.max_uploads}")


def cache_shape(schedule: Schedule, ratio: float) -> CacheShape:
    """One pool of slots for all layers of which experts were recorded."""
    meta = schedule.trace.meta
    layers = schedule.trace.expert_layers()
    group = np.full(meta.n_layers, -1, dtype=np.int32)
    group[layers] = 0
    n_slots = int(ratio * len(layers) * meta.n_experts + 1e-9)
    return CacheShape(meta.n_layers, meta.n_experts, group, np.array([n_slots], dtype=np.int32))


def replay(
    schedule: Schedule, config: ReplayConfig, *, on_batches: Callable[[int], None] = lambda _n: None
) -> list[ReplayRow]:
    """A row for every policy and cache ratio, the bounds behind the policies; ratio by ratio, as they are named.

    on_batches: told how many batches are done. Raises ValueError for an unknown policy.
    """
    trace = schedule.trace
    policy_config = PolicyConfig(gamma=schedule.gamma, profile=config.profile)
    foresight = NoisyPredictor(trace, config.seed, config.accuracy)
    next_use = NextUse(schedule.chunks())
    lanes: list[tuple[PolicyReplay, str | None]] = []
    bounds: list[_BoundReplay] = []
    shapes = [cache_shape(schedule, ratio) for ratio in config.ratios]
    for shape in shapes:
        for name in config.policies:
            policy = make_policy(name, shape, policy_config)
            lane = PolicyReplay(policy, shape, max_uploads=config.max_uploads, expert_bytes=config.expert_bytes)
            source = source_of(policy.required_inputs)
            lanes.append((lane, source if source in config.accuracy else None))
        n_slots = int(shape.capacity[0])
        bounds.append(_BoundReplay(Oracle(next_use.n_cells, n_slots), shape))
        bounds.append(_BoundReplay(Belady(next_use, n_slots), shape))
    sources = list(dict.fromkeys(source for _, source in lanes if source is not None))
    for chunk in schedule.chunks():
        told = {source: foresight.foretell(chunk, source) for source in sources}
        for lane, source in lanes:
            lane.run(chunk, None if source is None else told[source])
        for bound in bounds:
            bound.run(chunk)
        on_batches(chunk.first + len(chunk.batches))
    rows = []
    n = len(config.policies)
    for index, shape in enumerate(shapes):
        oracle, belady = (bound.found() for bound in bounds[2 * index : 2 * index + 2])
        reference = _Reference(schedule, config, config.ratios[index], shape, oracle, belady)
        for name, (lane, source) in zip(config.policies, lanes[n * index : n * (index + 1)], strict=True):
            rows.append(reference.row(name, lane.found(), source, foresight))
        rows += [
            reference.row(name, found, None, foresight) for name, found in zip(BOUNDS, (oracle, belady), strict=True)
        ]
    return rows


@dataclass(frozen=True, eq=False)
class _Reference:
    """What the rows of one cache ratio share."""

    schedule: Schedule
    config: ReplayConfig
    ratio: float
    shape: CacheShape
    oracle: HitStats
    belady: HitStats

    def row(self, name: str, found: HitStats, source: str | None, foresight: NoisyPredictor) -> ReplayRow:
        schedule = self.schedule
        layer_steps = max(schedule.n_steps * int(np.count_nonzero(self.shape.group >= 0)), 1)
        oracle = _share(self.oracle.pairs_found, self.oracle.pairs)
        hits = _share(found.pairs_found, found.pairs)
        n_bytes = found.upload_bytes
        return ReplayRow(
            policy=name,
            cache_ratio=self.ratio,
            rejected_token_model=schedule.rejected_token_model,
            hit_rate_pairs=hits,
            hit_rate_unique=_share(found.experts_found, found.experts),
            uploads_per_layer_step=round(found.uploads / layer_steps, 6),
            hot_cold_accuracy=_share(found.judged_right, found.judged) if found.judged else None,
            on_demand_per_layer_step=round(found.on_demand / layer_steps, 6),
            bytes_per_step=None if n_bytes is None else round(n_bytes / max(schedule.n_steps, 1), 1),
            share_of_oracle=round(hits / oracle, 6) if oracle else None,
            oracle_hit_rate_pairs=oracle,
            belady_hit_rate_unique=_share(self.belady.experts_found, self.belady.experts),
            slots=int(self.shape.capacity[0]),
            prediction_source=source,
            predictor_accuracy=None if source is None else foresight.accuracy[source],
            token_ids=schedule.has_tokens,
            draft_hidden_states=schedule.trace.hidden_states is not None,
            profile=self.config.profile is not None,
            steps=schedule.n_steps,
            texts=schedule.n_texts,
            gamma=schedule.gamma,
            acceptance=None if schedule.acceptance is None else round(schedule.acceptance, 6),
            tokens_per_step=round(schedule.tokens_per_step, 6),
            max_uploads=self.config.max_uploads,
            seed=self.config.seed,
            model=schedule.trace.meta.model,
        )


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def profile_of(schedule: Schedule) -> NDArray[np.int64]:
    """Activations [n_layers, n_experts] of all batches, prompts included."""
    meta = schedule.trace.meta
    total = np.zeros((meta.n_layers, meta.n_experts), dtype=np.int64)
    for chunk in schedule.chunks():
        total += chunk.counts.sum(axis=0)
    return total
