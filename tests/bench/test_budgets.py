"""Expert budgets in bench: lanes, figures by hand, tables, pictures, lossy output; and --expert-budget auto.

Auto follows MoE-Spec's rule (Section 4.2) on trials, keeps its choice, and tries the pair.
"""

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
from moeedge.bench.config import MODES, Sweep, mode_config, parse_modes
from moeedge.bench.figures import budget_figures, budget_point
from moeedge.bench.quality import Perplexity, Scores, check_answers
from moeedge.bench.records import BenchRow, make_row
from moeedge.bench.samples import Sample
from moeedge.data.datasets import load_calibration
from moeedge.engine.loading import resolve_device
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.devices import ResolvedDevice
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.records import as_dict
from moeedge.run import Notification, Run
from moeedge.scheduler.calibration import read_measurement, write_measurement
from moeedge.scheduler.config import PlacementConfig
from moeedge.ui.bench_plots import draw, speculation_plots
from moeedge.ui.bench_views import render
from tests.support.answers import setup_of
from tests.support.progress import SeenProgress

TEMPLATE = ExpertBudget(budget=1 << 20)


def test_lanes_are_the_unbudgeted_mode_and_one_per_budget_and_draft_length() -> None:
    budgets = (ExpertBudget(budget=4), ExpertBudget(budget=4, ranking="router"))
    lanes = Sweep(budgets=budgets, gammas=(2, 8)).modes(parse_modes("stock-ar,stock-sd,moeedge,moeedge-ar"))
    assert [(lane.name, lane.gamma, lane.budget and lane.budget.budget) for lane in lanes] == [
        ("stock-ar", None, None), ("stock-sd", 2, None), ("stock-sd", 8, None),
        ("moeedge", 2, None), ("moeedge", 2, 4), ("moeedge", 2, 4),
        ("moeedge", 8, None), ("moeedge", 8, 4), ("moeedge", 8, 4), ("moeedge-ar", None, None),
    ]  # fmt: skip
    labels = [lane.label for lane in lanes]
    assert len(set(labels)) == len(labels)
    assert all(("(lossy)" in lane.label) == (lane.budget is not None) for lane in lanes)
    assert all(lane.is_swept == (lane.name == "moeedge") for lane in lanes)  # each has a cache of its own
    base = EngineConfig(model=Path("t.gguf"), draft=Path("d.gguf"), gamma=8)
    configs = [mode_config(base, lane) for lane in lanes]
    assert [config.gamma for config in configs] == [0, 2, 8, 2, 2, 2, 8, 8, 8, 0]
    assert [config.expert_budget for config in configs] == [lane.budget for lane in lanes]


def test_nothing_asked_leaves_the_modes() -> None:
    modes = tuple(MODES.values())
    assert Sweep(gammas=(4,)).modes(modes) == modes
    assert not Sweep(gammas=(4,)).is_set
    with pytest.raises(InputError, match="has drafts"):
        Sweep(budgets=(ExpertBudget(budget=4),)).modes(parse_modes("stock-sd,moeedge-ar"))


def _samples(mode: str, scores: tuple[float, ...], seconds: float, **others: float) -> list[Sample]:
    """Answers of ten tokens: the first half of category "a", the others of "b"."""
    fields = {"steps": 5, "drafted": 20, "accepted": 5, "experts_sum": 60.0, "experts_natural_sum": 60.0} | others
    return [
        Sample(
            mode, f"p{i}", 0, 0, 0, category="a" if i < len(scores) / 2 else "b", decode_tokens=10, decode_s=seconds,
            score=score, tokens=[1, 2, 3, 4] if score else [1, 2, 9], prompt_ids=[1], **fields,  # type: ignore[arg-type]
        )
        for i, score in enumerate(scores)
    ]  # fmt: skip


_STOCK = _samples("stock-ar", (1, 1, 1, 1), 1.0, steps=10)
_OFF = _samples("moeedge", (1, 1, 1, 0), 0.5)
_BUDGETED = _samples(
    "moeedge budget 4 (lossy)", (1, 1, 0, 0), 0.25,
    experts_sum=20.0, experts_max=4, kept_probability_sum=3.6, budgeted_steps=4,  # one step had no draft
)  # fmt: skip


def test_a_point_against_its_definition() -> None:
    point = budget_point("", "m", _BUDGETED, _STOCK, _OFF)
    assert (point.n_answers, point.n_scored, point.score, point.quality) == (4, 4, 0.5, 0.5)
    assert point.score_stderr == pytest.approx(math.sqrt(1 / 3) / 2)
    assert point.score_change == -0.25  # one of four answers became wrong
    assert point.score_change_stderr == pytest.approx(0.5 / 2)
    assert (point.ratio, point.ratio_unbudgeted) == (4.0, 2.0)
    assert (point.tokens_per_step, point.acceptance_rate) == (2.0, 0.25)
    assert (point.experts_natural, point.experts_kept, point.experts_max) == (12.0, 4.0, 4)
    assert point.kept_probability == pytest.approx(0.9)


def test_categories_have_points_of_their_own() -> None:
    mode = replace(MODES["moeedge"], budget=ExpertBudget(budget=4))
    figures = budget_figures(mode, _BUDGETED, _STOCK, _OFF, None)
    assert [(p.category, p.score, p.score_change) for p in figures.by_category] == [("a", 1.0, 0.0), ("b", 0.0, -0.5)]
    alone = budget_figures(mode, [s for s in _BUDGETED if s.category == "a"], _STOCK, _OFF, None)
    assert alone.by_category == ()


@pytest.mark.parametrize(("name", "ratio"), [("moeedge", 2.0), ("moeedge-ar", None), ("stock-sd", None)])
def test_only_modes_on_which_a_budget_acts_are_compared_with_the_unbudgeted(name: str, ratio: float | None) -> None:
    assert budget_figures(MODES[name], _BUDGETED, _STOCK, _OFF, None).total.ratio_unbudgeted == ratio


def test_without_scores_or_a_pass_in_common_figures_are_unknown() -> None:
    unscored = [replace(sample, score=None) for sample in _BUDGETED]
    point = budget_point("", "m", unscored, _STOCK, [])
    assert (point.score, point.quality, point.score_change, point.ratio_unbudgeted) == (None, None, None, None)
    assert point.ratio == 4.0


def test_a_budget_makes_a_difference_a_figure() -> None:
    def never(_sample: Sample, _position: int) -> np.ndarray:
        raise AssertionError("no logits are needed")

    check = check_answers(_BUDGETED, _STOCK, never, [], lossy=True)
    assert (check.text, check.passed, check.different) == ("2/4", True, ())
    assert check.agreement == pytest.approx((4 + 4 + 2 + 2) / 16)
    assert check_answers(_STOCK, _STOCK, never, []).agreement == 1.0


def _row(samples: list[Sample], *, gamma: int | None = None, budget: int | None = None) -> BenchRow:
    name = "stock-ar" if samples is _STOCK else "moeedge"
    chosen = None if budget is None else ExpertBudget(budget=budget)
    mode = replace(MODES[name], gamma=gamma, budget=chosen)
    environment = {"version": "0", "commit": None, "dirty": None, "llama_cpp_version": "0", "cpu": "a"}
    setup = environment | {"model": "m.gguf", "draft": "d.gguf", "policy": "none", "cache_ratio": None}
    setup |= {"gamma": (gamma or 4) if mode.drafts else 0, "threads": 1, "n_ctx": 256, "repetitions": 1, "n_predict": 8}
    setup |= {"n_prompt": 0, "n_gen": 0, "n_expert_layers": 3, "whole_layers": 0}
    setup |= {"model_description": "qwen3moe", "model_bytes": 1, "model_n_params": 1, "backend": "CPU"}
    perplexity = Perplexity(text="toy", text_sha256="0", n_tokens=10, batch_tokens=5, nll=math.log(2.0), nll_stderr=0.1)
    figures = budget_figures(mode, samples, _STOCK, _OFF, perplexity)
    output = check_answers(samples, _STOCK, lambda *_: np.zeros(16, np.float32), [], lossy=budget is not None)
    scores = Scores(score=figures.total.score, n_scored=4, n_answers=4, n_cut=0)
    return make_row(
        mode, "toy", samples, _STOCK, output=output, scores=scores, setup=setup_of(**setup), figures=figures
    )


def test_tables_and_records_say_lossy() -> None:
    rows = [_row(_STOCK), _row(_OFF), _row(_BUDGETED, budget=4)]
    text = render(rows, "md")
    lines = [line for line in text.splitlines() if line.startswith("|") and "budget 4 (lossy)" in line]
    assert len(lines) >= 4  # speed, quality, categories; each in as many tables as fit
    assert max(map(len, text.splitlines())) <= 100
    assert "SCORES DIFFER: moeedge has" in text  # without a budget that is an error
    assert "SCORES DIFFER: moeedge budget" not in text
    record = as_dict(rows[2])
    assert (record["quality"], record["score_change"], record["ratio_unbudgeted"]) == (0.5, -0.25, 2.0)
    assert (record["perplexity"], record["perplexity_stderr"]) == (pytest.approx(2.0), pytest.approx(0.2))
    assert [point["category"] for point in record["points_by_category"]] == ["a", "b"]
    assert not any(isinstance(value, dict) for value in record.values())


def test_the_curve_and_its_picture(tmp_path: Path) -> None:
    rows = [_row(_STOCK), _row(_OFF), _row(_BUDGETED, budget=4)]
    plots = {plot.title: {line.label: (line.x, line.values) for line in plot.lines} for plot in speculation_plots(rows)}
    assert list(plots) == ["score / stock-ar's, mean of the categories", "a", "b"]
    whole = plots["score / stock-ar's, mean of the categories"]
    assert whole["moeedge budgets picks substitution"] == ((4.0,), (0.5,))
    assert whole["moeedge"] == ((2.0,), (0.75,))
    picture = tmp_path / "curve.png"
    assert draw(rows, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not draw([], picture)


def test_figure_4_has_a_line_per_budget(tmp_path: Path) -> None:
    rows = [_row(_STOCK)]
    for gamma in (4, 8):
        rows += [_row(_OFF, gamma=gamma), _row(_BUDGETED, gamma=gamma, budget=4)]
    experts, speed, both = (
        {line.label: list(zip(line.x, line.values, strict=True)) for line in plot.lines}
        for plot in speculation_plots(rows)[-3:]
    )
    assert experts == {"moeedge": [(4, 12), (8, 12)], "budget 4 (lossy)": [(4, 4), (8, 4)]}
    assert speed["budget 4 (lossy)"] == [(4, 4.0), (8, 4.0)]
    assert both["moeedge"] == [(12, 2.0), (12, 2.0)]
    assert len(speculation_plots(rows[:3])) == 3
    assert draw(rows, tmp_path / "lengths.svg")


def read_choice(config: EngineConfig, template: ExpertBudget, device: ResolvedDevice) -> BudgetChoice | None:
    return read_measurement(BudgetChoice, partial(choice_file, config, template, device))


def choice(*trials: tuple[int, float, float | None], stddev: float = 0.02) -> BudgetChoice:
    """trials: budget, score, speed over unbudgeted verification's, which has a score of 0.9."""
    base = BudgetTrial(None, 0.9, stddev, 72, tg_ts=100.0, ratio=1.0, experts=30.0)
    return BudgetChoice(
        trials=(base, *(BudgetTrial(budget, score, stddev, 72, ratio=ratio) for budget, score, ratio in trials)),
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
    assert made.decision.chosen == ("off" if best is None else f"{best} (lossy)")


def test_a_stopped_trial_is_not_chosen() -> None:
    """Its mean is of the first tasks only, which may be the easier ones."""
    made = choice((8, 0.95, 1.9), (16, 0.9, 1.4))
    stopped = replace(made.trials[1], n_scored=40)
    assert replace(made, trials=(made.trials[0], stopped, made.trials[2])).best.budget == 16


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


@pytest.mark.usefixtures("cache_folder")
def test_the_choice_is_kept_for_the_same_conditions_only(bundled_pair: tuple[Path, Path]) -> None:
    config = EngineConfig(model=bundled_pair[0], draft=bundled_pair[1], gamma=8, device="none", n_gpu_layers=0)
    device = resolve_device(config)
    assert read_choice(config, TEMPLATE, device) is None
    made = choice((16, 0.9, 1.3))
    write_measurement(choice_file(config, TEMPLATE, device), made)
    kept = read_choice(config, TEMPLATE, device)
    assert kept == made and kept.kept_from
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
