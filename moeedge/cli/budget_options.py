"""--expert-budget and its companions, parsed to the engine's ExpertBudget."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Literal, cast

from moeedge.cli import options
from moeedge.cli.declare import list_of, option
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.notifications import Notify

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from moeedge.policies.expert_budget import Coverage, ExpertBudget

OFF = "off"
AUTO: Literal["auto"] = "auto"
_DIGITS_MAX = 9  # no model has so many experts
_EXPERTS_OF_TEMPLATE = 1 << 20  # replaced by what auto finds


Budget = Annotated[
    str | None,
    option(
        options.BUDGET,
        "--expert-budget B|auto|off",
        "Verify drafts with at most B experts per layer (MoE-Spec). Lossy: faster, but answers may differ from the "
        "model's own; prompts and single tokens are computed exactly. auto: the fastest budget whose score on a "
        "calibration set stays within one standard deviation (docs/lab/expert-budget.md). Default: off.",
        show_default=False,
    ),
]
BudgetList = Annotated[str | None, list_of(Budget)]
BudgetRanking = Annotated[
    str | None,
    option(
        options.BUDGET,
        "--budget-ranking picks|router",
        "Which experts stay: those with the highest routing probability over the batch, of the experts that its tokens "
        "select (picks) or of all experts (router: the paper's). Default: picks.",
        show_default=False,
    ),
]
BudgetPolicy = Annotated[
    str | None,
    option(
        options.BUDGET,
        "--budget-policy substitution|truncation",
        "What a token gets whose expert is left out: the best of the others (substitution), or nothing in its place "
        "(truncation). Default: substitution.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """How many experts a verification may use per layer, and which."""

    expert_budget: Budget = None
    budget_ranking: BudgetRanking = None
    budget_policy: BudgetPolicy = None

    def config(self, base: EngineConfig) -> EngineConfig:
        """`base` with the budget that the options ask for; with auto its number of experts is not known yet.

        Raises InputError for values that exclude each other.
        """
        asked = parse_budget(self.expert_budget)
        if asked is None:
            expect_no_companions(self, "B")
            return base
        # a truncated expert is not computed, which gains more than the smaller number of experts (docs/log.md)
        policy = self.budget_policy or ("truncation" if asked == AUTO else None)
        n_experts = _EXPERTS_OF_TEMPLATE if asked == AUTO else asked
        return replace(base, expert_budget=make_budget(n_experts, ranking=self.budget_ranking, policy=policy))

    def measured(self, config: EngineConfig, *, notify: Notify) -> EngineConfig:
        """What `config` made, with the number of experts that auto finds, measured where no earlier run did.

        notify: hears that auto measures, and what it chose.
        """
        if config.expert_budget is None or parse_budget(self.expert_budget) != AUTO:
            return config
        from moeedge.bench.budget_choice import find_budget

        return replace(config, expert_budget=find_budget(config, config.expert_budget, notify=notify))


def parse_budget(text: str | None) -> int | Literal["auto"] | None:
    """A value of --expert-budget: experts per layer, "auto", or None for none and "off". Raises InputError."""
    is_auto = text is not None and text.strip().lower() == AUTO
    return AUTO if is_auto else parse_number(text, "a number of experts per layer, auto or off")


def parse_number(text: str | None, values: str = "numbers of experts per layer, or off") -> int | None:
    """Experts per layer, None for none and "off"; values: what is allowed. Raises InputError."""
    word = OFF if text is None else text.strip().lower()
    if word == OFF:
        return None
    if not word.isdecimal() or len(word) > _DIGITS_MAX or int(word) < 1:
        raise InputError(f'--expert-budget takes {values}, not "{text}".', "Try --expert-budget 16.")
    return int(word)


def expect_no_companions(given: DataclassInstance, value: str) -> None:
    """Raises InputError where one of the options --budget-... was given; value: what --expert-budget takes."""
    names = [
        "--" + field.name.replace("_", "-")
        for field in fields(given)
        if field.name.startswith("budget_") and getattr(given, field.name) is not None
    ]
    if names:
        raise InputError(
            f"{' and '.join(names)} {'needs' if len(names) == 1 else 'need'} an expert budget.",
            f"Add --expert-budget {value}.",
        )


def make_budget(n_experts: int, *, ranking: str | None, policy: str | None) -> ExpertBudget:
    """A budget of `n_experts` per layer; None: the default of that choice. Raises InputError."""
    from moeedge.policies.expert_budget import ExpertBudget

    return ExpertBudget(
        budget=n_experts,
        ranking=ranking or ExpertBudget.ranking,
        coverage=cast("Coverage", policy or ExpertBudget.coverage),
    )
