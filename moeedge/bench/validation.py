"""The simulator against the engine: one run gives the measured time per token, the trace and the unit times.

For every combination a session is opened, calibrated anew, and answers two prompts with a recorder attached. The first
warms up (slots fill, policies learn); the second is measured. Then its own trace drives the simulation of both on the
unit times that the calibrations gave, and only the second answer is accounted for. Nothing is fitted. All of it is
repeated, and medians count; unit times over all sessions of the same draft length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import numpy as np

from moeedge.engine.loading import resolve_device
from moeedge.engine.recording import TraceCollector, describe
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EngineError
from moeedge.llama.model import Model
from moeedge.policies.base import CacheShape
from moeedge.policies.config import PolicyConfig
from moeedge.policies.cost_model import CostModel
from moeedge.policies.registry import make_policy
from moeedge.scheduler.stats import StepRecord
from moeedge.sim.execution import Execution
from moeedge.sim.machine import Machine, from_units
from moeedge.sim.noisy_predictor import Accuracy, NoisyPredictorInTime
from moeedge.trace.format import Trace
from moeedge.trace.schedule import as_computed

Tell = Callable[[str], None]
PROMPTS = (
    "Explain step by step how to sort a list of numbers, and write a short program that does it.",
    "Tell a story about a harbour in the early morning, then add 31 and 44 and say what the sum means.",
)


@dataclass(frozen=True)
class Combination:
    """One point of the comparison."""

    policy: str
    cache_ratio: float
    gamma: int


@dataclass(frozen=True, eq=False)
class Measured:
    """Seconds per token of text, measured and simulated, and what explains a difference."""

    combination: Combination
    measured_s: float
    simulated_s: float
    tokens: int
    steps: int
    hit_measured: float | None  # pairs
    hit_simulated: float
    draft_measured_s: float  # per token of text
    draft_simulated_s: float
    trace: Trace
    machine: Machine

    @property
    def error(self) -> float:
        """Simulated over measured, less 1."""
        return self.simulated_s / self.measured_s - 1

    def row(self) -> dict[str, Any]:
        """Flat, as -o json prints it."""
        return {
            "policy": self.combination.policy,
            "cache_ratio": self.combination.cache_ratio,
            "gamma": self.combination.gamma,
            "measured_tpot_s": self.measured_s,
            "tpot_s": self.simulated_s,
            "tg_ts": 1 / self.simulated_s,
            "error": self.error,
            "tokens": self.tokens,
            "steps": self.steps,
            "hit_rate_pairs_measured": self.hit_measured,
            "hit_rate_pairs": self.hit_simulated,
            "draft_measured_s": self.draft_measured_s,
            "draft_s": self.draft_simulated_s,
        }


def combinations(policies: Sequence[str], ratios: Sequence[float], gammas: Sequence[int]) -> list[Combination]:
    """Every one."""
    return [Combination(*values) for values in itertools.product(policies, ratios, gammas)]


def summary(rows: Sequence[Measured]) -> tuple[float, float]:
    """Median and largest absolute error."""
    errors = [abs(row.error) for row in rows]
    return median(errors), max(errors)


@dataclass(frozen=True, eq=False)
class _Outcome:
    """What one session of a combination gave."""

    units: CostModel
    shape: CacheShape
    trace: Trace
    warm_steps: int
    steps: int
    tokens: int
    measured_s: float  # per token of text, as what follows
    draft_s: float
    schedule_s: float  # per step
    hit_rate: float | None


def compare(
    base: EngineConfig,
    wanted: Sequence[Combination],
    *,
    n_predict: int,
    repeat: int,
    tell: Tell,
    models: tuple[Model, Model | None],
) -> list[Measured]:
    """Measures all combinations `repeat` times, one after the other, and simulates each on the medians.

    `base` has model, draft, device and threads. Combinations take turns, so that what disturbs the machine for a while
    does not fall on one alone.
    """
    outcomes: dict[Combination, list[_Outcome]] = {one: [] for one in wanted}
    for number in range(repeat):
        for one in wanted:
            tell(f"{one.policy}, ratio {one.cache_ratio:g}, gamma {one.gamma}, {number + 1} of {repeat}")
            outcomes[one].append(_measure(base, one, n_predict, models))
    # unit times are the machine's, not the policy's: all sessions that verify as many tokens measured the same ones
    units = {
        gamma: median_units([outcome.units for one in wanted if one.gamma == gamma for outcome in outcomes[one]])
        for gamma in {one.gamma for one in wanted}
    }
    return [_simulate(base, one, outcomes[one], units[one.gamma]) for one in wanted]


def _measure(base: EngineConfig, one: Combination, n_predict: int, models: tuple[Model, Model | None]) -> _Outcome:
    placement = replace(
        base.placement, policy=one.policy, cache_ratio=one.cache_ratio, vram_bytes=None, measure_anew=True
    )
    config = replace(base, gamma=one.gamma, placement=placement, draft=base.draft if one.gamma else None)
    with Session.open(config, model=models[0], draft_model=models[1] if one.gamma else None) as session:
        if session.placement is None or session.calibration is None or session.calibration.units is None:
            raise EngineError("Nothing was measured: no experts lie on a device.", "Use -dev emulated:link=2GB/s.")
        run = _Run(session)
        for prompt in PROMPTS:
            run.answer(prompt, n_predict)
        group, capacity, _ = session.placement.cache.groups()
        info = session.model.info
        return _Outcome(
            units=session.calibration.units,
            shape=CacheShape(info.n_layers, info.n_experts, group.copy(), capacity.copy()),
            trace=run.collector.trace(),
            warm_steps=run.warm_steps,
            steps=run.steps,
            tokens=run.tokens,
            measured_s=run.measured_s / run.tokens,
            draft_s=run.draft_s / run.tokens,
            schedule_s=run.schedule_s,
            hit_rate=run.hit_rate,
        )


def _simulate(base: EngineConfig, one: Combination, outcomes: Sequence[_Outcome], pooled: CostModel) -> Measured:
    last = outcomes[-1]
    shares = median_units([outcome.units for outcome in outcomes])  # r_c and r_g are of the policy's utilities
    units = replace(pooled, r_c=shares.r_c, r_g=shares.r_g)
    machine = from_units(units, schedule_s=median(outcome.schedule_s for outcome in outcomes))
    policy = make_policy(
        one.policy, last.shape, PolicyConfig(gamma=one.gamma, cap=base.placement.utility_cap, units=units)
    )
    execution = Execution(
        machine,
        last.shape,
        policy,
        as_computed(last.trace).batches(),
        stand_in=NoisyPredictorInTime(last.shape.n_layers, last.shape.n_experts, Accuracy(), 0),
        execution_model=replace(
            policy.execution_model, device_only=base.placement.execution.misses == "load", layerwise=False
        ),
        warm_steps=last.warm_steps,
    )
    account = execution.run()
    return Measured(
        combination=one,
        measured_s=median(outcome.measured_s for outcome in outcomes),
        simulated_s=account.total_ns * 1e-9 / max(account.tokens, 1),
        tokens=last.tokens,
        steps=last.steps,
        hit_measured=last.hit_rate,
        hit_simulated=account.pairs_hit / max(account.pairs, 1),
        draft_measured_s=median(outcome.draft_s for outcome in outcomes),
        draft_simulated_s=account.ns["draft"] * 1e-9 / max(account.tokens, 1),
        trace=last.trace,
        machine=machine,
    )


def median_units(units: Sequence[CostModel]) -> CostModel:
    """The median of every number: one measurement may have been disturbed."""

    def middle(name: str) -> Any:
        stacked = np.stack([np.asarray(getattr(one, name), dtype=np.float64) for one in units])
        found = np.median(stacked, axis=0)
        return found if found.ndim else float(found)

    return CostModel(**{item.name: middle(item.name) for item in fields(CostModel)})


class _Run:
    """Two answers of one session: the first warms up, the second counts."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.collector = TraceCollector(describe(session.info, "moeedge validate"))
        session.observers.append(self.collector)
        self.warm_steps = 0
        self.schedule_s = 0.0  # median of the first answer's steps
        self.measured_s, self.draft_s, self.tokens, self.steps = 0.0, 0.0, 0, 0
        self.hit_rate: float | None = None

    def answer(self, text: str, n_predict: int) -> None:
        """Counts this answer instead of the one before, which becomes the warm-up."""
        session = self.session
        self.warm_steps += self.steps
        session.reset()
        prompt = session.model.tokenize(session.model.render_chat([{"role": "user", "content": text}]))
        if session.target.sensor is not None:
            session.target.sensor.frames()  # of the calibration: not ours
        self.collector.begin(prompt)
        records: list[StepRecord] = []
        before = None
        generation = session.generate(
            prompt, n_predict=n_predict, sampling=SamplingConfig(temperature=0.0), ignore_eos=True
        )
        for record in generation:
            if record.n_verified:
                records.append(record)
            else:
                before = session.placement_stats()
        if generation.stop_reason == "interrupted":
            raise KeyboardInterrupt
        if not records:
            raise EngineError("The model had nothing to say: no step was measured.", "Use a larger -n.")
        after = session.placement_stats()
        if self.steps == 0:
            self.schedule_s = median(record.observe_s for record in records)
        self.steps = len(records)
        self.tokens = sum(record.n_accepted + 1 for record in records)
        self.measured_s = sum(record.draft_s + record.verify_s + record.observe_s for record in records)
        self.draft_s = sum(record.draft_s for record in records)
        if before is not None and after is not None:
            self.hit_rate = (after - before).hit_rate_pairs


def check_paced(config: EngineConfig) -> bool:
    """Whether the device is an emulated one with a paced link, as the comparison asks for."""
    device = resolve_device(config)
    return device.kind == "emulated" and bool(np.isfinite(device.link_bytes_per_s)) and device.link_bytes_per_s > 0
