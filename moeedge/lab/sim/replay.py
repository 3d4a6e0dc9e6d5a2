"""Replays a trace under many policies (sim/policy_replay.py), and describes the results in rows.

All policies and cache ratios go through the trace together, batch by batch: windows are counted once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import require
from moeedge.hardware.provenance import Provenance
from moeedge.lab.sim.expert_budgets import BudgetedTrace
from moeedge.lab.sim.noisy_predictor import NO_PREDICTOR, NoisyPredictor, PredictorAccuracy
from moeedge.lab.sim.policy_replay import BoundReplay, NextUses, PolicyReplay, ReplayStats, next_uses
from moeedge.lab.traces.schedule import AcceptanceSource, Schedule, cache_shape
from moeedge.policies.base import PolicyConfig
from moeedge.policies.cost_model import CostModel
from moeedge.policies.expert_budget import ExpertBudget, budget_record
from moeedge.policies.registry import BOUNDS, TABLE, make_policy
from moeedge.records import figure, filled
from moeedge.run import NO_PROGRESS, Progress


@dataclass(frozen=True, eq=False)
class ReplayInput:
    """A schedule to replay and what is known about it."""

    schedule: Schedule
    trace: str = ""  # name
    texts: str = "all"  # which of the trace
    profile: NDArray[np.int64] | None = None  # [n_layers, n_experts], activations in texts that are not replayed
    expert_bytes: NDArray[np.int64] | None = None  # [n_layers]
    provenance: Provenance | None = None
    budgets: tuple[ExpertBudget | None, ...] | None = None  # None among them: no budget; instead of them: not asked for


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What all inputs have in common."""

    policies: tuple[str, ...]  # without bounds, which are always added
    ratios: tuple[float, ...]  # of the experts that fit the slots
    seed: int = 0
    max_uploads: float | None = None  # per layer and batch, of what plans move; curves have limits of their own
    fresh_memory: bool = False  # every text begins with an empty policy; what is on the device stays
    accuracy: PredictorAccuracy = NO_PREDICTOR
    cost_model: CostModel | None = None  # times that policies know
    hardware: str | None = None  # whose

    def __post_init__(self) -> None:
        require(self.ratios, "nothing to replay: no cache ratio")
        is_share = all(0 <= ratio <= 1 for ratio in self.ratios)
        require(is_share, "the cache ratio (--cache-ratio) must be from 0 to 1 (1: all experts)")
        is_limit = self.max_uploads is None or self.max_uploads >= 0
        require(is_limit, f"the uploads per layer and step must be >= 0, not {self.max_uploads}")


@dataclass(frozen=True)
class ReplayArm:
    """One policy or bound that goes through a trace."""

    policy: str  # or a bound: oracle, belady
    cache_ratio: float
    max_uploads: float | None = None  # per layer and batch, of what plans move
    budget: ExpertBudget | None = None


@dataclass(frozen=True, kw_only=True)
class ReplaySetting:
    """What was replayed; None: not known."""

    model: str = figure("The trace's model")
    rejected_token_model: str = figure("How rejected drafts route: recorded, or assumed optimistic or pessimistic")
    cache_ratio: float = figure("Share of all experts of the recorded layers that the slots hold", most=1)
    slots: int = figure("One pool for all layers")
    gamma: int = figure("Most drafts of a step")
    acceptance_rate: float | None = figure("Accepted over drafted tokens", most=1)
    acceptance_chance: float | None = figure("Chance of a draft after all before it were accepted", most=1)
    acceptance_source: AcceptanceSource | None = figure(
        "Recorded: drafts were accepted as in the trace; measured: windows were cut with the trace's own chance; "
        "assumed: with that of --acceptance-chance, or 0.8; null without drafts"
    )
    steps: int = figure("Steps that were replayed")
    fresh_memory: bool = figure("Whether every text began with an empty policy")
    provenance: Provenance | None = figure("", prefix="", default=None)


def setting_of(given: ReplayInput, cache_ratio: float) -> dict[str, Any]:
    """The fields of a `ReplaySetting` that are neither the schedule's nor the configuration's."""
    schedule = given.schedule
    rate, chance = schedule.acceptance_rate, schedule.acceptance_chance
    return {
        "model": schedule.trace.meta.model,
        "slots": int(cache_shape(schedule.trace, cache_ratio).capacity[0]),
        "acceptance_rate": None if rate is None else round(rate, 6),
        "acceptance_chance": None if chance is None else round(chance, 6),
        "steps": schedule.n_steps,
    }


@dataclass(frozen=True, kw_only=True)
class ReplayRow(ReplaySetting):
    """One policy, cache ratio and model of rejected tokens.

    Shares are of all batches; uploads are per layer with experts and batch. None: not known, or not of this policy.
    """

    is_open: ClassVar = True  # with --expert-budget also its keys

    policy: str = figure("Policy or bound")
    hit_rate_pairs: float = figure(
        "Share of (token, expert) pairs whose expert was resident when the step began", most=1
    )
    hit_rate_experts: float = figure("The same of distinct experts, summed over steps and layers", most=1)
    uploads_per_layer_step: float = figure("Experts uploaded per layer with experts and step, loads on demand included")
    hot_cold_accuracy: float | None = figure(
        "Share of (step, layer, expert) predicted correctly as used or unused, first steps of texts excluded; hot: ln "
        "2 or more expected activations where the policy estimates them (of independent activations an even chance of "
        "one), otherwise a utility of at least 1; null for bounds",
        most=1,
    )
    on_demand_per_layer_step: float = figure("Of the uploads, the loads on demand")
    bytes_per_step: float | None = figure("Uploaded, all layers; null: the size of experts is unknown", "bytes")
    share_of_oracle: float | None = figure("Pair hits over those of the one-step oracle")
    oracle_hit_rate_pairs: float = figure("Pair hits of the one-step oracle", most=1)
    above_oracle: Literal["within-step"] | None = figure(
        "Why a policy finds more pairs than the best residency that does not change within a step: its slots change "
        "between layers, so that one serves several; null where it does not"
    )
    belady_hit_rate_experts: float = figure(
        "Distinct experts hit by the best cache that holds only used experts", most=1
    )
    prediction_source: str | None = figure("The noisy predictor; null: none")
    predictor_accuracy: float | None = figure("Its accuracy", most=1)
    token_ids: bool = figure("Whether the trace has the tokens' vocabulary ids, which spac reads")
    draft_hidden_states: bool = figure("Whether the trace has the draft's hidden states, which spac reads")
    profile: bool = figure("Whether texts were held out for a profile")
    texts: int = figure("Texts that were replayed")
    tokens_per_step: float = figure("Tokens of a step, the mean")
    max_uploads: float | None = figure("Most uploads per layer and step, which policies were told; null: no limit")
    without_predictor: bool = figure(
        "Whether the row is of a cache whose predictor reads what a trace lacks: not ranked"
    )
    seed: int = figure("Of random choices")
    hardware: str | None = figure("The machine and model whose times policies know", default=None, optional=True)
    expert_budget: dict[str, Any] | None = figure("", default=None, in_json=False)  # the row's budget and its figures

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        row = {"policy": self.policy} | asdict(self)
        if self.hardware is None:
            del row["hardware"]
        return row | {**(row.pop("expert_budget") or {}), **(row.pop("provenance") or {})}


def replay(given: ReplayInput, config: ReplayConfig, progress: Progress = NO_PROGRESS) -> list[ReplayRow]:
    """A row for every cache ratio, budget and policy, in the order of `config`; after the policies the bounds.

    progress: of a task whose unit is a batch. Raises ValueError for an unknown policy.
    """
    arms = [
        ReplayArm(name, ratio, None if name in BOUNDS else config.max_uploads, budget)
        for ratio in config.ratios
        for budget in given.budgets or (None,)
        for name in (*config.policies, *BOUNDS)
    ]
    by_arm = dict(zip(arms, replay_arms(given, arms, config, progress), strict=True))
    return [_row(given, config, arm, by_arm) for arm in arms]


def replay_arms(
    given: ReplayInput, arms: Sequence[ReplayArm], config: ReplayConfig, progress: Progress = NO_PROGRESS
) -> list[ReplayStats]:
    """What each arm found. Of `config` what all arms share is read: seed, predictors, times, memory between texts.

    Arms of the same expert budget go through the same experts. Predictors predict what the router chooses.
    """
    schedule = given.schedule
    budgeted = {arm.budget: BudgetedTrace(schedule.trace, arm.budget) for arm in arms if given.budgets is not None}
    uses: dict[ExpertBudget | None, NextUses] = {}
    progress.phase("reading ahead")
    for budget in {arm.budget for arm in arms if arm.policy == "belady"}:
        uncounted, meta = BudgetedTrace(schedule.trace, budget), schedule.trace.meta
        ahead = (uncounted.limited(batch) for batch in schedule.batches())
        uses[budget] = next_uses(ahead, meta.n_layers * meta.n_experts)
    replays: list[PolicyReplay | BoundReplay] = []
    for arm in arms:
        if arm.policy in BOUNDS:
            shape = cache_shape(schedule.trace, arm.cache_ratio)
            replays.append(BoundReplay(shape, uses[arm.budget] if arm.policy == "belady" else None))
        else:
            replays.append(_policy_replay(given, arm, config))
    sources = [config.accuracy.source_for(TABLE[arm.policy].make.required_inputs) for arm in arms]
    popularity = profile_of(schedule).astype(np.float64) if any(sources) else np.zeros((0, 0))
    predictor = NoisyPredictor(popularity, config.accuracy, config.seed)
    progress.phase("replaying")
    for batch in schedule.batches():
        predictions = predictor.predict(batch.ids) if any(sources) and not batch.prefill else None
        limited = {budget: trace.limited(batch) for budget, trace in budgeted.items()}
        for arm, source, arm_replay in zip(arms, sources, replays, strict=True):
            arm_replay.run(limited.get(arm.budget, batch), None if source is None else predictions)
        progress.add()
    for arm, arm_replay in zip(arms, replays, strict=True):
        arm_replay.stats.budgeted = budgeted.get(arm.budget)
    return [arm_replay.stats for arm_replay in replays]


def _policy_replay(given: ReplayInput, arm: ReplayArm, config: ReplayConfig) -> PolicyReplay:
    schedule, limit = given.schedule, arm.max_uploads
    shape = cache_shape(schedule.trace, arm.cache_ratio)
    policy_config = PolicyConfig(
        gamma=schedule.gamma,
        profile=given.profile,
        cost_model=config.cost_model,
        max_uploads=None if limit is None else limit * len(schedule.trace.expert_layers()),
    )
    make = partial(make_policy, arm.policy, shape, policy_config)
    fresh_policy = make if config.fresh_memory else None
    return PolicyReplay(make(), shape, max_uploads=limit, expert_bytes=given.expert_bytes, fresh_policy=fresh_policy)


def lacks_predictor(policy: str, accuracy: PredictorAccuracy) -> bool:
    """Whether a replay of that policy is of its cache alone, since its predictor reads what a trace lacks."""
    read = TABLE[policy].make.required_inputs
    return bool(read & {"draft-inputs", "block-inputs"}) and accuracy.source_for(read) is None


def profile_of(schedule: Schedule) -> NDArray[np.int64]:
    """Activations int64 [n_layers, n_experts] of all batches, including prompts."""
    meta = schedule.trace.meta
    total = np.zeros((meta.n_layers, meta.n_experts), dtype=np.int64)
    for batch in schedule.batches():
        total += batch.counts
    return total


def _row(given: ReplayInput, config: ReplayConfig, arm: ReplayArm, found: Mapping[ReplayArm, ReplayStats]) -> ReplayRow:
    schedule, stats = given.schedule, found[arm]
    oracle, belady = (found[replace(arm, policy=name, max_uploads=None)] for name in ("oracle", "belady"))
    n_layers = len(schedule.trace.expert_layers())
    layer_steps = max(schedule.n_steps * n_layers, 1)
    hit_rate, oracle_hit_rate = round(stats.hits.hit_rate_pairs, 6), round(oracle.hits.hit_rate_pairs, 6)
    knows_bytes = given.expert_bytes is not None and arm.policy not in BOUNDS
    source = config.accuracy.source_for(TABLE[arm.policy].make.required_inputs)
    execution = TABLE[arm.policy].make.execution_model
    is_within_step = execution.prefetch_within_step or execution.refills_within_step or execution.keeps_loads
    return filled(
        ReplayRow,
        *(config, arm, schedule, given),
        **setting_of(given, arm.cache_ratio),
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
        profile=given.profile is not None,
        texts=schedule.n_texts,
        tokens_per_step=round(schedule.tokens_per_step, 6),
        without_predictor=lacks_predictor(arm.policy, config.accuracy),
        expert_budget=stats.budgeted and budget_record(arm.budget, gamma=schedule.gamma) | stats.budgeted.row(),
    )
