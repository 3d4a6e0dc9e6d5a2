"""Replays a trace: every policy plans for its batches, with transfers that take no time.

Before each batch a policy plans as it does in the engine: once with the token that the target added, and once with the
drafts, where the trace holds tokens. Its uploads are there at once. Then the batch comes, and experts that are resident
are hits. So a replay says how well a policy predicts and how much it moves for that. Whether a link can keep up is the
simulator's question, except that `max_uploads` can limit what plans move, the same for all policies.

Systems that compute everything on the device (`ExecutionModel.device_only`) load each missing expert when it is needed:
one transfer, which counts as an upload but not as a hit; experts that they then keep cost no second one. Policies that
plan before every layer do so as in the engine (`StepDriver.push_layer`), and what they push before a layer is there for
the layers after it; of a layer the experts that are resident when it is computed are hits. Traces lack the hidden
states of layers; policies that read them go by their caches alone, unless noisy predictions of a stated accuracy take
their place (sim/noisy_predictor.py), those of the next layers' gates layer by layer. Where transfers take no time, a
predictor that is nearly always right makes any cache nearly the oracle, so such rows compare the stated accuracies.

All policies and cache ratios go through the trace together, chunk by chunk: windows are counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExpertPrediction, Plan, Policy, PolicyConfig, check_plan
from moeedge.policies.bounds import NEVER, NextUse, belady_residency, oracle_residency
from moeedge.policies.registry import BOUNDS, TABLE, make_policy
from moeedge.scheduler.driver import StepDriver
from moeedge.sim.batches import HitStats, cache_shape, observation_of
from moeedge.sim.noisy_predictor import (
    NO_PREDICTOR,
    GatePrediction,
    NoisyPredictor,
    PredictorAccuracy,
    popularity_of,
)
from moeedge.sim.slots import Slots
from moeedge.trace.schedule import Batch, Chunk, Schedule

# An expert of which so many activations are expected is called hot. Activations come in bunches: of one expected the
# chance of any is below 1 - 1/e. The best of 0.5 to 1.3 on gpt-oss-20b and Gemma, optimistic and pessimistic
HOT_FROM = 0.8


@dataclass(frozen=True)
class ReplayRow:
    """One policy, cache ratio and model of rejected tokens.

    Shares are of all batches; uploads are per layer with experts and batch. None: not known, or not of this policy.
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
    prediction_source: str | None  # of the noisy predictions; None: the policy got none
    predictor_accuracy: float | None
    token_ids: bool  # known before their step: the trace holds them, and its steps are the recorded ones
    draft_hidden_states: bool  # likewise
    profile: bool  # made from texts held out
    steps: int
    texts: int
    gamma: int
    acceptance_rate: float | None  # accepted over drafted tokens
    acceptance_chance: float | None  # of a draft, after all before it were accepted
    tokens_per_step: float
    max_uploads: float | None
    link_bytes_per_s: float | None  # that max_uploads follows from
    step_time_s: float | None  # likewise
    fresh_memory: bool  # every text began with an empty policy
    without_predictor: bool  # its predictor reads what a trace lacks, and nothing took its place: not to be ranked
    seed: int
    model: str

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Link:
    """A link and the time that it has in each step."""

    bytes_per_s: float
    step_s: float

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.step_s > 0):
            raise ValueError(f"a link needs a rate and a step time above 0, not {self.bytes_per_s} and {self.step_s}")

    def max_uploads(self, expert_bytes: NDArray[np.int64], expert_layers: Sequence[int]) -> float:
        """Experts of mean size per layer with experts and step; expert_bytes [n_layers]."""
        return self.bytes_per_s * self.step_s / float(expert_bytes[list(expert_layers)].sum())


@dataclass(frozen=True)
class ReplayArm:
    """One policy or bound that goes through a trace."""

    policy: str  # or a bound: oracle, belady
    cache_ratio: float
    max_uploads: float | None = None  # per layer and batch, of what plans move


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What is replayed on a schedule."""

    policies: tuple[str, ...]  # none: the bounds alone
    ratios: tuple[float, ...]  # of the experts that fit the slots
    seed: int = 0
    max_uploads: float | None = None  # per layer and batch, of what plans move
    link: Link | None = None  # that max_uploads follows from
    fresh_memory: bool = False  # every text begins with an empty policy; what is on the device stays
    expert_bytes: NDArray[np.int64] | None = None  # [n_layers]
    profile: NDArray[np.int64] | None = None  # [n_layers, n_experts], activations elsewhere, for guided policies
    accuracy: PredictorAccuracy = NO_PREDICTOR

    def __post_init__(self) -> None:
        if not self.ratios:
            raise ValueError("nothing to replay: no cache ratio")
        if any(not 0 <= ratio <= 1 for ratio in self.ratios):
            raise ValueError("The cache ratio must be in [0, 1]")
        if self.max_uploads is not None and not self.max_uploads >= 0:
            raise ValueError(f"the uploads per layer and step must be >= 0, not {self.max_uploads}")


@dataclass
class ReplayStats:
    """Hits of a policy or bound, what it moved, and how well it told hot from cold."""

    hits: HitStats = field(default_factory=HitStats)
    on_demand: int = 0  # of the uploads: loaded when they were needed
    bytes: int = 0  # of the uploads, where the sizes of experts are known
    judged: int = 0  # (batch, layer, expert) triples called hot or cold
    judged_right: int = 0
    pairs_hit_by_batch: list[int] = field(default_factory=list)  # 0 for prompts
    uploads_until: list[int] = field(default_factory=list)  # the sum of uploads as each batch ended

    def add(self, chunk: Chunk, resident: NDArray[np.bool_]) -> None:
        """Adds the hits of a chunk; resident [n_batches, n_layers, n_experts] as each batch began."""
        hit = np.where(resident, chunk.counts, 0).sum(axis=(1, 2))
        self.pairs_hit_by_batch += np.where(chunk.counted, hit, 0).tolist()
        if chunk.counted.all():
            self.hits.add(chunk.counts, resident)
        else:
            self.hits.add(chunk.counts[chunk.counted], resident[chunk.counted])


class PolicyReplay:
    """One policy with its slots: an expert store whose link carries a limited number of uploads.

    max_uploads: of plans, per layer and batch. expert_bytes: [n_layers]. checked_cap: check every plan against this K.
    fresh_policy: makes the policy that each text begins with; None: `policy` goes through all of them.
    """

    def __init__(
        self,
        policy: Policy,
        shape: CacheShape,
        *,
        max_uploads: float | None = None,
        expert_bytes: NDArray[np.int64] | None = None,
        checked_cap: int | None = None,
        fresh_policy: Callable[[], Policy] | None = None,
    ) -> None:
        self.slots = Slots(shape)
        self.stats = ReplayStats()
        self._driver = StepDriver(policy, self)
        self._shape = shape
        self._expert_layers = np.flatnonzero(shape.group >= 0)
        self._device_only = policy.execution_model.device_only
        self._reads_gates = "block-inputs" in policy.required_inputs
        self._expert_bytes = expert_bytes
        self._checked_cap = checked_cap
        self._fresh_policy = fresh_policy
        self._uploads_per_batch = None if max_uploads is None else max_uploads * self._expert_layers.size
        self._credit = 0.0  # uploads that the link could have carried until now and did not
        self._loaded: NDArray[np.bool_] | None = None  # experts that the last batch of a device-only system loaded

    def run(self, chunk: Chunk, predictions: Sequence[ExpertPrediction | None] | None = None) -> None:
        """Replays all batches of the chunk; `predictions` has an entry for each."""
        resident = np.zeros(chunk.counts.shape, dtype=np.bool_)
        hot = np.zeros(chunk.counts.shape, dtype=np.bool_)
        for index, batch in enumerate(chunk.batches):
            if batch.is_first:
                self._begin_text()
            if not batch.prefill:
                prediction = None if predictions is None else predictions[index]
                plan = self._prepare(batch, prediction)
                if self._driver.plans_layers and (prediction is not None or not self._reads_gates):
                    self._plan_layers(resident[index], prediction)
                else:
                    np.copyto(resident[index], self.slots.resident, casting="unsafe")
                if plan.expected is None:
                    np.greater_equal(plan.utility, 1.0, out=hot[index])
                else:
                    np.greater_equal(plan.expected, HOT_FROM, out=hot[index])
                if self._device_only:
                    self._load_on_demand((batch.counts > 0) & ~resident[index])
            self._driver.observe(observation_of(batch))
            self.stats.uploads_until.append(self.stats.hits.uploads)
        self.stats.add(chunk, resident)
        self._judge(chunk, hot)

    def residency(self) -> NDArray[np.uint8]:
        """uint8 [n_layers, n_experts], 1 for an expert in a slot."""
        return self.slots.resident

    def push(self, plan: Plan) -> None:
        """Carries out as much of a plan as the link allows."""
        if self._checked_cap is not None:
            check_plan(plan, self._shape, self.slots.resident, self._checked_cap)
        if self._uploads_per_batch is not None:
            plan = self._carried(plan)
        moved = self.slots.push(plan)
        if self._loaded is not None and moved.size:
            moved = moved[~self._loaded.reshape(-1)[moved]]
        self._credit -= moved.size
        self._count_uploads(moved)

    def _carried(self, plan: Plan) -> Plan:
        """The plan with the uploads that the link carries, and those that the last batch has loaded already."""
        uploads = plan.uploads
        is_loaded = np.zeros(len(uploads), dtype=np.bool_) if self._loaded is None else self._loaded[tuple(uploads.T)]
        carried = is_loaded | (np.cumsum(~is_loaded) <= int(self._credit))
        return replace(plan, uploads=uploads[carried], priority=plan.priority[carried])

    def _begin_text(self) -> None:
        if self._fresh_policy is None:
            self._driver.begin_text()
        else:
            self._driver = StepDriver(self._fresh_policy(), self)

    def _prepare(self, batch: Batch, prediction: ExpertPrediction | None) -> Plan:
        """Plans and pushes as the engine does before a batch; returns the last plan."""
        if self._uploads_per_batch is not None:
            self._credit = min(self._credit, 1.0) + self._uploads_per_batch
        tokens = batch.known_tokens
        if len(tokens) > 1:
            self._driver.plan_next(tokens[:1])
            self._driver.push()
        early = None if isinstance(prediction, GatePrediction) else prediction
        plan = self._driver.plan_draft(tokens, early, batch.hidden_states)
        self._driver.push()
        self._loaded = None  # the next loads on demand take its place
        return plan

    def _plan_layers(self, resident: NDArray[np.bool_], prediction: ExpertPrediction | None) -> None:
        """Plans and pushes before every layer; sets `resident` [n_layers, n_experts] to what each layer finds."""
        for layer in self._expert_layers.tolist():
            gates = prediction.before(layer) if isinstance(prediction, GatePrediction) else prediction
            self._driver.push_layer(layer, gates)
            np.copyto(resident[layer], self.slots.resident[layer], casting="unsafe")

    def _load_on_demand(self, missing: NDArray[np.bool_]) -> None:
        self._loaded = missing
        flat_ids = np.flatnonzero(missing)
        self.stats.on_demand += flat_ids.size
        self._count_uploads(flat_ids)

    def _count_uploads(self, flat_ids: NDArray[np.intp]) -> None:
        self.stats.hits.uploads += flat_ids.size
        if self._expert_bytes is not None and flat_ids.size:
            self.stats.bytes += int(self._expert_bytes[flat_ids // self._shape.n_experts].sum())

    def _judge(self, chunk: Chunk, hot: NDArray[np.bool_]) -> None:
        """Counts experts rightly called hot or cold; the first batch of a text is not judged: all of it is new."""
        judged = np.flatnonzero(chunk.counted & [not batch.is_first for batch in chunk.batches])
        right = hot[judged] == (chunk.counts[judged] > 0)
        self.stats.judged += judged.size * self._expert_layers.size * self._shape.n_experts
        self.stats.judged_right += int(np.count_nonzero(right[:, self._expert_layers]))


class BoundReplay:
    """A bound with its slots: MIN with bypass where `next_use` is given (Belady), else the one-step oracle."""

    def __init__(self, shape: CacheShape, next_use: NextUse | None = None) -> None:
        self.stats = ReplayStats()
        n = shape.n_layers * shape.n_experts
        self._capacity = int(shape.capacity.sum())
        self._resident = np.zeros(n, dtype=np.bool_)  # by flat id
        self._next_use = next_use
        self._coming = np.full(n, NEVER, dtype=np.int32)  # the batch that uses each expert next

    def run(self, chunk: Chunk) -> None:
        """Replays all batches of the chunk."""
        resident = np.zeros(chunk.counts.shape, dtype=np.bool_)
        for index in range(len(chunk.counts)):
            began = resident[index].reshape(-1)
            if self._next_use is not None:
                began[:] = self._resident
                used, following = self._next_use.of(chunk.first + index)
                self._coming[used] = following
                self._hold(belady_residency(self._resident, used, self._coming, self._capacity))
            elif chunk.counted[index]:
                self._hold(oracle_residency(chunk.counts[index].reshape(-1), self._resident, self._capacity))
                began[:] = self._resident
            self.stats.uploads_until.append(self.stats.hits.uploads)
        self.stats.add(chunk, resident)

    def _hold(self, resident: NDArray[np.bool_]) -> None:
        self.stats.hits.uploads += int(np.count_nonzero(resident & ~self._resident))
        self._resident = resident


def replay(
    schedule: Schedule, config: ReplayConfig, *, on_batches: Callable[[int], None] = lambda _n: None
) -> list[ReplayRow]:
    """A row for every cache ratio and policy, in the order of `config`; after each ratio's policies the bounds.

    on_batches: called with the number of batches that are done. Raises ValueError for an unknown policy.
    """
    arms = [
        ReplayArm(name, ratio, None if name in BOUNDS else config.max_uploads)
        for ratio in config.ratios
        for name in (*config.policies, *BOUNDS)
    ]
    found = replay_arms(schedule, arms, config, on_batches=on_batches)
    bounds = {(arm.cache_ratio, arm.policy): stats for arm, stats in zip(arms, found, strict=True)}
    return [
        _row(
            schedule,
            config,
            arm,
            stats,
            oracle=bounds[arm.cache_ratio, "oracle"],
            belady=bounds[arm.cache_ratio, "belady"],
        )
        for arm, stats in zip(arms, found, strict=True)
    ]


def replay_arms(
    schedule: Schedule,
    arms: Sequence[ReplayArm],
    config: ReplayConfig,
    *,
    on_batches: Callable[[int], None] = lambda _n: None,
) -> list[ReplayStats]:
    """What each arm found; of `config` what all arms share: seed, bytes, profile, predictors, memory between texts."""
    predictor = NoisyPredictor(popularity_of(schedule.trace), config.accuracy, config.seed)
    next_use = None
    if any(arm.policy == "belady" for arm in arms):
        next_use = NextUse((chunk.counts, chunk.counted) for chunk in schedule.chunks())
    replays: list[PolicyReplay | BoundReplay] = []
    for arm in arms:
        if arm.policy in BOUNDS:
            shape = cache_shape(schedule.trace, arm.cache_ratio)
            replays.append(BoundReplay(shape, next_use if arm.policy == "belady" else None))
        else:
            replays.append(_policy_replay(schedule, arm, config))
    sources = [config.accuracy.source_for(TABLE[arm.policy].required_inputs) for arm in arms]
    for chunk in schedule.chunks():
        predictions = {source: predictor.predict_chunk(chunk, source) for source in sources if source is not None}
        for source, arm_replay in zip(sources, replays, strict=True):
            if isinstance(arm_replay, BoundReplay):
                arm_replay.run(chunk)
            else:
                arm_replay.run(chunk, None if source is None else predictions[source])
        on_batches(chunk.first + len(chunk.batches))
    return [arm_replay.stats for arm_replay in replays]


def _policy_replay(schedule: Schedule, arm: ReplayArm, config: ReplayConfig) -> PolicyReplay:
    shape = cache_shape(schedule.trace, arm.cache_ratio)
    policy_config = PolicyConfig(
        gamma=schedule.gamma,
        profile=config.profile,
        max_uploads=None if arm.max_uploads is None else arm.max_uploads * len(schedule.trace.expert_layers()),
    )

    def make() -> Policy:
        return make_policy(arm.policy, shape, policy_config)

    return PolicyReplay(
        make(),
        shape,
        max_uploads=arm.max_uploads,
        expert_bytes=config.expert_bytes,
        fresh_policy=make if config.fresh_memory else None,
    )


def lacks_predictor(policy: str, accuracy: PredictorAccuracy) -> bool:
    """Whether a replay of that policy is of its cache alone, since its predictor reads what a trace lacks."""
    return TABLE[policy].reads_layer_inputs and accuracy.source_for(TABLE[policy].required_inputs) is None


def profile_of(schedule: Schedule) -> NDArray[np.int64]:
    """Activations int64 [n_layers, n_experts] of all batches, including prompts."""
    meta = schedule.trace.meta
    total = np.zeros((meta.n_layers, meta.n_experts), dtype=np.int64)
    for chunk in schedule.chunks():
        total += chunk.counts.sum(axis=0)
    return total


def _row(
    schedule: Schedule,
    config: ReplayConfig,
    arm: ReplayArm,
    stats: ReplayStats,
    *,
    oracle: ReplayStats,
    belady: ReplayStats,
) -> ReplayRow:
    n_layers = len(schedule.trace.expert_layers())
    layer_steps = max(schedule.n_steps * n_layers, 1)
    hit_rate, oracle_hit_rate = round(stats.hits.hit_rate_pairs, 6), round(oracle.hits.hit_rate_pairs, 6)
    knows_bytes = config.expert_bytes is not None and arm.policy not in BOUNDS
    source = config.accuracy.source_for(TABLE[arm.policy].required_inputs)
    return ReplayRow(
        policy=arm.policy,
        cache_ratio=arm.cache_ratio,
        rejected_token_model=schedule.rejected_token_model,
        hit_rate_pairs=hit_rate,
        hit_rate_unique=round(stats.hits.hit_rate_unique, 6),
        uploads_per_layer_step=round(stats.hits.uploads / layer_steps, 6),
        hot_cold_accuracy=round(stats.judged_right / stats.judged, 6) if stats.judged else None,
        on_demand_per_layer_step=round(stats.on_demand / layer_steps, 6),
        bytes_per_step=round(stats.bytes / max(schedule.n_steps, 1), 1) if knows_bytes else None,
        share_of_oracle=round(hit_rate / oracle_hit_rate, 6) if oracle_hit_rate else None,
        oracle_hit_rate_pairs=oracle_hit_rate,
        belady_hit_rate_unique=round(belady.hits.hit_rate_unique, 6),
        slots=int(cache_shape(schedule.trace, arm.cache_ratio).capacity[0]),
        prediction_source=source,
        predictor_accuracy=None if source is None else config.accuracy.of(source),
        token_ids=schedule.has_tokens,
        draft_hidden_states=schedule.has_hidden_states,
        profile=config.profile is not None,
        steps=schedule.n_steps,
        texts=schedule.n_texts,
        gamma=schedule.gamma,
        acceptance_rate=None if schedule.acceptance_rate is None else round(schedule.acceptance_rate, 6),
        acceptance_chance=None if schedule.acceptance_chance is None else round(schedule.acceptance_chance, 6),
        tokens_per_step=round(schedule.tokens_per_step, 6),
        max_uploads=config.max_uploads,
        link_bytes_per_s=None if config.link is None else config.link.bytes_per_s,
        step_time_s=None if config.link is None else config.link.step_s,
        fresh_memory=config.fresh_memory,
        without_predictor=lacks_predictor(arm.policy, config.accuracy),
        seed=config.seed,
        model=schedule.trace.meta.model,
    )
