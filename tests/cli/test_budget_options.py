"""--expert-budget and its companions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench import budget_choice
from moeedge.cli.engine_options import BudgetOptions
from moeedge.cli.options import parse_budget
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.run import Run
from tests.support.commands import refused, run_json

BASE = EngineConfig(model=Path("model.gguf"))


def budget_of(options: BudgetOptions) -> ExpertBudget | None:
    return options.config(BASE).expert_budget


@pytest.mark.parametrize(("text", "value"), [("off", None), ("AUTO", "auto"), ("16", 16), (" 8 ", 8)])
def test_values(text: str, value: object) -> None:
    assert parse_budget(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "8.5", "many", "", "8,16", "²", "9" * 10, "9" * 5000])
def test_other_values_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--expert-budget"):
        parse_budget(text)


def test_the_defaults_are_the_engines() -> None:
    assert budget_of(BudgetOptions()) is None
    budget = budget_of(BudgetOptions(expert_budget=16))
    assert budget is not None
    assert (budget.budget, budget.ranking, budget.coverage) == (16, "picks", "substitution")


def test_companions_are_passed_on() -> None:
    budget = budget_of(BudgetOptions(expert_budget=16, budget_policy="truncation", budget_ranking="router"))
    assert budget is not None
    assert (budget.coverage, budget.ranking) == ("truncation", "router")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BudgetOptions(budget_ranking="router"), "--budget-ranking needs"),
        (
            BudgetOptions(budget_ranking="router", budget_policy="truncation"),
            "--budget-ranking and --budget-policy need",
        ),
        (BudgetOptions(expert_budget=parse_budget("off"), budget_policy="truncation"), "--budget-policy needs"),
        (BudgetOptions(expert_budget=16, budget_ranking="static"), "ranking 'static'"),
        (BudgetOptions(expert_budget=16, budget_policy="drop"), "policy 'drop'"),
    ],
)
def test_combinations_without_a_meaning_are_refused(options: BudgetOptions, words: str) -> None:
    with pytest.raises(InputError) as caught:
        budget_of(options)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_auto_measures_once_all_options_are_checked(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ExpertBudget] = []

    def find(_config: EngineConfig, template: ExpertBudget, _run: Run) -> ExpertBudget:
        asked.append(template)
        return replace(template, budget=6)

    monkeypatch.setattr(budget_choice, "find_budget", find)
    chat = ("chat", *pair, "-dev", "none", "--expert-budget", "auto", "-p", "tell me", "-n", "8")
    for wrong in (["--resume"], ["--raw", "-sys", "be brief"], ["--budget-ranking", "static"]):
        assert refused(*chat, *wrong)
    assert not asked
    stats = run_json(*chat)["stats"]
    assert (stats["expert_budget"], stats["budget_policy"]) == (6, asked[0].coverage) == (6, "truncation")
