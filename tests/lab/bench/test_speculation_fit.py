"""What `moeedge lab fit` measures, on tiny models: sizes, times, acceptance, and the command's output."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp.llama_cpp as lib
import pytest

from moeedge.bench.experiment import GREEDY
from moeedge.bench.roofline import measure_read_speed
from moeedge.data.datasets import load_dataset
from moeedge.data.prompts import Prompt, user_turns
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError, MeasurementError
from moeedge.lab.analysis.step_fit import Acceptance
from moeedge.lab.experiments import speculation_fit
from moeedge.lab.experiments.speculation_fit import FitPlan, FitReport, run_fit
from moeedge.lab.experiments.step_times import WARM_UPS
from moeedge.llama.context import Context
from moeedge.llama.sequence import BatchPart, Logits
from moeedge.native.abi import Phase
from moeedge.run import Progress, Run
from moeedge.scheduler.config import PlacementConfig
from tests.conftest import TinyFactory
from tests.lab.analysis.test_step_fit import MODEL, times_of
from tests.support.commands import refused, run, run_json
from tests.support.machine import Here
from tests.support.progress import SeenProgress

PROMPTS = [Prompt(str(i), "", user_turns(text)) for i, text in enumerate(("one two three", "four five six"))]
PLAN = FitPlan(tokens=(1, 2, 3, 4, 8, 16, 32), gammas=(1, 3), batch_sizes=(1, 8), repetitions=2, n_predict=24)


def config_of(target: Path, draft: Path | None) -> EngineConfig:
    return EngineConfig(model=target, draft=draft, n_ctx=512, n_threads=1, n_gpu_layers=0, device="none")


def test_the_read_speed_is_a_rate_of_memory(here: Here) -> None:
    assert 1e8 < measure_read_speed(1) < 1e12
    here.set_memory(1 << 20)
    assert measure_read_speed(1) == 0.0


def test_report_holds_what_was_measured_and_predicted(tiny_moe: Path, tiny_draft: Path) -> None:
    progress = SeenProgress()
    report = run_fit(config_of(tiny_moe, tiny_draft), PROMPTS, PLAN, Run(progress=progress))
    shapes = [(point.n_tokens, point.n_sequences, point.n_used) for point in report.times.target]
    alone, together = {(t, 1, k) for t in PLAN.tokens for k in (4, 2)}, {(8 * each, 8, 4) for each in (1, 2, 3, 5)}
    assert set(shapes) == alone | together and len(shapes) == len(set(shapes))
    assert all(len(point.samples_s) == 2 and point.seconds > 0 for point in report.times.target)
    for point in report.times.target:
        assert point.unique_experts is not None
        assert point.n_used <= point.unique_experts <= min(16, point.n_used * point.n_tokens)
    assert [(point.n_tokens, point.n_sequences) for point in report.times.draft] == [(1, 1), (8, 8)]
    assert [point.n_tokens for point in report.times.reject] == list(PLAN.tokens)
    assert [(row.batch_size, row.gamma) for row in report.speed_ups] == [(1, 1), (1, 3), (8, 1), (8, 3)]
    for row in report.speed_ups:
        assert 1 <= row.tokens_per_step <= row.gamma + 1
    assert report.share_measured is not None and 0 <= report.share_measured <= 1
    assert [row.n_tokens for row in report.amdahl] == [2, 3, 4, 8, 16, 32]
    assert report.fit.model.in_sequence != report.other_fit.model.in_sequence
    assert report.fit.left_out_error is not None and report.other_fit.left_out_error is not None
    assert report.fit.left_out_error <= report.other_fit.left_out_error
    assert len(progress.tasks) == 4 and len(progress.amounts) == sum(total for _, total in progress.tasks)


def test_batches_are_timed_where_steps_of_answers_are(
    tiny_moe: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timed passes have as many tokens before them as the median step, and llama.cpp has their graph already."""
    passes: dict[str, list[tuple[int, int, int]]] = {}  # tokens, tokens before them, graphs that were used again
    decode_parts = Context.decode_parts

    def spy(context: Context, parts: Sequence[BatchPart], *, phase: Phase, **options: Any) -> list[Logits]:
        n_before = parts[0].sequence.n_past
        n_reused = lib.llama_perf_context(context.handle).n_reused
        rows = decode_parts(context, parts, phase=phase, **options)
        n_reused = lib.llama_perf_context(context.handle).n_reused - n_reused
        if phase == Phase.VERIFY:
            passes[list(passes)[-1]].append((sum(len(part.tokens) for part in parts), n_before, n_reused))
        return rows

    class Parts(Progress):
        def start(self, label: str, total: float) -> None:
            passes[label] = []

    monkeypatch.setattr(Context, "decode_parts", spy)
    run_fit(config_of(tiny_moe, tiny_draft), PROMPTS * 4, replace(PLAN, n_used=(4,)), Run(progress=Parts()))
    answers, alone, together = passes.values()
    depth = median(n_before for _, n_before, _ in answers)
    alone.pop()  # of rejection sampling
    assert {n_before for _, n_before, _ in alone + together} == {round(depth)}
    every = WARM_UPS + 1
    assert len(alone) == every * 2 * len(PLAN.tokens)
    assert [(n, 1) for n, _, _ in alone[::every]] == [(n, n_reused) for n, _, n_reused in alone[WARM_UPS::every]]
    assert all(n_reused == 1 for _, _, n_reused in together[WARM_UPS::every])


def test_verifications_take_as_long_as_they_are_timed(bundled_pair: tuple[Path, Path], here: Here) -> None:
    """Nine tokens on the bundled pair; by the thread's own time, which other programs do not lengthen."""
    here.set_clock(time.thread_time)
    prompts = load_dataset("toy").prompts[:4]
    config = replace(config_of(*bundled_pair), placement=PlacementConfig(cache_ratio=0.0), gamma=8)
    plan = FitPlan(tokens=(1, 2, 3, 4, 5, 9), batch_sizes=(1,), n_used=(8,), repetitions=3)
    timed = {point.n_tokens: point.seconds for point in run_fit(config, prompts, plan, Run()).times.target}
    verified: list[float] = []
    with Session.open(config) as session:
        for prompt in prompts:
            session.reset()
            tokens = session.model.chat_tokens(prompt.messages(0))
            generation = session.generate(tokens, n_predict=96, sampling=GREEDY, ignore_eos=True)
            verified += [record.verify_s for record in generation if record.n_verified == 9]
    assert timed[9] == pytest.approx(median(verified), rel=0.4)


def report_of(noise: float, tiny_moe: Path) -> FitReport:
    """The report of a model whose times are off by so much."""
    with Session.open(config_of(tiny_moe, None)) as session:
        info = session.info
    times = times_of(MODEL, used=(8, 4), noise=noise)
    return FitReport.of(info, times, Acceptance((0.8,), (1.0,), 9), (1,), (1, 64))


def test_a_fit_that_misses_its_times_predicts_no_speed_up(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for noise, is_usable in ((0.02, True), (0.6, False)):
        report = report_of(noise, tiny_moe)
        assert [row.beyond_measured for row in report.speed_ups] == [False, True]
        assert report.is_usable == is_usable == (report.error <= 0.15)
        monkeypatch.setattr(speculation_fit, "run_fit", lambda *_, report=report, **__: report)
        text = run("lab", "fit", "-m", tiny_moe, "-md", "none", "--dataset", "toy")
        assert text.exit_code == (0 if is_usable else MeasurementError.exit_code)
        assert ("gamma" in text.stdout, bool(text.stderr)) == (is_usable, not is_usable)
        assert ("Amdahl" in text.stdout) == is_usable
        output = run("lab", "fit", "-m", tiny_moe, "-md", "none", "--dataset", "toy", "-o", "json")
        record = json.loads(output.stdout)
        assert output.exit_code == text.exit_code and record["usable"] == is_usable
        assert len(record["times"]["target"]) == len(report.times.target) and record["left_out_error"] == report.error
        assert bool(record["speed_up"]) == bool(record["amdahl"]) == is_usable


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        *(("qwen3moe", head, "head") for head in ("eagle3", "dflash")),
        ("qwen3moe", None, "Without a draft"),
        ("qwen3", None, "no experts"),
    ],
)
def test_pairs_that_cannot_be_fitted_are_refused(target: str, draft: str | None, words: str, tiny: TinyFactory) -> None:
    with pytest.raises(InputError, match=words):
        run_fit(config_of(tiny(target), tiny(draft) if draft else None), PROMPTS, PLAN, Run())


@pytest.mark.parametrize(
    "plan",
    [
        {"tokens": (2, 3, 4, 5, 6, 7)}, {"tokens": (1, 2, 3)}, {"tokens": (1, 2, 3, 4, 5, 65)}, {"gammas": (0, 1)},
        {"gammas": ()}, {"batch_sizes": (0,)}, {"repetitions": 0},
    ],
)  # fmt: skip
def test_plans_are_checked(plan: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="--"):
        FitPlan(**plan)  # type: ignore[arg-type]


def test_command(tiny_moe: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_fit, "MAX_ERROR", 1e9)  # of a machine that may be busy
    work = ["--dataset", "toy", "--batch-tokens", "1,2,3,4,6,8,16", "--draft-max", "1,2", "--batch-sizes", "1,4"]
    short = ["-t", "1", "--limit", "2", "-n", "24", "-r", "1", "--n-expert-used", "4"]
    report = run_json("lab", "fit", "-m", tiny_moe, "-md", tiny_draft, "-c", "512", *short, *work)
    assert set(report["parameters"]) == set(report["lower_bounds"]) and len(report["parameters"]) == 10
    assert report["left_out_error"] > 0 and len(report["left_out"]) == 7 + 5
    assert len(report["speed_up"]) == 4


def test_bad_input_is_refused(tiny_moe: Path, tiny_draft: Path) -> None:
    pair = ["-m", str(tiny_moe), "-md", str(tiny_draft), "-c", "512"]
    assert "9 per token" in refused("lab", "fit", *pair, "--n-expert-used", "9", "--dataset", "toy", "-t", "1")
    assert "0 per token" in refused("lab", "fit", *pair, "--dataset", "toy", "-t", "1", "--n-expert-used", "0")
    assert "--batch-tokens" in refused("lab", "fit", *pair, "--batch-tokens", "1,2")
