"""Runs of the benchmark on tiny models for the tests: plans, conversations, and a Progress that keeps everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from moeedge.bench.config import BenchPlan, applicable_modes, parse_modes
from moeedge.bench.records import BenchRow
from moeedge.bench.runner import Bench
from moeedge.bench.samples import Sample
from moeedge.cli.bench_options import synthetic_tests
from moeedge.data.datasets import load_dataset
from moeedge.data.prompts import Dataset
from moeedge.engine.types import EngineConfig

CONVERSATIONS = (
    {"id": "two-turns", "turns": ["Tell me of the sea.", "And of the sky?"]},
    {"id": "code", "prompt": "def add(a, b):"},
    {"id": "long", "prompt": "word " * 400},
)


class Recorder:
    """Keeps the samples and notes of a run."""

    def __init__(self) -> None:
        self.total = 0
        self.samples: list[Sample] = []
        self.notes: list[str] = []

    def begin(self, total: int) -> None:
        self.total = total

    def advance(self, sample: Sample, test: str) -> None:
        self.samples.append(sample)

    def note(self, text: str) -> None:
        self.notes.append(text)


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


def run(plan: BenchPlan) -> tuple[list[BenchRow], Recorder]:
    """Runs a plan to its end."""
    recorder = Recorder()
    with Bench(plan, recorder) as bench:
        assert bench.run()
        return bench.rows(), recorder
