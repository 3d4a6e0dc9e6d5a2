"""--expert-budget and its companions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.analysis.expert_ranking import rank_experts, write_ranking
from moeedge.bench import budget_search
from moeedge.cli.budget_options import BudgetOptions, parse_budget
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.notifications import Notification, Notify, ignore
from moeedge.policies.expert_budget import ExpertBudget
from tests.support.commands import refused, run_json
from tests.support.traces import two_texts

BASE = EngineConfig(model=Path("model.gguf"))


def budget_of(options: BudgetOptions) -> ExpertBudget | None:
    return options.config(BASE, notify=ignore).expert_budget


@pytest.mark.parametrize(("text", "value"), [(None, None), ("off", None), ("AUTO", "auto"), ("16", 16), (" 8 ", 8)])
def test_values(text: str | None, value: object) -> None:
    assert parse_budget(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "8.5", "many", "", "8,16", "²", "9" * 10, "9" * 5000])
def test_other_values_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--expert-budget"):
        parse_budget(text)


def test_the_defaults_are_the_engines() -> None:
    assert budget_of(BudgetOptions()) is None
    budget = budget_of(BudgetOptions(expert_budget="16"))
    assert budget is not None
    assert (budget.budget, budget.ranking, budget.coverage, budget.prefer_resident) == (16, "picks", "substitution", 0)


def test_companions_are_passed_on() -> None:
    options = BudgetOptions(expert_budget="16", budget_policy="truncation", budget_prefer_resident=0.15)
    budget = budget_of(options)
    assert budget is not None
    assert (budget.coverage, budget.prefer_resident) == ("truncation", 0.15)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BudgetOptions(budget_ranking="router"), "--budget-ranking needs"),
        (BudgetOptions(budget_policy="truncation", budget_file=Path("x")), "--budget-policy and --budget-file need"),
        (BudgetOptions(expert_budget="off", budget_prefer_resident=0.0), "--budget-prefer-resident needs"),
        (BudgetOptions(expert_budget="16", budget_ranking="oracle"), "oracle"),
        (BudgetOptions(expert_budget="16", budget_ranking="best"), "ranking 'best'"),
        (BudgetOptions(expert_budget="16", budget_policy="drop"), "policy 'drop'"),
        (BudgetOptions(expert_budget="16", budget_ranking="static"), "--save-ranking"),
        (BudgetOptions(expert_budget="16", budget_layers="fitted"), "--save-ranking"),
        (BudgetOptions(expert_budget="16", budget_layers="some"), "uniform or fitted"),
        (BudgetOptions(expert_budget="16", budget_file=Path("x.json")), "--budget-file"),
        (BudgetOptions(expert_budget="16", budget_prefer_resident=1.5), "from 0 to 1"),
        (BudgetOptions(expert_budget="16", budget_prefer_resident=float("nan")), "from 0 to 1"),
        (BudgetOptions(expert_budget="auto", budget_layers="fitted"), "auto"),
    ],
)
def test_combinations_without_a_meaning_are_refused(options: BudgetOptions, words: str) -> None:
    with pytest.raises(InputError) as caught:
        budget_of(options)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_a_rankings_file_gives_order_and_layers(tmp_path: Path) -> None:
    ranking = rank_experts(two_texts(weights=True))
    file = tmp_path / "ranking.json"
    write_ranking(ranking, file)
    k = ranking.n_expert_used
    static = budget_of(BudgetOptions(expert_budget=str(k + 1), budget_ranking="static", budget_file=file))
    assert static is not None
    assert static.budget == k + 1
    assert static.order is not None
    assert (static.order == ranking.order).all()
    fitted = budget_of(BudgetOptions(expert_budget=str(k + 1), budget_layers="fitted", budget_file=file))
    assert fitted is not None
    assert isinstance(fitted.budget, tuple)
    assert sum(fitted.budget) == (k + 1) * len(ranking.expert_layers)
    assert fitted.order is None


def test_another_models_ranking_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "ranking.json"
    write_ranking(rank_experts(two_texts()), file)
    heard: list[Notification] = []
    options = BudgetOptions(expert_budget="16", budget_ranking="static", budget_file=file)
    assert options.config(BASE, notify=heard.append).expert_budget is not None
    assert [BASE.model.name in note for note in heard] == [True]


def test_auto_measures_once_all_options_are_checked(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ExpertBudget] = []

    def find(_config: EngineConfig, template: ExpertBudget, *, notify: Notify) -> ExpertBudget:
        asked.append(template)
        return replace(template, budget=6)

    monkeypatch.setattr(budget_search, "find_budget", find)
    chat = ("chat", *pair, "-dev", "none", "--expert-budget", "auto", "-p", "tell me", "-n", "8")
    for wrong in (["--resume"], ["--raw", "-sys", "be brief"], ["--budget-file", "missing.json"]):
        assert refused(*chat, *wrong)
    assert not asked
    stats = run_json(*chat)["stats"]
    assert (stats["expert_budget"], stats["budget_policy"]) == (6, asked[0].coverage) == (6, "truncation")
