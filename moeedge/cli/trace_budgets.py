"""--expert-budget and its companions for commands that replay or simulate traces: lists, every combination of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from moeedge.cli import budget_options
from moeedge.cli.budget_options import expect_no_companions, make_budget, parse_number, read_file
from moeedge.cli.common import names, numbers
from moeedge.cli.declare import derive, list_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moeedge.policies.expert_budget import ExpertBudget

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
Rankings = Annotated[str | None, list_of(budget_options.BudgetRanking)]
Policies = Annotated[str | None, list_of(budget_options.BudgetPolicy)]
Preferences = Annotated[str | None, list_of(budget_options.BudgetPreferResident)]


@dataclass(frozen=True, kw_only=True)
class TraceBudgets:
    """Expert budgets of a trace's verifications."""

    expert_budget: Budgets = None
    budget_ranking: Rankings = None
    budget_policy: Policies = None
    budget_prefer_resident: Preferences = None
    budget_file: budget_options.BudgetFile = None
    budget_layers: budget_options.BudgetLayers = None

    def budgets(self, profile: NDArray[Any] | None = None) -> tuple[ExpertBudget | None, ...] | None:
        """The budgets in the order of the lists, None for "off" among them; None: none were asked for.

        profile: activations [n_layers, n_experts] elsewhere, which the ranking "static" uses without a file. Raises
        InputError.
        """
        if self.expert_budget is None:
            expect_no_companions(self, "LIST")
            return None
        from moeedge.policies.expert_budget import ExpertBudget, static_order

        rankings = names(self.budget_ranking or ExpertBudget.ranking, "--budget-ranking")
        file = read_file(self.budget_file, None, rankings=rankings, layers=[self.budget_layers])
        order = None if profile is None else static_order(profile)
        found: list[ExpertBudget | None] = []
        for text in names(self.expert_budget, "--expert-budget"):
            n_experts = parse_number(text)
            if n_experts is None:
                found.append(None)
                continue
            for ranking, policy, preference in itertools.product(
                rankings,
                names(self.budget_policy or ExpertBudget.coverage, "--budget-policy"),
                numbers(self.budget_prefer_resident or "0", "--budget-prefer-resident"),
            ):
                found.append(
                    make_budget(
                        n_experts,
                        file,
                        ranking=ranking,
                        policy=policy,
                        prefer_resident=preference,
                        layers=self.budget_layers,
                        order=order,
                    )
                )
        return tuple(found)
