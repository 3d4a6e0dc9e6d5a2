"""--expert-budget and its companions for commands that replay or simulate traces: lists, every combination of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Annotated, Any, cast

from numpy.typing import NDArray

from moeedge.analysis.expert_ranking import fit_layers, read_ranking
from moeedge.cli import options
from moeedge.cli.budget_options import OFF, parse_budget
from moeedge.cli.common import names, numbers
from moeedge.cli.declare import derive, list_of
from moeedge.errors import InputError
from moeedge.policies.expert_budget import Coverage, ExpertBudget, Ranking, static_order

Budgets = Annotated[
    str | None,
    derive(
        options.ExpertBudget,
        metavar="LIST",
        help="Verifications use at most B experts per layer (MoE-Spec), which changes a model's answers. Ranked by the "
        "trace's router weights, or by counts where it has none. Several, separated by commas, are compared; off: no "
        "budget.",
    ),
]
Rankings = Annotated[str | None, list_of(options.BudgetRanking)]
Policies = Annotated[str | None, list_of(options.BudgetPolicy)]
Preferences = Annotated[str | None, list_of(options.BudgetPreferResident)]


@dataclass(frozen=True, kw_only=True)
class TraceBudgets:
    """Expert budgets of a trace's verifications."""

    expert_budget: Budgets = None
    budget_ranking: Rankings = None
    budget_policy: Policies = None
    budget_prefer_resident: Preferences = None
    budget_file: options.BudgetFile = None
    budget_layers: options.BudgetLayers = None

    def budgets(self, profile: NDArray[Any] | None = None) -> tuple[ExpertBudget | None, ...] | None:
        """The budgets in the order of the lists, None for "off" among them; None: none were asked for.

        profile: activations [n_layers, n_experts] elsewhere, which the ranking "static" uses without a file. Raises
        InputError.
        """
        if self.expert_budget is None:
            given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
            if given:
                raise InputError(f"--{given[0].replace('_', '-')} needs an expert budget.", "Add --expert-budget LIST.")
            return None
        if self.budget_layers not in (None, "uniform", "fitted"):
            raise InputError(f"--budget-layers takes uniform or fitted, not '{self.budget_layers}'.")
        ranking = None if self.budget_file is None else read_ranking(self.budget_file)
        order = static_order(profile) if ranking is None and profile is not None else None
        if ranking is not None:
            order = ranking.order
        found: list[ExpertBudget | None] = []
        for text in names(self.expert_budget, "--expert-budget"):
            asked = parse_budget(text)
            if asked == "auto":
                raise InputError("A trace has no scores, from which auto chooses.", f"Give numbers, or {OFF}.")
            if asked is None:
                found.append(None)
                continue
            n_experts: int | tuple[int, ...] = asked
            if self.budget_layers == "fitted":
                if ranking is None:
                    raise InputError("Fitted layers need the model's ranking.", "Give --budget-file FILE.")
                n_experts = fit_layers(ranking, asked)
            for rank, policy, prefer in itertools.product(
                names(self.budget_ranking or ExpertBudget.ranking, "--budget-ranking"),
                names(self.budget_policy or ExpertBudget.coverage, "--budget-policy"),
                numbers(self.budget_prefer_resident or "0", "--budget-prefer-resident"),
            ):
                found.append(
                    ExpertBudget(
                        budget=n_experts,
                        ranking=cast(Ranking, rank),
                        coverage=cast(Coverage, policy),
                        prefer_resident=prefer,
                        order=order if rank == "static" else None,
                    )
                )
        return tuple(found)
