"""The options of `moeedge bench` that compare expert budgets and draft lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moeedge import paths
from moeedge.cli import budget_options, options
from moeedge.cli.budget_options import expect_no_companions, make_budget, parse_number
from moeedge.cli.declare import derive, list_of, option
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.bench.config import DraftLength
    from moeedge.data import EvaluationText
    from moeedge.policies.expert_budget import ExpertBudget

_NO_TEXT = "none"

Budgets = Annotated[
    str | None,
    derive(
        budget_options.BudgetList,
        metavar="LIST",
        help="Verify drafts with at most so many experts per layer (MoE-Spec), for instance 16,24,32: moeedge once per "
        "budget next to moeedge without. Lossy: rows say so, and the output check gives a figure of quality.",
    ),
]
BudgetRankings = Annotated[str | None, list_of(budget_options.BudgetRanking)]
BudgetPolicies = Annotated[str | None, list_of(budget_options.BudgetPolicy)]
DraftMaxima = Annotated[
    str | None,
    derive(
        options.DraftLength,
        metavar="LIST",
        help="Tokens per draft (gamma); 0: no speculation; auto: as many as pay by what steps have cost. Several, "
        "separated by commas, are compared. Default: auto for the mode moeedge, unless caches, budgets or texts "
        "together are compared, perplexity is measured or routing is recorded; otherwise the catalog's value for the "
        "model, or 4.",
    ),
]
PerplexityText = Annotated[
    str | None,
    option(
        options.BUDGET,
        "--perplexity FILE|toy|none",
        "A text on which the modes of our backend with drafts are compared by perplexity, decoded in batches of "
        "gamma + 1 tokens. Default: toy, the bundled pair's, for that with --expert-budget, otherwise none.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class BudgetSweepOptions:
    """Expert budgets to compare, and a text to compare them on."""

    expert_budget: Budgets = None
    budget_ranking: BudgetRankings = None
    budget_policy: BudgetPolicies = None
    perplexity: PerplexityText = None

    def parse(self) -> tuple[ExpertBudget, ...]:
        """Every budget with each ranking and policy; "off" is none of them, and always measured. Raises InputError."""
        from moeedge.bench.config import parse_list

        hint = "Give experts per layer, separated by commas, for instance 16,24,32."
        listed = () if self.expert_budget is None else parse_list(self.expert_budget, "--expert-budget", hint)
        numbers = [number for number in map(parse_number, listed) if number is not None]
        if not numbers:
            expect_no_companions(self, "LIST")
        return tuple(
            make_budget(number, ranking=ranking, policy=policy)
            for ranking in _listed(self.budget_ranking, "--budget-ranking")
            for policy in _listed(self.budget_policy, "--budget-policy")
            for number in numbers
        )

    def text(self, model: Path) -> EvaluationText | None:
        """The text of --perplexity. Raises DatasetError."""
        from moeedge.data.texts import TOY_TEXT, load_text

        name = self.perplexity
        if name is None and self.expert_budget is not None and paths.is_bundled(model):
            name = TOY_TEXT
        return None if name in (None, _NO_TEXT) else load_text(name)


def parse_gammas(text: str | None) -> tuple[DraftLength, ...]:
    """The draft lengths of --draft-max, () for None. Raises InputError."""
    from moeedge.bench.config import parse_list, parse_numbers

    gammas: tuple[DraftLength, ...] = ()
    if text is not None:
        lengths = parse_list(text, "--draft-max", "Give numbers of tokens or auto, separated by commas.")
        numbers = ",".join(length for length in lengths if length != "auto")
        gammas = parse_numbers(numbers, "--draft-max", least=0) if numbers else ()
        gammas += ("auto",) if "auto" in lengths else ()
    if len(gammas) > 1 and 0 in gammas:
        raise InputError("A draft length of 0 is plain decoding.", "Compare with the mode moeedge-ar instead.")
    return gammas


def _listed(text: str | None, name: str) -> tuple[str | None, ...]:
    from moeedge.bench.config import parse_list

    return (None,) if text is None else parse_list(text, name, "Separate names by commas.")
