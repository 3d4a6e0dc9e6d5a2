"""One simulation: a policy, a machine's costs and a trace, and the row of figures that comes out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from moeedge.errors import require
from moeedge.lab.sim.execution import CAUSES, Execution, TimeBreakdown
from moeedge.lab.sim.expert_budgets import BudgetedTrace
from moeedge.lab.sim.model_shape import ModelShape
from moeedge.lab.sim.noisy_predictor import PredictorAccuracy
from moeedge.lab.sim.step_costs import StepCosts
from moeedge.lab.traces.schedule import AcceptanceSource, Schedule, cache_shape, cut_schedule, recorded_schedule
from moeedge.native.abi import Phase
from moeedge.policies.base import CacheShape, PolicyConfig
from moeedge.policies.expert_budget import ExpertBudget, budget_record
from moeedge.policies.registry import make_policy
from moeedge.records import as_dict, figure, filled
from moeedge.trace.format import Trace, TraceMeta, ids_dtype
from moeedge.trace.steps import RejectedTokenModel

STOCK_POLICY = "llama-cpp"  # without drafts and cache: entire layers on the GPU (--n-cpu-moe)
_WARM_SHARE, _WARM_STEPS_MAX = 0.2, 24  # of the verifications, which are not in the figures


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """What is simulated, and how drafts, rejected tokens and predictions are drawn."""

    policy: str
    cache_ratio: float
    gamma: int
    acceptance: float = 0.8  # of a draft, where the trace has other drafts or none
    cap: int = 4  # K
    link_factor: float = 1.0  # speed of the link over that of the machine
    ablations: frozenset[str] = frozenset()
    rejected_token_model: RejectedTokenModel = "optimistic"
    accuracy: PredictorAccuracy = field(default_factory=PredictorAccuracy)
    seed: int = 0
    max_steps: int | None = None  # verifications, >= 1; None: as many as the text gives
    n_whole_layers: int = 0  # whose experts are all on the device, at the cost of the cache
    budget: ExpertBudget | None = None  # of verifications
    cutoff_layer: int | None = None  # see PolicyConfig

    def __post_init__(self) -> None:
        about, chance = "the cache ratio (--cache-ratio) must be from 0 to 1 (1: all experts), not", self.acceptance
        require(0 <= self.cache_ratio <= 1, f"{about} {self.cache_ratio:g}")
        require(0 <= chance <= 1, f"the acceptance (--acceptance-chance) must be from 0 to 1, not {chance:g}")
        PolicyConfig(gamma=self.gamma, cap=self.cap)  # raises for what policies cannot have
        require(self.link_factor > 0, f"the link factor (--link) must be above 0, not {self.link_factor:g}")
        require(not self.n_whole_layers or self.budget is None, "whole layers have no expert budget")


@dataclass(frozen=True, kw_only=True)
class SimulationRow:
    """One simulation, flat; seconds are per token of text."""

    is_open: ClassVar = True  # with --expert-budget also its keys
    policy: str = figure("Policy, or a program")
    hardware: str | None = figure("The machine", default=None, optional=True)
    model: str | None = figure("The model", default=None, optional=True)
    quant: str | None = figure("Its quantization", default=None, optional=True)
    expert_bytes: int | None = figure("An expert", "bytes", default=None, optional=True)
    trace: str | None = figure("The trace; stand-in: synthetic routing", default=None, optional=True)
    cache_ratio: float = figure("Share of all experts that the slots hold", most=1)
    whole_layers: int = figure("Layers whose experts are all on the device")
    gamma: int = figure("Most drafts of a step")
    utility_cap: int = figure("--utility-cap")
    link_factor: float = figure("Speed of the link over that of the machine")
    rejected_token_model: RejectedTokenModel | Literal["recorded"] | None = figure(
        "How rejected drafts route; null: none"
    )
    acceptance_chance: float | None = figure("Chance of a draft after all before it were accepted, if assumed", most=1)
    acceptance_source: AcceptanceSource | None = figure("Where acceptance is from; null: nothing is drafted")
    ablations: str = figure("--ablate, separated by commas")
    tg_ts: float = figure("Decoding speed", "t/s")
    tpot_s: float = figure("A token", "s")
    tokens_per_step: float = figure("Tokens of a step, the mean")
    draft_s: float = figure("Drafting", "s")
    dense_s: float = figure("Dense part of the layers", "s")
    device_s: float = figure("Experts on the device", "s")
    stall_cpu_s: float = figure("Waiting for experts on the CPU", "s")
    stall_load_s: float = figure("Waiting for loads on demand", "s")
    stall_link_s: float = figure("Waiting for other transfers and late prefetches", "s")
    host_s: float = figure("Handing layers over, observing, planning", "s")
    hit_rate_pairs: float = figure("Pair hits", most=1)
    hit_rate_experts: float = figure("Expert hits", most=1)
    uploads_per_layer_step: float = figure("Experts uploaded per layer with experts and step")
    steps: int = figure("Steps that count")
    tokens: int = figure("Their tokens")
    busy_gpu_s: float = figure("The GPU computes, in all", "s")
    busy_cpu_s: float = figure("The CPU computes, in all", "s")
    busy_link_s: float = figure("The link moves, in all", "s")


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """The times of one simulation; see moeedge.lab.sim.execution for the causes."""

    config: SimulationConfig
    gamma: int  # in effect: 0 where the system has no draft
    rejected_token_model: RejectedTokenModel | Literal["recorded"] | None  # None: nothing is drafted
    time: TimeBreakdown
    busy_s: dict[str, float]  # of gpu, cpu and link, from the first verification on
    n_expert_layers: int
    experts: dict[str, Any]  # the expert budget, and its figures of the verifications in the breakdown

    @property
    def tg_ts(self) -> float:
        return 1.0 / self.time.tpot_s if self.time.tpot_s else 0.0

    def row(self, **about: Any) -> dict[str, Any]:
        """A SimulationRow as -o json prints it; `about` names hardware, model and trace."""
        time, config, model = self.time, self.config, self.rejected_token_model
        is_assumed = model not in (None, "recorded")
        row = filled(
            SimulationRow,
            *(self, config, time, time.hits),
            **about,
            whole_layers=config.n_whole_layers,
            utility_cap=config.cap,
            acceptance_chance=config.acceptance if is_assumed else None,
            acceptance_source="assumed" if is_assumed else model,
            ablations=",".join(sorted(config.ablations)),
            tokens_per_step=time.tokens / max(time.steps, 1),
            **{key: time.per_token_s(cause) for cause, key in CAUSES.items()},
            uploads_per_layer_step=time.hits.uploads / max(time.steps * self.n_expert_layers, 1),
            **{f"busy_{stream}_s": seconds for stream, seconds in self.busy_s.items()},
        )
        return as_dict(row)


@dataclass(frozen=True, eq=False)
class Range:
    """The results with the constants that make a program fastest, with the chosen ones and with the slowest."""

    fast: SimulationResult
    chosen: SimulationResult
    slow: SimulationResult

    @property
    def low_ts(self) -> float:
        return min(result.tg_ts for result in (self.fast, self.chosen, self.slow))

    @property
    def high_ts(self) -> float:
        return max(result.tg_ts for result in (self.fast, self.chosen, self.slow))

    def row(self, **about: Any) -> dict[str, Any]:
        """The row of the chosen constants, with the range of its speed."""
        return self.chosen.row(**about) | {"tg_low_ts": self.low_ts, "tg_high_ts": self.high_ts}


def stock_config(config: SimulationConfig, n_expert_layers: int) -> SimulationConfig:
    """What stock llama.cpp does without drafts and cache, with the same share of the experts on the GPU."""
    return SimulationConfig(
        policy=STOCK_POLICY,
        cache_ratio=config.cache_ratio,
        gamma=0,
        link_factor=config.link_factor,
        seed=config.seed,
        max_steps=config.max_steps,
        n_whole_layers=min(int(config.cache_ratio * n_expert_layers), n_expert_layers - 1),
    )


def compare_with_stock(rows: list[dict[str, Any]]) -> None:
    """Adds the speed of each row over that of the stock row with the same experts on the GPU; None without one."""
    speeds = {(row["cache_ratio"], row["link_factor"]): row["tg_ts"] for row in rows if row["policy"] == STOCK_POLICY}
    for row in rows:
        stock_ts = speeds.get((row["cache_ratio"], row["link_factor"]))
        row["over_stock"] = row["tg_ts"] / stock_ts if stock_ts else None


def synthetic_trace(shape: ModelShape, n_tokens: int, seed: int) -> Trace:
    """A text of plain decoding by the model's synthetic routing. Raises ValueError where the model has none."""
    if shape.routing is None:
        raise ValueError(f"the routing of {shape.name} is not known; give a trace with --trace FILE")
    rng = np.random.default_rng(seed)
    ids = shape.routing.draw(shape.n_expert_layers, shape.n_experts, shape.k, n_tokens, rng)
    position = np.arange(n_tokens, dtype=np.int32)
    return Trace(
        meta=TraceMeta(
            model=shape.name, n_layers=shape.n_expert_layers, n_experts=shape.n_experts, n_expert_used=shape.k
        ),
        ids=ids.astype(ids_dtype(shape.n_experts)),
        phase=np.full(n_tokens, Phase.DECODE, dtype=np.uint8),
        sequence=np.zeros(n_tokens, dtype=np.int32),
        step=position,
        accepted=np.ones(n_tokens, dtype=np.bool_),
        token=np.full(n_tokens, -1, dtype=np.int32),
        position=position,
    )


def simulate(costs: StepCosts, trace: Trace, config: SimulationConfig) -> SimulationResult:
    """Runs one configuration over a trace; the same arguments give the same events.

    Raises ValueError for an unknown policy, InputError where no text is as long as a step.
    """
    gamma = config.gamma if has_draft(config) else 0
    costs = costs.with_link(config.link_factor)
    n_whole, cache_ratio = config.n_whole_layers, config.cache_ratio
    if n_whole:
        layers = trace.expert_layers()
        kept = np.setdiff1d(np.arange(trace.meta.n_layers), layers[:n_whole])
        trace = replace(
            trace,
            ids=trace.ids[:, kept],
            weights=None if trace.weights is None else trace.weights[:, kept],
            meta=replace(trace.meta, n_layers=len(kept)),
        )
        cache_ratio = max(cache_ratio * len(layers) - n_whole, 0.0) / (len(layers) - n_whole)
    recorded = _recorded(trace, gamma)
    schedule = recorded or cut_schedule(
        trace,
        gamma=gamma,
        acceptance_chance=config.acceptance,
        rejected_token_model=config.rejected_token_model,
        seed=config.seed,
    )
    batches, shape = list(schedule.batches()), cache_shape(trace, cache_ratio)
    if config.max_steps is not None:
        verifications = np.flatnonzero(~schedule.prefill)[: config.max_steps]
        batches = batches[: verifications[-1] + 1]
    warm_steps = min(int(_WARM_SHARE * sum(not batch.prefill for batch in batches)), _WARM_STEPS_MAX)
    budgeted = BudgetedTrace(trace, config.budget)
    policy_config = PolicyConfig(
        gamma=gamma,
        cap=config.cap,
        ablations=config.ablations - {"no-sd"},
        cost_model=costs.cost_model(config.cap),
        cutoff_layer=config.cutoff_layer,
    )
    execution = Execution(
        costs,
        shape,
        make_policy(config.policy, shape, policy_config),
        batches,
        accuracy=config.accuracy,
        seed=config.seed,
        warm_steps=warm_steps,
        n_whole_layers=n_whole,
        budgeted=budgeted,
    )
    return SimulationResult(
        config=config,
        gamma=gamma,
        rejected_token_model=None if gamma == 0 else "recorded" if recorded else config.rejected_token_model,
        time=execution.run(),
        busy_s=execution.busy_s,
        n_expert_layers=int(np.count_nonzero(shape.group >= 0)),
        experts=budget_record(config.budget, gamma=gamma) | budgeted.row(),
    )


def has_draft(config: SimulationConfig) -> bool:
    """Whether a configuration drafts tokens. Raises ValueError for an unknown policy."""
    speculates = make_policy(config.policy, CacheShape.uniform(1, 1, 1)).execution_model.speculation
    return config.gamma > 0 and speculates and "no-sd" not in config.ablations


def rejected_token_models(
    trace: Trace, config: SimulationConfig, asked: tuple[RejectedTokenModel, ...]
) -> tuple[RejectedTokenModel, ...]:
    """The models of rejected tokens to simulate a configuration with: those asked for, one where they do not differ."""
    is_known = not has_draft(config) or _recorded(trace, config.gamma) is not None
    return ("optimistic",) if is_known else asked


def _recorded(trace: Trace, gamma: int) -> Schedule | None:
    """A trace's own verifications if it was recorded with this gamma."""
    return recorded_schedule(trace) if 0 < gamma == trace.meta.gamma else None
