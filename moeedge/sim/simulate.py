"""One simulation: a policy, a machine, a model and what drives it, and the row of figures that comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.native.abi import Phase
from moeedge.policies.base import CacheShape, ExecutionModel, Policy, PolicyConfig
from moeedge.policies.registry import BOUNDS, make_policy
from moeedge.sim.clock import Log
from moeedge.sim.execution import CAUSES, Execution, TimeBreakdown
from moeedge.sim.machine import Machine
from moeedge.sim.model_shape import ModelShape
from moeedge.sim.noisy_predictor import Accuracy, NoisyPredictorInTime
from moeedge.trace.format import Trace, TraceMeta, ids_dtype
from moeedge.trace.schedule import Batch, cut_schedule, recorded_schedule
from moeedge.trace.steps import RejectedTokenModel

_WARM_SHARE, _WARM_STEPS = 0.2, 24  # of the steps, but no more than so many


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is varied."""

    policy: str
    cache_ratio: float
    gamma: int
    acceptance: float = 0.8  # of a draft, where the trace does not tell
    cap: int = 4  # K
    link_factor: float = 1.0  # speed of the link over that of the machine
    ablations: frozenset[str] = frozenset()
    rejected_token_model: RejectedTokenModel = "optimistic"
    accuracy: Accuracy = field(default_factory=Accuracy)
    seed: int = 0
    balanced: bool = True  # the policy knows the machine's unit times
    max_steps: int | None = None  # verifications; None: all that the text gives
    options: tuple[tuple[str, Any], ...] = ()  # anything else that PolicyConfig takes

    def __post_init__(self) -> None:
        if not 0 <= self.cache_ratio <= 1:
            raise ValueError(f"the cache ratio must be in [0, 1], not {self.cache_ratio}")
        if self.gamma < 0:
            raise ValueError(f"gamma must be >= 0, not {self.gamma}")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"the acceptance must be in [0, 1], not {self.acceptance}")
        if not 1 <= self.cap <= 64:
            raise ValueError(f"the utility cap (-K) must be in 1..64, not {self.cap}")
        if not self.link_factor > 0:
            raise ValueError(f"the link factor must be > 0, not {self.link_factor}")


@dataclass(frozen=True, eq=False)
class Result:
    """Seconds per token of text, by cause; see moeedge.sim.execution."""

    setup: Setup
    gamma: int  # in effect: 0 where the system has no draft
    account: TimeBreakdown
    step_s: NDArray[np.float64]  # of every verification accounted for
    log: Log
    n_expert_layers: int
    first_step: int = 0  # number of the first verification accounted for

    @property
    def tpot_s(self) -> float:
        """Time per token of text."""
        return self.account.total_ns * 1e-9 / max(self.account.tokens, 1)

    @property
    def tg_ts(self) -> float:
        """Tokens per second."""
        return 1.0 / self.tpot_s if self.tpot_s else 0.0

    def row(self, **about: Any) -> dict[str, Any]:
        """Flat, as -o json prints it; `about` names hardware, model and trace."""
        account, setup = self.account, self.setup
        per_token = {f"{cause}_s": account.ns[cause] * 1e-9 / max(account.tokens, 1) for cause in CAUSES}
        busy = {name: ns * 1e-9 for name, ns in self.log.busy_ns.items() if name in ("gpu", "cpu", "link")}
        return {
            "policy": setup.policy,
            **about,
            "cache_ratio": setup.cache_ratio,
            "gamma": self.gamma,
            "utility_cap": setup.cap,
            "link_factor": setup.link_factor,
            "ablations": ",".join(sorted(setup.ablations)),
            "tg_ts": self.tg_ts,
            "tpot_s": self.tpot_s,
            "tokens_per_step": account.tokens / max(account.steps, 1),
            "draft_s": per_token["draft_s"],
            "dense_s": per_token["dense_s"],
            "device_s": per_token["device_s"],
            "stall_cpu_s": per_token["cpu_s"],
            "stall_load_s": per_token["load_s"],
            "stall_link_s": per_token["link_s"],
            "host_s": per_token["host_s"],
            "hit_rate_pairs": account.pairs_hit / max(account.pairs, 1),
            "hit_rate_unique": account.unique_hit / max(account.unique, 1),
            "uploads_per_layer_step": account.uploads / max(account.steps * self.n_expert_layers, 1),
            "steps": account.steps,
            "tokens": account.tokens,
            **{f"busy_{name}_s": value for name, value in busy.items()},
        }


class Source:
    """What drives a simulation: with the gamma that it was recorded with, a trace's own steps; else windows over it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.n_layers, self.n_experts = trace.meta.n_layers, trace.meta.n_experts
        self.expert_layers = trace.expert_layers()

    def steps(self, gamma: int, acceptance: float, seed: int, rejected_token_model: RejectedTokenModel) -> list[Batch]:
        """The same for the same arguments. Raises InputError where no text is as long as a step."""
        schedule = recorded_schedule(self.trace) if 0 < gamma == self.trace.meta.gamma else None
        if schedule is None:
            schedule = cut_schedule(
                self.trace, gamma=gamma, acceptance=acceptance, rejected_token_model=rejected_token_model, seed=seed
            )
        return schedule.batches()


def synthetic(shape: ModelShape, n_tokens: int, n_texts: int, seed: int) -> Source:
    """Text of the model's stand-in process. Raises ValueError where the model has none."""
    if shape.routing is None:
        raise ValueError(f"nothing is known of the routing of {shape.name}: name a trace")
    rng = np.random.default_rng(seed)
    texts = shape.routing.draw(shape.n_expert_layers, shape.n_experts, shape.k, [n_tokens] * n_texts, rng)
    place = np.tile(np.arange(n_tokens, dtype=np.int32), n_texts)
    trace = Trace(
        meta=TraceMeta(
            model=shape.name, n_layers=shape.n_expert_layers, n_experts=shape.n_experts, n_expert_used=shape.k
        ),
        ids=np.concatenate(texts).astype(ids_dtype(shape.n_experts)),
        phase=np.full(place.size, Phase.DECODE, dtype=np.uint8),
        sequence=np.repeat(np.arange(n_texts, dtype=np.int32), n_tokens),
        step=place,
        accepted=np.ones(place.size, dtype=np.bool_),
        token=np.full(place.size, -1, dtype=np.int32),
        position=place,
    )
    return Source(trace)


def simulate(machine: Machine, source: Source, setup: Setup, *, keep_log: bool = False) -> Result:
    """Runs one setup over all steps of the source; the same arguments give the same events."""
    gamma = 0 if "no-sd" in setup.ablations or not execution_model_of(setup.policy).speculation else setup.gamma
    shape = _cache(source, setup.cache_ratio)
    machine = machine.with_link(setup.link_factor)
    steps = _first(source.steps(gamma, setup.acceptance, setup.seed, setup.rejected_token_model), setup.max_steps)
    n_verified = sum(not step.prefill for step in steps)
    policy = _policy(machine, shape, setup, gamma, steps)
    warm_steps = min(int(_WARM_SHARE * n_verified), _WARM_STEPS)
    stand_in = NoisyPredictorInTime(source.n_layers, source.n_experts, setup.accuracy, setup.seed)
    execution = Execution(
        machine,
        shape,
        policy,
        steps,
        stand_in=stand_in,
        warm_steps=warm_steps,
        keep_log=keep_log,
    )
    account = execution.run()
    return Result(
        setup=setup,
        gamma=gamma,
        account=account,
        step_s=np.array(execution.step_ns) * 1e-9,
        log=execution.log,
        n_expert_layers=len(source.expert_layers),
        first_step=warm_steps,
    )


def _first(steps: list[Batch], n_verified: int | None) -> list[Batch]:
    """Up to the `n_verified`-th verification."""
    if n_verified is None:
        return steps
    ends = np.flatnonzero([not step.prefill for step in steps])
    return steps[: ends[n_verified - 1] + 1] if 0 < n_verified < len(ends) else steps


def _cache(source: Source, ratio: float) -> CacheShape:
    group = np.full(source.n_layers, -1, dtype=np.int32)
    group[source.expert_layers] = 0
    n_slots = int(ratio * len(source.expert_layers) * source.n_experts + 1e-9)  # as in a replay
    return CacheShape(source.n_layers, source.n_experts, group, np.array([n_slots], dtype=np.int32))


def _policy(machine: Machine, shape: CacheShape, setup: Setup, gamma: int, steps: list[Batch]) -> Policy:
    future = None
    if setup.policy in BOUNDS:
        future = np.stack([step.counts for step in steps if not step.prefill])
    config = PolicyConfig(
        gamma=gamma,
        cap=setup.cap,
        ablations=setup.ablations - {"no-sd"},
        cost_model=machine.units(setup.cap) if setup.balanced else None,
        future=future,
        **dict(setup.options),
    )
    return make_policy(setup.policy, shape, config)


def execution_model_of(policy: str) -> ExecutionModel:
    """How the system of that name executes its plans. Raises ValueError for an unknown one."""
    config = PolicyConfig(future=np.zeros((1, 1, 1), dtype=np.uint32) if policy in BOUNDS else None)
    return make_policy(policy, CacheShape.uniform(1, 1, 1), config).execution_model
