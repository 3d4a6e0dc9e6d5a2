"""--expert-budget auto: MoE-Spec's rule (Section 4.2) on trials, where the choice is kept, and trials of the pair."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moeedge.bench import budget_choice
from moeedge.bench.budget_choice import (
    BudgetChoice,
    BudgetTrial,
    Trials,
    candidate_budgets,
    choice_file,
    find_budget,
    lost_too_many,
)
from moeedge.bench.samples import Sample
from moeedge.data.datasets import load_calibration
from moeedge.engine.loading import resolve_device
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.devices import ResolvedDevice
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.run import Notification, Run
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.measurement import read_measurement, write_measurement
from tests.support.progress import SeenProgress

TEMPLATE = ExpertBudget(budget=1 << 20)


def read_choice(config: EngineConfig, template: ExpertBudget, device: ResolvedDevice) -> BudgetChoice | None:
    return read_measurement(BudgetChoice, partial(choice_file, config, template, device))


def choice(*trials: tuple[int, float, float | None], stddev: float = 0.02) -> BudgetChoice:
    """trials: budget, score, speed over unbudgeted verification's, which has a score of 0.9."""
    base = BudgetTrial(None, 0.9, stddev, 72, tg_ts=100.0, ratio=1.0, experts=30.0)
    return BudgetChoice(
        (base, *(BudgetTrial(budget, score, stddev, 72, ratio=ratio) for budget, score, ratio in trials)),
        score_kind="tasks",
        calibrated_on="calibration",
        gamma=8,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        ([(8, 0.5, 1.9), (16, 0.881, 1.4), (24, 0.9, 1.2)], 16),  # the fastest within one standard deviation
        ([(8, 0.5, 1.9), (16, 0.879, 1.4), (24, 0.9, 1.2)], 24),
        ([(8, 0.5, 1.9), (16, 0.95, 1.1), (24, 0.9, 1.2)], 24),  # speed decides, not the score
        ([(8, 0.5, 1.9), (16, 0.7, 1.4)], None),  # none keeps the score
        ([(16, 0.9, 1.02), (24, 0.9, 1.0)], None),  # none is clearly faster
        ([(8, 0.5, None), (16, 0.9, 1.5)], 16),
        ([], None),
    ],
)
def test_the_rule(trials: list[tuple[int, float, float | None]], best: int | None) -> None:
    made = choice(*trials)
    assert made.best.budget == best
    assert ("off" in made.sentence()) == (best is None)


def test_a_stopped_trial_is_not_chosen() -> None:
    """Its mean is of the first tasks only, which may be the easier ones."""
    made = choice((8, 0.95, 1.9), (16, 0.9, 1.4))
    stopped = replace(made.trials[1], n_scored=40)
    assert replace(made, trials=(made.trials[0], stopped, made.trials[2])).best.budget == 16


def test_every_choice_is_the_fastest_of_the_kept_by_exhaustive_search() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        trials = [(int(b), float(random.uniform(0.8, 0.95)), float(random.uniform(0.9, 1.5))) for b in range(8, 40, 4)]
        kept = [(ratio, budget) for budget, score, ratio in trials if score >= 0.9 - 0.02 and ratio >= 1.03]
        assert choice(*trials).best.budget == (max(kept)[1] if kept else None)


@pytest.mark.parametrize(
    ("n_used", "experts", "expected"),
    [
        (8, 28.5, (8, 12, 16, 20, 24, 28)),
        (8, 24.0, (8, 12, 16, 20)),  # 24 would change nothing on average
        (2, 6.5, (2, 3, 4, 5, 6)),
        (1, 3.2, (1, 2, 3)),
        (8, 8.0, ()),
        (8, 60.0, (8, 16, 20, 28, 36, 44, 48, 56)),  # every other one of 13, from the least to the largest
    ],
)
def test_candidates(n_used: int, experts: float, expected: tuple[int, ...]) -> None:
    assert candidate_budgets(n_used, experts) == expected


def test_a_budget_is_given_up_once_it_lost_twice_the_largest_deviation() -> None:
    assert not lost_too_many([0.0] * 8, [1.0] * 8, 64)
    assert lost_too_many([0.0] * 9, [1.0] * 9, 64)
    assert not lost_too_many([1.0] * 9, [0.0] * 9, 64)


def test_the_choice_is_kept_for_the_same_conditions_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundled_pair: tuple[Path, Path]
) -> None:
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path))
    config = EngineConfig(model=bundled_pair[0], draft=bundled_pair[1], gamma=8, device="none", n_gpu_layers=0)
    device = resolve_device(config)
    assert read_choice(config, TEMPLATE, device) is None
    made = choice((16, 0.9, 1.3))
    write_measurement(choice_file(config, TEMPLATE, device), made)
    assert read_choice(config, TEMPLATE, device) == replace(made, from_file=True)
    assert json.loads(choice_file(config, TEMPLATE, device).read_text())["budget"] == 16
    others = [
        (replace(config, gamma=4), TEMPLATE),
        (replace(config, n_threads=1), TEMPLATE),
        (replace(config, draft="ngram"), TEMPLATE),
        (config, replace(TEMPLATE, coverage="truncation")),
        (config, replace(TEMPLATE, ranking="router")),
        (replace(config, placement=PlacementConfig(cache_ratio=0.5)), TEMPLATE),
    ]
    for other_config, template in others:
        assert read_choice(other_config, template, device) is None
    files = {choice_file(other_config, template, device) for other_config, template in others}
    assert len(files) == len(others)
    file = choice_file(config, TEMPLATE, device)
    for broken in ("", "[]", '{"schema": 1}', '{"schema": 99, "trials": []}'):
        file.write_text(broken)
        assert read_choice(config, TEMPLATE, device) is None


def test_a_trial_is_timed_against_the_same_tasks_and_scored_by_its_mean() -> None:
    def samples(mode: str, seconds: list[float]) -> list[Sample]:
        return [
            Sample(mode, f"p{i}", 0, 0, 0, decode_tokens=20, decode_s=s, steps=5, experts_sum=50.0)
            for i, s in enumerate(seconds)
        ]

    unbudgeted, dropped = samples("off", [1.0, 1.0, 4.0, 4.0]), samples("budget", [0.5, 0.5])  # without two tasks
    trial = budget_choice._task_trial(8, [1.0, 0.0], dropped, unbudgeted)
    assert (trial.budget, trial.score, trial.n_scored, trial.tg_ts, trial.ratio) == (8, 0.5, 2, 40.0, 2.0)
    assert trial.score_stddev == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert (trial.tokens_per_step, trial.experts) == (4.0, 10.0)


def test_auto_is_off_without_drafts(bundled_pair: tuple[Path, Path]) -> None:
    notes: list[Notification] = []
    config = EngineConfig(model=bundled_pair[0], draft=None, device="none", n_gpu_layers=0)
    assert find_budget(config, TEMPLATE, Run(notes.append)) is None
    assert len(notes) == 1
    with pytest.raises(InputError):
        budget_choice.choose_budget(config, TEMPLATE, Run(), measure_anew=True)


def _pair_session(bundled_pair: tuple[Path, Path]) -> Session:
    config = EngineConfig(
        model=bundled_pair[0], draft=bundled_pair[1], gamma=8, n_ctx=1024, device="none", n_gpu_layers=0, n_threads=1
    )
    return Session.open(replace(config, expert_budget=TEMPLATE))


@pytest.mark.slow
def test_the_pair_is_tried_on_its_tasks(monkeypatch: pytest.MonkeyPatch, bundled_pair: tuple[Path, Path]) -> None:
    tasks = load_calibration()
    few = replace(tasks, prompts=tasks.prompts[:3])
    monkeypatch.setattr(budget_choice, "load_calibration", lambda: few)
    monkeypatch.setattr(budget_choice, "candidate_budgets", lambda n_used, experts: (8, 24))
    progress = SeenProgress()
    with _pair_session(bundled_pair) as session:
        found = Trials(session, TEMPLATE, progress).run()
    assert (found.score_kind, found.gamma) == ("tasks", 8)
    assert (progress.tasks, progress.amounts) == ([("measuring", 3)], [1, 1, 1])
    assert [trial.budget for trial in found.trials] == [None, 8, 24]
    assert all(trial.n_scored <= 3 and 0 <= trial.score <= 1 and trial.ratio for trial in found.trials)
    experts = [trial.experts or 0.0 for trial in found.trials]
    assert experts[1] <= 8 < experts[2] <= 24 < experts[0]


@pytest.mark.slow
def test_other_models_are_tried_on_a_text(monkeypatch: pytest.MonkeyPatch, bundled_pair: tuple[Path, Path]) -> None:
    monkeypatch.setattr(budget_choice, "is_toy", lambda model: False)
    with _pair_session(bundled_pair) as session:
        found = Trials(session, TEMPLATE, progress := SeenProgress()).run()
    assert found.score_kind == "likelihood" and sum(progress.amounts) == progress.tasks[0][1]
    budgets = [trial.budget for trial in found.trials]
    assert budgets[0] is None and len(budgets) > 1 and budgets[1:] == sorted(budgets[1:])
    for trial in found.trials:
        assert trial.score < 0 < trial.score_stddev
        assert (trial.ratio is not None) == (trial.score >= found.least_score)  # the others were not timed
