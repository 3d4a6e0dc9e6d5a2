"""Expert budget: a verification uses at most B experts of each layer (MoE-Spec), as the user asks for it.

moeedge/lab/policies/expert_budget.py defines in NumPy what the native code computes (native/src/expert-budget.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.experts import IntArray
from moeedge.records import figure

Coverage = Literal["substitution", "truncation"]


@dataclass(frozen=True, kw_only=True)
class ExpertBudget:
    """At most `budget` experts per layer in each verification. Raises InputError for values that suit no model.

    ranking: who is shortlisted, by the shares of the tokens' natural picks ("picks", not in the paper) or by the sum of
    the tokens' routing probabilities over all experts ("router", Eq. 5). coverage: what tokens get whose experts are
    not shortlisted.
    """

    budget: int
    ranking: str = "picks"
    coverage: Coverage = "substitution"

    RANKINGS: ClassVar[tuple[str, ...]] = ("picks", "router")

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise InputError("An expert budget is at least 1 expert per layer.", "Give a number such as 16.")
        if self.ranking not in self.RANKINGS:
            raise InputError(f"Unknown ranking '{self.ranking}'.", f"Choose from: {', '.join(self.RANKINGS)}.")
        if self.coverage not in (names := get_args(Coverage)):
            raise InputError(f"Unknown budget policy '{self.coverage}'.", f"Choose from: {', '.join(names)}.")

    @property
    def label(self) -> str:
        """The words that every result carries, with what is not the default: "budget 16 router (lossy)"."""
        words = [word for word in (self.ranking, self.coverage) if word not in ("picks", "substitution")]
        return " ".join(["budget", str(self.budget), *words, "(lossy)"])

    def label_at(self, gamma: int) -> str:
        """The label at that draft length: without drafts nothing is lost, "budget 16 (idle)"."""
        return self.label if gamma > 0 else self.label.replace("(lossy)", "(idle)")

    def per_layer(
        self, expert_layers: IntArray, n_layers: int, n_experts: int, n_expert_used: int | Sequence[int]
    ) -> NDArray[np.int32]:
        """Budgets int32 [n_layers], at most `n_experts`, 0 for layers that `expert_layers` does not name.

        n_expert_used: experts per token, of all layers or of each. Raises `InputError` for a budget below it.
        """
        budget = min(self.budget, n_experts)
        used = np.broadcast_to(np.asarray(n_expert_used), (n_layers,))[expert_layers]
        most = int(used.max(initial=0))
        if budget < most:
            text = f"An expert budget of {budget} is below the {most} experts that the model uses per token."
            raise InputError(text, f"Give at least {most}.")
        budgets = np.zeros(n_layers, dtype=np.int32)
        budgets[expert_layers] = budget
        return budgets


@dataclass(frozen=True, kw_only=True)
class BudgetFacts:
    """The expert budget of a run, in the chat's records and in bench's; the defaults are those without one."""

    lossy: bool = figure("Whether answers may differ from the model's own", default=False)
    budget: str | None = figure("The expert budget as text", default=None)
    expert_budget: int | None = figure("Experts of a layer that a verification may use", default=None)
    budget_ranking: str | None = figure("Ranking of the expert budget", default=None)
    budget_policy: str | None = figure("Substitution or truncation", default=None)


def budget_record(budget: ExpertBudget | None, *, gamma: int) -> dict[str, Any]:
    """The fields of BudgetFacts. gamma: the draft length; at 0 the budget is idle."""
    if budget is None:
        return asdict(BudgetFacts())
    named = {"expert_budget": budget.budget, "budget_ranking": budget.ranking, "budget_policy": budget.coverage}
    return {"lossy": gamma > 0, "budget": budget.label_at(gamma), **named}
