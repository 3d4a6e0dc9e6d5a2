"""The simulator against the engine: one run gives the measured time per token, the trace and the cost model.

For every combination a session is opened, calibrated again, and answers two prompts with a recorder attached. The first
answer warms up (slots fill, policies learn), the second is measured. Then their own trace drives the simulation on the
calibrated cost model, and only the second answer counts. Nothing is fitted to the measured times. Everything is
repeated, and medians count; those of the cost model are over all sessions of the same draft length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from moeedge.bench.arms import load_models, open_arm
from moeedge.bench.config import MODES, BenchMode
from moeedge.bench.experiment import BenchArm
from moeedge.bench.samples import Sample, cache_figures
from moeedge.engine.recording import TraceCollector
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError
from moeedge.lab.sim.execution import Execution
from moeedge.lab.sim.noisy_predictor import PredictorAccuracy
from moeedge.lab.sim.step_costs import measured_costs
from moeedge.lab.traces.schedule import cut_schedule, recorded_schedule
from moeedge.llama.model import Model
from moeedge.policies.base import CacheShape, PolicyConfig
from moeedge.policies.cost_model import CostModel
from moeedge.policies.registry import make_policy
from moeedge.records import filled
from moeedge.run import Run
from moeedge.scheduler.stats import StepRecord
from moeedge.trace.format import Trace, TraceMeta

# the first warms up, the second is measured
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


@dataclass(frozen=True)
class Comparison(Combination):
    """A combination measured and simulated, and the counts that explain a difference; the fields are those of -o json.

    Times are seconds per token of text, hit rates are those of (token, expert) pairs.
    """

    measured_tpot_s: float
    tpot_s: float  # simulated, as what follows without "measured" in its name
    tg_ts: float
    error: float  # simulated over measured, minus 1
    tokens: int
    steps: int
    hit_rate_pairs_measured: float | None
    hit_rate_pairs: float
    draft_measured_s: float
    draft_s: float
    rejected_token_model: str | None  # recorded by the engine; None: nothing is drafted


@dataclass(frozen=True, eq=False)
class _Measurement:
    """Figures of one session; `sample` is the second answer."""

    cost_model: CostModel
    shape: CacheShape
    trace: Trace
    warm_steps: int
    schedule_s: float  # per step of the first answer, median
    sample: Sample


def compare_with_engine(
    base: EngineConfig, wanted: Sequence[Combination], *, n_predict: int, repeat: int, run: Run
) -> list[Comparison]:
    """Measures all combinations `repeat` times, and simulates each on the medians.

    base: models, device and threads. The combinations take turns, so that a disturbance of the machine does not
    affect a single one. run: told before each measurement.
    """
    measured: dict[Combination, list[_Measurement]] = {combination: [] for combination in wanted}
    base = replace(base, gamma=max(combination.gamma for combination in wanted))
    with ExitStack() as stack:
        models = load_models(base, [MODES["moeedge"]], stack)
        for number, (combination, outcomes) in product(range(repeat), measured.items()):
            where = f"{combination.policy}, ratio {combination.cache_ratio:g}, gamma {combination.gamma}"
            run.say(f"{where}, {number + 1} of {repeat}")
            outcomes.append(_measure(base, combination, n_predict, models))
    # the cost model is the machine's, not the policy's: all sessions with the same draft length measured the same one
    pooled: dict[int, list[CostModel]] = defaultdict(list)
    for combination, outcomes in measured.items():
        pooled[combination.gamma] += [outcome.cost_model for outcome in outcomes]
    return [
        _simulate(base, combination, outcomes, median_cost_model(pooled[combination.gamma]))
        for combination, outcomes in measured.items()
    ]


def median_cost_model(measured: Sequence[CostModel]) -> CostModel:
    """Returns the median of every number: a single measurement may have been disturbed."""

    def middle(name: str) -> Any:
        values = np.median([np.asarray(getattr(model, name), dtype=np.float64) for model in measured], axis=0)
        return values if values.ndim else float(values)

    return CostModel(**{item.name: middle(item.name) for item in fields(CostModel)})


def _measure(
    base: EngineConfig, combination: Combination, n_predict: int, models: tuple[Model, Model | None]
) -> _Measurement:
    base = replace(base, gamma=combination.gamma, placement=replace(base.placement, measure_anew=True))
    drafts, policy = combination.gamma > 0, combination.policy
    mode = BenchMode("moeedge", "moeedge", drafts=drafts, policy=policy, cache_ratio=combination.cache_ratio)
    with ExitStack() as stack:
        arm = open_arm(base, mode, stack, model=models[0], draft_model=models[1] if drafts else None)
        session = arm.session
        if session.placement is None or session.calibration is None or session.calibration.units is None:
            raise EngineError("Nothing was measured: no device holds experts.", "Use -dev emulated:link=2GB/s.")
        collector = TraceCollector(filled(TraceMeta, session.info, source="moeedge lab validate"))
        session.observers.append(collector)
        records: list[StepRecord] = []  # of both answers
        warm, sample = (_recorded_answer(arm, collector, text, n_predict, records.append) for text in PROMPTS)
        group, capacity, _ = session.placement.cache.groups()
        info = session.model.info
        return _Measurement(
            cost_model=session.calibration.units,
            shape=CacheShape(info.n_layers, info.n_experts, group.copy(), capacity.copy()),
            trace=collector.trace(),
            warm_steps=warm.steps,
            schedule_s=median(record.observe_s for record in records[: warm.steps]),
            sample=sample,
        )


def _recorded_answer(
    arm: BenchArm, collector: TraceCollector, text: str, n_predict: int, on_step: Callable[[StepRecord], None]
) -> Sample:
    """Answers `text` from empty KV caches. Transfers go on into the next answer, as they do in the simulation."""
    arm.session.reset()
    prompt_ids = arm.session.model.chat_tokens([{"role": "user", "content": text}])
    if arm.session.target.sensor is not None:
        arm.session.target.sensor.frames()  # discards those of the calibration
    collector.begin(prompt_ids)
    sample = arm.answer(prompt_ids, n_predict=n_predict, ignore_eos=True, drain=False, on_step=on_step)
    if not sample.steps:
        raise EngineError("No step was measured: the answer ended at once.", "Use a larger -n.")
    return sample


def _simulate(
    base: EngineConfig, combination: Combination, outcomes: Sequence[_Measurement], pooled: CostModel
) -> Comparison:
    last = outcomes[-1]
    own = median_cost_model([outcome.cost_model for outcome in outcomes])
    cost_model = replace(pooled, r_c=own.r_c, r_g=own.r_g)  # these depend on the policy's utilities
    costs = measured_costs(cost_model, schedule_s=median(outcome.schedule_s for outcome in outcomes))
    policy = make_policy(
        combination.policy,
        last.shape,
        PolicyConfig(gamma=combination.gamma, cap=base.placement.utility_cap, cost_model=cost_model),
    )
    loads = base.placement.execution.misses == "load"
    schedule = recorded_schedule(last.trace) or cut_schedule(last.trace, gamma=0)
    time = Execution(
        *(costs, last.shape, policy, list(schedule.batches())),
        accuracy=PredictorAccuracy(),
        execution_model=replace(policy.execution_model, device_only=loads, layerwise=False),
        warm_steps=last.warm_steps,
    ).run()

    def measured_s(seconds: Callable[[Sample], float]) -> float:
        """Per token of text, median."""
        samples = [outcome.sample for outcome in outcomes]
        return median(seconds(sample) / (sample.steps + sample.accepted) for sample in samples)

    tpot_s = measured_s(lambda sample: sample.draft_s + sample.verify_s + sample.observe_s)
    return Comparison(
        **asdict(combination),
        measured_tpot_s=tpot_s,
        tpot_s=time.tpot_s,
        tg_ts=1 / time.tpot_s,
        error=time.tpot_s / tpot_s - 1,
        tokens=last.sample.steps + last.sample.accepted,
        steps=last.sample.steps,
        hit_rate_pairs_measured=cache_figures(last.sample.placement, 1).hit_rate_pairs,
        hit_rate_pairs=time.hits.hit_rate_pairs,
        draft_measured_s=measured_s(lambda sample: sample.draft_s),
        draft_s=time.per_token_s("draft"),
        rejected_token_model="recorded" if combination.gamma else None,
    )
