"""--expert-budget and its companions for commands that replay or simulate traces: lists, every combination of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from moeedge.cli import budget_options
from moeedge.cli.budget_options import expect_no_companions, make_budget, parse_number
from moeedge.cli.common import names
from moeedge.cli.declare import derive, list_of
from moeedge.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moeedge.lab.policies.expert_budget import Ids
    from moeedge.policies.expert_budget import ExpertBudget

_STATIC = "static"

Budgets = Annotated[
    str | None,
    derive(
        budget_options.Budget,
        metavar="LIST",
        help="Verifications use at most B experts per layer (MoE-Spec), which changes a model's answers. Ranked by the "
        "trace's router weights, or by counts where it has none. Several, separated by commas, are compared; off: no "
        "budget.",
    ),
]
Rankings = Annotated[
    str | None,
    derive(
        budget_options.BudgetRanking,
        metavar="LIST",
        help="Which experts stay: those with the highest weight over the batch, with equal votes of its tokens (picks) "
        "or as it is (router), or the most used in other texts (static, for replay). Several, separated by commas, are "
        "compared. Default: picks.",
    ),
]
Policies = Annotated[str | None, list_of(budget_options.BudgetPolicy)]


@dataclass(frozen=True, kw_only=True)
class TraceBudgets:
    """Expert budgets of a trace's verifications."""

    expert_budget: Budgets = None
    budget_ranking: Rankings = None
    budget_policy: Policies = None

    def budgets(self, profile: NDArray[Any] | None = None) -> tuple[ExpertBudget | None, ...] | None:
        """The budgets in the order of the lists, None for "off" among them; None: none were asked for.

        profile: activations [n_layers, n_experts] elsewhere, which order the experts of the ranking "static". Raises
        InputError.
        """
        if self.expert_budget is None:
            expect_no_companions(self, "LIST")
            return None
        from moeedge.lab.sim.expert_budgets import StaticBudget
        from moeedge.policies.expert_budget import ExpertBudget

        rankings = names(self.budget_ranking or ExpertBudget.ranking, "--budget-ranking")
        if "oracle" in rankings:
            raise InputError(
                "A trace lacks the experts' outputs, which the oracle ranking reads.",
                "moeedge lab budget compares the rankings with it.",
            )
        order = _static_order(profile) if _STATIC in rankings else None
        found: list[ExpertBudget | None] = []
        for text in names(self.expert_budget, "--expert-budget"):
            n_experts = parse_number(text)
            if n_experts is None:
                found.append(None)
                continue
            policies = names(self.budget_policy or ExpertBudget.coverage, "--budget-policy")
            for ranking, policy in itertools.product(rankings, policies):
                budget = make_budget(n_experts, ranking=None if ranking == _STATIC else ranking, policy=policy)
                if order is not None and ranking == _STATIC:
                    budget = StaticBudget(budget=n_experts, coverage=budget.coverage, order=order)
                found.append(budget)
        return tuple(found)


def _static_order(profile: NDArray[Any] | None) -> Ids:
    from moeedge.lab.policies.expert_budget import static_order

    if profile is None:
        raise InputError(
            "The ranking static needs the use of experts in other texts.",
            "moeedge lab replay --profile-texts N counts it in the first N texts of the trace.",
        )
    return static_order(profile)
