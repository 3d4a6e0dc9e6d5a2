"""The cost of scheduling in an engine: time per step of every call of the decoding thread, and its share of the step.

    python -m tests.benchmarks.engine_cost --out RECORD.json
    python -m tests.benchmarks.engine_cost -m WIDE.gguf -md WIDE-DRAFT.gguf --policies spac,lfu

Without -m the bundled pair. A wide pair, whose draft's hidden states have 1,024 values:

    moeedge lab widen WIDE.gguf --embd 1024
    moeedge lab widen WIDE-DRAFT.gguf -m models/bundled/draft.gguf --embd 1024

The models compute with one thread: with as many as cores, any other program slows them down many times.
Every policy has a session of its own on the emulated device and answers the prompts of the data set `toy`, greedily, in
turns with the others. The first answers fill the policies' memories and are not counted. Figures are medians over
steps, of wall time and of the decoding thread's processor time, which holds on a busy machine too. `engine` is
PlacementStats.schedule_s per step, and `plans` is PlacementStats.plan_s, all steps together.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge import paths
from moeedge.data.datasets import load_toy
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.hardware.provenance import read_provenance
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.manager import PlacementManager

SCHEMA = "moeedge-engine-cost-1"
PARTS = ("before_verification", "after_verification")
GREEDY = SamplingConfig(temperature=0.0, seed=0)


class Meter:
    """Wall and processor time of a manager's calls, step by step."""

    def __init__(self, manager: PlacementManager) -> None:
        self._spent = np.zeros((len(PARTS), 2))
        self.steps_s: list[NDArray[np.float64]] = []  # [parts, 2]: wall, processor
        for index, part in enumerate(PARTS):
            setattr(manager, part, self._timed(index, getattr(manager, part)))

    def end_step(self) -> None:
        """All calls since the last one belong to one step."""
        self.steps_s.append(self._spent)
        self._spent = np.zeros_like(self._spent)

    def _timed(self, index: int, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            start = (time.perf_counter(), time.thread_time())
            call(*arguments)
            self._spent[index] += np.subtract((time.perf_counter(), time.thread_time()), start)

        return timed


@dataclass(frozen=True)
class EngineCost:
    """The result of one policy; medians over steps, in microseconds."""

    policy: str
    wall_us: float
    cpu_us: float
    parts_wall_us: dict[str, float]  # by PARTS
    parts_cpu_us: dict[str, float]
    engine_us: float  # PlacementStats.schedule_s per step
    plan_us: float  # PlacementStats.plan_s per step: next to the models
    share: float  # of the time of entire steps
    steps: int
    hit_rate_pairs: float
    uploads_per_step: float
    samples_cpu_us: list[float]  # one per step


def measure(
    model: Path,
    draft: Path,
    policies: list[str],
    *,
    ratio: float,
    gamma: int,
    prompts: int,
    warm_up: int,
    n_threads: int = 1,
    n_predict: int,
) -> list[EngineCost]:
    """Answers `warm_up` prompts without counting, and `prompts` more, in turns."""
    questions = load_toy().prompts
    with ExitStack() as stack:
        sessions: dict[str, tuple[Session, Meter]] = {}
        for policy in policies:
            placement = PlacementConfig(cache_ratio=ratio, policy=policy, calibrate=False)
            config = EngineConfig(
                model=model,
                draft=draft,
                gamma=gamma,
                device="emulated",
                n_ctx=1024,
                n_threads=n_threads,
                placement=placement,
            )
            session = stack.enter_context(Session.open(config))
            assert session.placement is not None
            sessions[policy] = (session, Meter(session.placement))
        before = {}
        for number in range(warm_up + prompts):
            for policy, (session, meter) in sessions.items():
                if number == warm_up:
                    before[policy] = session.placement_stats()
                    meter.steps_s.clear()
                session.reset()
                messages = questions[number % len(questions)].messages(0)
                tokens = session.model.chat_tokens(messages)
                answer = session.generate(tokens, n_predict=n_predict, sampling=GREEDY, ignore_eos=True)
                for index, _ in enumerate(answer):
                    meter.end_step()
                    if index < 2:  # the prompt, and the first step, before which the policy saw the prompt
                        meter.steps_s.pop()
        return [_cost(policy, *sessions[policy], before[policy]) for policy in policies]


def _cost(policy: str, session: Session, meter: Meter, before: Any) -> EngineCost:
    after = session.placement_stats()
    assert after is not None
    counted = after - before
    steps_us = np.array(meter.steps_s) * 1e6  # [steps, parts, 2]
    wall_us, cpu_us = steps_us[..., 0], steps_us[..., 1]
    return EngineCost(
        policy=policy,
        wall_us=_median(wall_us.sum(axis=1)),
        cpu_us=_median(cpu_us.sum(axis=1)),
        parts_wall_us=dict(zip(PARTS, map(_median, wall_us.T), strict=True)),
        parts_cpu_us=dict(zip(PARTS, map(_median, cpu_us.T), strict=True)),
        engine_us=round(counted.schedule_s / counted.steps * 1e6, 1),
        plan_us=round(counted.plan_s / counted.steps * 1e6, 1),
        share=round(counted.schedule_s / counted.decode_s, 4),
        steps=counted.steps,
        hit_rate_pairs=round(counted.hit_rate_pairs or 0.0, 4),
        uploads_per_step=round(counted.uploads / max(counted.steps, 1), 1),
        samples_cpu_us=cpu_us.sum(axis=1).round(1).tolist(),
    )


def _median(values: NDArray[np.float64]) -> float:
    return round(float(np.median(values)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="default: the bundled target")
    parser.add_argument("-md", "--model-draft", type=Path, help="default: the bundled draft")
    parser.add_argument("--policies", default="spac,lfu")
    parser.add_argument("--ratio", type=float, default=0.17)
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("-n", "--n-predict", type=int, default=64)
    parser.add_argument("-t", "--threads", dest="n_threads", type=int, default=1, help="0: one per core")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    model, draft = options.model or paths.bundled_target(), options.model_draft or paths.bundled_draft()
    settings = {
        name: getattr(options, name) for name in ("ratio", "gamma", "prompts", "warm_up", "n_threads", "n_predict")
    }
    costs = measure(model, draft, options.policies.split(","), **settings)
    for cost in costs:
        parts = ", ".join(f"{part} {value:.0f}" for part, value in cost.parts_cpu_us.items())
        print(
            f"{cost.policy:11s} us per step: {cost.cpu_us:.0f} processor ({parts}), {cost.wall_us:.0f} wall; "
            f"engine {cost.engine_us:.0f}, {cost.share:.1%} of decoding, plans {cost.plan_us:.0f}; "
            f"hits {cost.hit_rate_pairs:.3f}, {cost.uploads_per_step:.1f} uploads per step"
        )
    if options.out:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_provenance()),
            "model": model.name,
            "draft": draft.name,
            "settings": settings,
            "results": [asdict(cost) for cost in costs],
        }
        options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
