"""Replays a trace under many policies (sim/policy_replay.py), and describes the results in rows.

All policies and cache ratios go through the trace together, chunk by chunk: windows are counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.budgets import budget_record
from moeedge.lab.sim.batches import cache_shape
from moeedge.lab.sim.expert_budgets import BudgetedTrace
from moeedge.lab.sim.noisy_predictor import (
    NO_PREDICTOR,
    BatchPredictions,
    NoisyPredictor,
    PredictorAccuracy,
)
from moeedge.lab.sim.policy_replay import BoundReplay, NextUse, PolicyReplay, ReplayStats
from moeedge.lab.traces.schedule import AcceptanceSource, Schedule
from moeedge.policies.base import Policy, PolicyConfig
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.policies.registry import BOUNDS, TABLE, make_policy


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was replayed; None: not known."""

    model: str
    rejected_token_model: str  # optimistic, pessimistic or recorded
    cache_ratio: float
    slots: int
    gamma: int
    acceptance_rate: float | None  # accepted over drafted tokens
    acceptance_chance: float | None  # of a draft, after all before it were accepted
    acceptance_source: AcceptanceSource | None
    steps: int
    fresh_memory: bool  # every text began with an empty policy


def setting_of(schedule: Schedule, cache_ratio: float, *, fresh_memory: bool) -> dict[str, Any]:
    """The fields of a `Setting`."""
    rate, chance = schedule.acceptance_rate, schedule.acceptance_chance
    return {
        "model": schedule.trace.meta.model,
        "rejected_token_model": schedule.rejected_token_model,
        "cache_ratio": cache_ratio,
        "slots": int(cache_shape(schedule.trace, cache_ratio).capacity[0]),
        "gamma": schedule.gamma,
        "acceptance_rate": None if rate is None else round(rate, 6),
        "acceptance_chance": None if chance is None else round(chance, 6),
        "acceptance_source": schedule.acceptance_source,
        "steps": schedule.n_steps,
        "fresh_memory": fresh_memory,
    }


@dataclass(frozen=True, kw_only=True)
class ReplayRow(Setting):
    """One policy, cache ratio and model of rejected tokens.

    Shares are of all batches; uploads are per layer with experts and batch. None: not known, or not of this policy.
    """

    policy: str
    hit_rate_pairs: float
    hit_rate_experts: float
    uploads_per_layer_step: float
    hot_cold_accuracy: float | None
    on_demand_per_layer_step: float
    bytes_per_step: float | None
    share_of_oracle: float | None  # of the one-step oracle's pairs
    oracle_hit_rate_pairs: float
    above_oracle: Literal["within-step"] | None  # why it finds more: its slots change between layers
    belady_hit_rate_experts: float
    prediction_source: str | None  # of the noisy predictions; None: the policy got none
    predictor_accuracy: float | None
    token_ids: bool  # known before their step: the trace holds them, and its steps are the recorded ones
    draft_hidden_states: bool  # likewise
    profile: bool  # made from texts held out
    texts: int
    tokens_per_step: float
    max_uploads: float | None
    without_predictor: bool  # its predictor reads what a trace lacks, and nothing took its place: not to be ranked
    seed: int
    expert_budget: dict[str, Any] | None = None  # the row's budget and its figures; None: no budgets were asked for

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        row = {"policy": self.policy} | asdict(self)
        return row | (row.pop("expert_budget") or {})


@dataclass(frozen=True)
class ReplayArm:
    """One policy or bound that goes through a trace."""

    policy: str  # or a bound: oracle, belady
    cache_ratio: float
    max_uploads: float | None = None  # per layer and batch, of what plans move
    budget: ExpertBudget | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What is replayed on a schedule."""

    policies: tuple[str, ...]  # none: the bounds alone
    ratios: tuple[float, ...]  # of the experts that fit the slots
    seed: int = 0
    max_uploads: float | None = None  # per layer and batch, of what plans move
    fresh_memory: bool = False  # every text begins with an empty policy; what is on the device stays
    expert_bytes: NDArray[np.int64] | None = None  # [n_layers]
    profile: NDArray[np.int64] | None = None  # [n_layers, n_experts], activations elsewhere, for guided policies
    accuracy: PredictorAccuracy = NO_PREDICTOR
    budgets: tuple[ExpertBudget | None, ...] | None = None  # None among them: no budget; instead of them: not asked for

    def __post_init__(self) -> None:
        if not self.ratios:
            raise ValueError("nothing to replay: no cache ratio")
        if any(not 0 <= ratio <= 1 for ratio in self.ratios):
            raise ValueError("the cache ratio (--cache-ratio) must be from 0 to 1 (1: all experts)")
        if self.max_uploads is not None and not self.max_uploads >= 0:
            raise ValueError(f"the uploads per layer and step must be >= 0, not {self.max_uploads}")


def replay(
    schedule: Schedule,
    config: ReplayConfig,
    *,
    on_batches: Callable[[int], None] = lambda _n: None,
    on_phase: Callable[[str], None] = lambda _text: None,
) -> list[ReplayRow]:
    """A row for every cache ratio and policy, in the order of `config`; after each ratio's policies the bounds.

    on_batches: called with the number of batches that are done. on_phase: called with what comes next.
    Raises ValueError for an unknown policy.
    """
    arms = [
        ReplayArm(name, ratio, None if name in BOUNDS else config.max_uploads, budget)
        for ratio in config.ratios
        for budget in config.budgets or (None,)
        for name in (*config.policies, *BOUNDS)
    ]
    found = replay_arms(schedule, arms, config, on_batches=on_batches, on_phase=on_phase)
    bounds = {(arm.cache_ratio, arm.budget, arm.policy): stats for arm, stats in zip(arms, found, strict=True)}
    return [
        _row(
            schedule,
            config,
            arm,
            stats,
            oracle=bounds[arm.cache_ratio, arm.budget, "oracle"],
            belady=bounds[arm.cache_ratio, arm.budget, "belady"],
        )
        for arm, stats in zip(arms, found, strict=True)
    ]


def replay_arms(
    schedule: Schedule,
    arms: Sequence[ReplayArm],
    config: ReplayConfig,
    *,
    on_batches: Callable[[int], None] = lambda _n: None,
    on_phase: Callable[[str], None] = lambda _text: None,
) -> list[ReplayStats]:
    """What each arm found; of `config` what all arms share: seed, bytes, profile, predictors, memory between texts.

    Arms of the same expert budget go through the same experts. Predictors predict what the router chooses.
    """
    budgeted = {
        arm.budget: BudgetedTrace(schedule.trace, arm.budget)
        for arm in arms
        if arm.budget is not None or config.budgets is not None
    }
    next_use: dict[ExpertBudget | None, NextUse] = {}
    on_phase("reading ahead")
    for budget in dict.fromkeys(arm.budget for arm in arms if arm.policy == "belady"):
        if budget is None:
            next_use[budget] = NextUse((chunk.counts, chunk.counted) for chunk in schedule.chunks())
        else:
            next_use[budget] = NextUse(budgeted[budget].limited_counts(schedule))
    replays: list[PolicyReplay | BoundReplay] = []
    for arm in arms:
        if arm.policy in BOUNDS:
            shape = cache_shape(schedule.trace, arm.cache_ratio)
            replays.append(BoundReplay(shape, next_use[arm.budget] if arm.policy == "belady" else None))
        else:
            replays.append(_policy_replay(schedule, arm, config))
    sources = [config.accuracy.source_for(TABLE[arm.policy].required_inputs) for arm in arms]
    popularity = profile_of(schedule).astype(np.float64) if any(sources) else np.zeros((0, 0))
    predictor = NoisyPredictor(popularity, config.accuracy, config.seed)
    on_phase("replaying")
    for chunk in schedule.chunks():
        predictions: list[BatchPredictions | None] = []
        if any(sources):
            predictions = [None if batch.prefill else predictor.predict(batch.ids) for batch in chunk.batches]
        limited = {budget: trace.limited_chunk(chunk) for budget, trace in budgeted.items()}
        for n_done, (arm, source, arm_replay) in enumerate(zip(arms, sources, replays, strict=True)):
            on_batches(chunk.first + len(chunk.batches) * n_done // len(arms))
            own = limited.get(arm.budget, chunk)
            if isinstance(arm_replay, BoundReplay):
                arm_replay.run(own)
            else:
                arm_replay.run(own, None if source is None else predictions)
        on_batches(chunk.first + len(chunk.batches))
    for arm, arm_replay in zip(arms, replays, strict=True):
        arm_replay.stats.budgeted = budgeted.get(arm.budget)
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
    read = TABLE[policy].required_inputs
    return bool(read & {"draft-inputs", "block-inputs"}) and accuracy.source_for(read) is None


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
    execution = TABLE[arm.policy].execution_model
    is_within_step = execution.prefetch_within_step or execution.keeps_loads
    return ReplayRow(
        **setting_of(schedule, arm.cache_ratio, fresh_memory=config.fresh_memory),
        policy=arm.policy,
        hit_rate_pairs=hit_rate,
        hit_rate_experts=round(stats.hits.hit_rate_experts, 6),
        uploads_per_layer_step=round(stats.hits.uploads / layer_steps, 6),
        hot_cold_accuracy=round(stats.judged_right / stats.judged, 6) if stats.judged else None,
        on_demand_per_layer_step=round(stats.on_demand / layer_steps, 6),
        bytes_per_step=round(stats.bytes / max(schedule.n_steps, 1), 1) if knows_bytes else None,
        share_of_oracle=round(hit_rate / oracle_hit_rate, 6) if oracle_hit_rate else None,
        oracle_hit_rate_pairs=oracle_hit_rate,
        above_oracle="within-step" if is_within_step and hit_rate > oracle_hit_rate else None,
        belady_hit_rate_experts=round(belady.hits.hit_rate_experts, 6),
        prediction_source=source,
        predictor_accuracy=None if source is None else config.accuracy.of(source),
        token_ids=schedule.has_tokens,
        draft_hidden_states=schedule.has_hidden_states,
        profile=config.profile is not None,
        texts=schedule.n_texts,
        tokens_per_step=round(schedule.tokens_per_step, 6),
        max_uploads=config.max_uploads,
        without_predictor=lacks_predictor(arm.policy, config.accuracy),
        seed=config.seed,
        expert_budget=None
        if config.budgets is None or stats.budgeted is None
        else budget_record(arm.budget, gamma=schedule.gamma) | stats.budgeted.row(),
    )
