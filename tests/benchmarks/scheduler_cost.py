"""The cost of scheduling: time per step of every policy (one observation and two plans), and the hit rate for it.

    python -m tests.benchmarks.scheduler_cost --layers 48 --experts 128 --used 8 --gamma 8 --steps 200 --out RECORD.json

Routing is synthetic and token-determined in part, drawn from a fixed seed; transfers take no time. Every policy runs
once with every plan checked against the mover's rules, then several times timed, with the same plans. Each run does the
same work at the same step, so a step's time is the minimum over the runs: it excludes the time of other programs. The
figure is the median over steps; the median over all samples is printed with it. One line per policy goes to standard
output, the record with all raw samples to --out.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.records import read_environment
from moeedge.experts import count_ids
from moeedge.policies.base import CacheShape, Observation, Plan, PolicyConfig, check_plan
from moeedge.policies.cost_model import CostModel
from moeedge.policies.registry import POLICIES, make_policy
from moeedge.scheduler.driver import StepDriver

VOCABULARY = 400
SHARE_OF_TOKEN = 0.8  # share of a token's experts that it uses every time
WARM_UP_STEPS = 40
CAP = 4

# a 24 GB card and a desktop CPU, with Qwen3-30B-A3B's experts: only proportions matter here
COST_MODEL = CostModel(
    cpu_expert_s=np.r_[0.0, np.linspace(80e-6, 160e-6, 9)],
    device_expert_s=np.r_[0.0, np.linspace(8e-6, 12e-6, 9)],
    transfer_expert_s=110e-6,
    draft_token_s=4e-3,
    block_overhead_s=20e-6,
    r_c=np.linspace(0.2, 0.9, CAP + 1),
    r_g=np.linspace(0.9, 0.1, CAP + 1),
)


@dataclass(frozen=True, eq=False)
class Batch:
    """One verification."""

    tokens: NDArray[np.int32]  # [n_tokens]
    ids: NDArray[np.int32]  # [n_layers, n_tokens, k]
    counts: NDArray[np.uint32]  # [n_layers, n_experts]
    n_accepted: int


@dataclass(frozen=True)
class Cost:
    """Medians over steps, in microseconds."""

    policy: str
    step_us: float  # observe and both plans: minimum over the runs
    disturbed_us: float  # the same over all samples of all runs
    observe_us: float
    first_plan_us: float
    second_plan_us: float
    pair_hit: float
    uploads_per_step: float
    samples_us: list[list[float]]  # per run and step


@dataclass(frozen=True, eq=False)
class Run:
    """One replay."""

    times_s: NDArray[np.float64]  # [steps, 3]: observe, first plan, second plan
    pair_hit: float
    uploads_per_step: float


def make_batches(n_layers: int, n_experts: int, n_used: int, n_tokens: int, n_steps: int, seed: int) -> list[Batch]:
    """Returns batches of tokens by Zipf's law; each token has preferred experts."""
    rng = np.random.default_rng(seed)
    own = rng.random((VOCABULARY, n_layers, n_experts)).argsort(axis=2)[:, :, :n_used]
    popularity = 1.0 / np.arange(1, VOCABULARY + 1)
    batches = []
    for _ in range(n_steps):
        tokens = rng.choice(VOCABULARY, n_tokens, p=popularity / popularity.sum())
        score = rng.random((n_tokens, n_layers, n_experts))
        stays = rng.random((n_tokens, n_layers, n_used)) < SHARE_OF_TOKEN
        np.put_along_axis(score, own[tokens], np.where(stays, 2.0, 0.0), axis=2)
        ids = score.argsort(axis=2)[:, :, -n_used:].transpose(1, 0, 2)
        batches.append(
            Batch(
                tokens.astype(np.int32),
                np.ascontiguousarray(ids, dtype=np.int32),
                count_ids(ids, n_experts).astype(np.uint32),
                int(rng.integers(0, n_tokens)),
            )
        )
    return batches


class Slots:
    """An ExpertStore of one group of slots whose transfers take no time."""

    def __init__(self, shape: CacheShape, *, check: bool) -> None:
        self.resident = np.zeros((shape.n_layers, shape.n_experts), dtype=np.uint8)
        self.uploads = 0
        self._shape = shape
        self._check = check

    def residency(self) -> NDArray[np.uint8]:
        return self.resident

    def push(self, plan: Plan) -> None:
        """Executes the plan, as the mover does."""
        if self._check:
            check_plan(plan, self._shape, self.resident, CAP)
        n_slots = int(self._shape.capacity[0])
        n_free = n_slots - int(np.count_nonzero(self.resident))
        n_victims = min(max(len(plan.uploads) - n_free, 0), len(plan.victims))
        self.resident[tuple(plan.victims[:n_victims].T)] = 0
        self.resident[tuple(plan.uploads[: n_free + n_victims].T)] = 1
        assert np.count_nonzero(self.resident) <= n_slots, "more experts than slots"
        self.uploads += len(plan.uploads)


def measure(name: str, batches: list[Batch], shape: CacheShape, cost_model: CostModel | None, n_runs: int = 5) -> Cost:
    """Replays the batches, checked once and timed `n_runs` times; the first steps are warm-up."""
    checked = _run(name, batches, shape, cost_model, check=True)
    gc.collect()
    gc.disable()
    try:
        runs = [_run(name, batches, shape, cost_model, check=False) for _ in range(n_runs)]
    finally:
        gc.enable()
    for run in runs:
        assert (run.pair_hit, run.uploads_per_step) == (checked.pair_hit, checked.uploads_per_step), "other plans"
    times_us = np.stack([run.times_s for run in runs]) * 1e6  # [runs, steps, parts]
    observe_us, first_us, second_us = np.median(times_us.min(axis=0), axis=0).tolist()
    samples_us = times_us.sum(axis=2)
    return Cost(
        policy=name,
        step_us=float(np.median(samples_us.min(axis=0))),
        disturbed_us=float(np.median(samples_us)),
        observe_us=observe_us,
        first_plan_us=first_us,
        second_plan_us=second_us,
        pair_hit=checked.pair_hit,
        uploads_per_step=checked.uploads_per_step,
        samples_us=samples_us.tolist(),
    )


def _run(name: str, batches: list[Batch], shape: CacheShape, cost_model: CostModel | None, *, check: bool) -> Run:
    slots = Slots(shape, check=check)
    driver = StepDriver(
        make_policy(name, shape, PolicyConfig(gamma=len(batches[0].tokens) - 1, cap=CAP, cost_model=cost_model)), slots
    )
    times: list[tuple[float, float, float]] = []
    pairs = hits = 0

    def timed(call: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s

    for step, batch in enumerate(batches):
        tokens = batch.tokens.tolist()
        observation = Observation(batch.counts, len(tokens), batch.n_accepted, batch.tokens, batch.ids)
        if step == WARM_UP_STEPS:
            times.clear()
            pairs = hits = slots.uploads = 0
        first_s = timed(partial(driver.plan_next, tokens[:1]))
        driver.push()
        second_s = timed(partial(driver.plan_draft, tokens))
        driver.push()
        pairs += int(batch.counts.sum())
        hits += int(batch.counts[slots.resident > 0].sum())
        times.append((timed(partial(driver.observe, observation)), first_s, second_s))
    return Run(np.array(times), hits / pairs, slots.uploads / len(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--used", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--ratio", type=float, default=0.17)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unbalanced", action="store_true", help="without a cost model, so without the balancer")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    batches = make_batches(
        options.layers, options.experts, options.used, options.gamma + 1, options.steps, options.seed
    )
    n_slots = int(options.ratio * options.layers * options.experts)
    shape = CacheShape.uniform(options.layers, options.experts, n_slots)
    cost_model = None if options.unbalanced else COST_MODEL
    costs = [measure(name, batches, shape, cost_model, options.runs) for name in options.policies.split(",")]
    for cost in costs:
        print(
            f"{cost.policy:11s} {cost.step_us:6.1f} us per step ({cost.disturbed_us:.1f} as disturbed): "
            f"observe {cost.observe_us:.1f}, plans {cost.first_plan_us:.1f} and {cost.second_plan_us:.1f}; "
            f"pair hit {cost.pair_hit:.3f}, {cost.uploads_per_step:.1f} uploads per step"
        )
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        record = {
            "schema": "moeedge-scheduler-cost-1",
            "environment": asdict(read_environment()),
            "settings": settings,
            "results": [asdict(cost) for cost in costs],
        }
        options.out.write_text(json.dumps(record, default=str) + "\n")


if __name__ == "__main__":
    main()
