"""Expert budgets in bench: lanes, figures against small examples by hand, tables and pictures, and lossy output."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.bench.config import MODES, Sweep, mode_config, parse_modes
from moeedge.bench.figures import budget_figures, budget_point
from moeedge.bench.output_check import check_answers
from moeedge.bench.perplexity import Perplexity
from moeedge.bench.records import BenchRow, make_row
from moeedge.bench.samples import Sample
from moeedge.bench.scores import Scores
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.records import as_dict
from moeedge.ui.bench_plots import draw, speculation_plots
from moeedge.ui.bench_views import render
from tests.support.answers import setup_of


def test_lanes_are_the_unbudgeted_mode_and_one_per_budget_and_draft_length() -> None:
    budgets = (ExpertBudget(budget=4), ExpertBudget(budget=6))
    lanes = Sweep(budgets=budgets, gammas=(2, 8)).modes(parse_modes("stock-ar,stock-sd,moeedge,moeedge-ar"))
    assert [(lane.name, lane.gamma, lane.budget and lane.budget.budget) for lane in lanes] == [
        ("stock-ar", None, None), ("stock-sd", 2, None), ("stock-sd", 8, None),
        ("moeedge", 2, None), ("moeedge", 2, 4), ("moeedge", 2, 6),
        ("moeedge", 8, None), ("moeedge", 8, 4), ("moeedge", 8, 6), ("moeedge-ar", None, None),
    ]  # fmt: skip
    labels = [lane.label for lane in lanes]
    assert len(set(labels)) == len(labels)
    assert all(("(lossy)" in lane.label) == (lane.budget is not None) for lane in lanes)
    assert all(lane.is_swept == (lane.name == "moeedge") for lane in lanes)  # each has a cache of its own
    base = EngineConfig(model=Path("t.gguf"), draft=Path("d.gguf"), gamma=8)
    configs = [mode_config(base, lane) for lane in lanes]
    assert [config.gamma for config in configs] == [0, 2, 8, 2, 2, 2, 8, 8, 8, 0]
    assert [config.expert_budget for config in configs] == [lane.budget for lane in lanes]


def test_choices_of_a_budget_distinguish_its_lanes() -> None:
    budgets = (
        ExpertBudget(budget=4),
        ExpertBudget(budget=4, ranking="router"),
        ExpertBudget(budget=4, coverage="truncation"),
    )
    labels = [lane.label for lane in Sweep(budgets=budgets).modes(parse_modes("moeedge"))]
    assert len(set(labels)) == 4


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
    assert (str(check), check.passed, check.lossy, check.different) == ("2/4", True, True, ())
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
    perplexity = Perplexity(
        text="toy", text_sha256="0", n_tokens=10, batch_tokens=5, window_tokens=512, nll=math.log(2.0), nll_stderr=0.1
    )
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
