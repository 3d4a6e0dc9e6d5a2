"""Runs of the benchmark on tiny models for the tests: plans, conversations, and one that keeps everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from moeedge.bench.config import BenchPlan, applicable_modes, parse_modes
from moeedge.bench.journal import Journal
from moeedge.bench.records import BenchRow
from moeedge.bench.runner import Bench
from moeedge.bench.samples import Sample
from moeedge.cli.bench_run import synthetic_tests
from moeedge.data.datasets import load_dataset
from moeedge.data.prompts import Dataset
from moeedge.engine.types import EngineConfig
from moeedge.run import Progress, Run
from moeedge.scheduler.config import PlacementConfig

CONVERSATIONS = (
    {"id": "two-turns", "turns": ["Tell me of the sea.", "And of the sky?"]},
    {"id": "code", "prompt": "def add(a, b):"},
    {"id": "long", "prompt": "word " * 400},
)


class Recorder(Progress):
    """Keeps the samples and notes of a run."""

    def __init__(self) -> None:
        self.total = 0
        self.samples: list[Sample] = []
        self.notes: list[str] = []

    def start(self, label: str, total: float) -> None:
        self.total = int(total)


class RecordedBench(Bench):
    """A benchmark whose samples and notes the recorder keeps."""

    def __init__(
        self,
        plan: BenchPlan,
        recorder: Recorder,
        journal: Journal | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(plan, Run(recorder.notes.append, cancelled=cancelled, progress=recorder), journal)
        self._recorder = recorder

    def _advance(self, sample: Sample, test: str) -> None:
        self._recorder.samples.append(sample)
        super()._advance(sample, test)


def write_conversations(folder: Path, *, n: int = 2) -> Dataset:
    """The first `n` of CONVERSATIONS as a file of the user's."""
    path = folder / "talk.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in CONVERSATIONS[:n]))
    return load_dataset(str(path))


def make_plan(
    target: Path, draft: Path | Literal["ngram"] | None, *, modes: str = "stock-ar,stock-sd,moeedge", **options: Any
) -> BenchPlan:
    """A plan with one thread, short answers and the modes that apply."""
    gamma = options.pop("gamma", 3)
    n_ctx = options.pop("n_ctx", 0)
    base = EngineConfig(model=target, draft=draft, gamma=gamma, n_ctx=n_ctx, n_threads=1)
    tests = synthetic_tests([options.pop("n_prompt", 0)], [options.pop("n_gen", 0)])
    chosen, _ = applicable_modes(parse_modes(modes), has_draft=draft is not None and gamma > 0)
    return BenchPlan(**({"base": base, "modes": chosen, "n_predict": 12, "repetitions": 2, "tests": tests} | options))


def run(
    plan: BenchPlan, journal: Journal | None = None, stop_after: int | None = None
) -> tuple[list[BenchRow], Recorder]:
    """Runs a plan to its end, or until it has so many samples."""
    recorder = Recorder()
    is_enough = lambda: stop_after is not None and len(recorder.samples) >= stop_after  # noqa: E731
    with journal or nullcontext(), RecordedBench(plan, recorder, journal, is_enough) as bench:
        assert bench.measure() == (stop_after is None)
        return bench.rows(), recorder


def in_ram(plan: BenchPlan) -> BenchPlan:
    """The plan with experts in RAM: modes are measured one after the other."""
    placement = PlacementConfig(calibrate=False, policy="lfu")
    return replace(plan, base=replace(plan.base, device="none", ram=200_000, placement=placement))
