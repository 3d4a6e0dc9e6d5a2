"""--expert-budget and its companions, parsed to the engine's ExpertBudget."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from moeedge.cli import options
from moeedge.cli.declare import list_of, option
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.notifications import Level, Notification, Notify, ignore

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from moeedge.analysis.expert_ranking import ExpertRanking
    from moeedge.policies.expert_budget import Coverage, ExpertBudget, Ids, Ranking

OFF = "off"
AUTO: Literal["auto"] = "auto"
_FITTED = "fitted"
_DIGITS_MAX = 9  # no model has so many experts
_EXPERTS_OF_TEMPLATE = 1 << 20  # replaced by what auto finds


Budget = Annotated[
    str | None,
    option(
        options.BUDGET,
        "--expert-budget B|auto|off",
        "Verify drafts with at most B experts per layer (MoE-Spec). Lossy: faster, but answers may differ from the "
        "model's own; prompts and single tokens are computed exactly. auto: the fastest budget whose score on a "
        "calibration set stays within one standard deviation. docs/expert-budget.md says when it pays. Default: off.",
        show_default=False,
    ),
]
BudgetList = Annotated[str | None, list_of(Budget)]
BudgetRanking = Annotated[
    str | None,
    option(
        options.BUDGET,
        "--budget-ranking picks|router|static|oracle",
        "Which experts stay: those with the highest routing probability over the batch, of the experts that its tokens "
        "select (picks) or of all experts (router: the paper's), the first of a fixed order (static, from "
        "--budget-file), or those that reproduce the layer's output best (oracle: only in profile --budget-analysis). "
        "Default: picks.",
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
BudgetPreferResident = Annotated[
    float | None,
    option(
        options.BUDGET,
        "--budget-prefer-resident S",
        "An expert on the device stays instead of one whose score is higher by less than S times the range of the "
        "scores, 0 to 1. Default: 0.",
        show_default=False,
    ),
]
BudgetFile = Annotated[
    Path | None,
    option(
        options.BUDGET,
        "--budget-file FILE",
        "The model's ranking, as moeedge profile --save-ranking writes it; for the ranking static and fitted layers.",
        show_default=False,
    ),
]
BudgetLayers = Annotated[
    str | None,
    option(
        options.BUDGET,
        "--budget-layers uniform|fitted",
        "B experts in every layer (uniform), or B on average, with more where the ranking's file shows more to lose "
        "(fitted). Default: uniform.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """How many experts a verification may use per layer, and which."""

    expert_budget: Budget = None
    budget_ranking: BudgetRanking = None
    budget_policy: BudgetPolicy = None
    budget_prefer_resident: BudgetPreferResident = None
    budget_file: BudgetFile = None
    budget_layers: BudgetLayers = None

    def config(self, base: EngineConfig, *, notify: Notify) -> EngineConfig:
        """`base` with the budget that the options ask for; with auto its number of experts is not known yet.

        notify: hears where the ranking is another model's. Raises InputError for values that exclude each other, or
        that cannot be used for answers.
        """
        asked = parse_budget(self.expert_budget)
        if asked is None:
            expect_no_companions(self, "B")
            return base
        if asked == AUTO and self.budget_layers == _FITTED:
            raise InputError(
                "auto looks for one budget for all layers.", "Give --expert-budget B, or leave out fitted."
            )
        # a truncated expert is not computed, which gains more than the smaller number of experts (docs/log.md)
        policy = self.budget_policy or ("truncation" if asked == AUTO else None)
        budget = make_budget(
            _EXPERTS_OF_TEMPLATE if asked == AUTO else asked,
            read_file(
                self.budget_file, base.model, rankings=[self.budget_ranking], layers=[self.budget_layers], notify=notify
            ),
            ranking=self.budget_ranking,
            policy=policy,
            prefer_resident=self.budget_prefer_resident,
            layers=self.budget_layers,
        )
        return replace(base, expert_budget=budget)

    def measured(self, config: EngineConfig, *, notify: Notify) -> EngineConfig:
        """What `config` made, with the number of experts that auto finds, measured where no earlier run did.

        notify: hears that auto measures, and what it chose.
        """
        if config.expert_budget is None or parse_budget(self.expert_budget) != AUTO:
            return config
        from moeedge.bench.budget_search import find_budget

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


def read_file(
    file: Path | None,
    model: Path | None,
    *,
    rankings: Collection[str | None],
    layers: Collection[str | None],
    notify: Notify = ignore,
) -> ExpertRanking | None:
    """The ranking of --budget-file; rankings, layers: the values of these options, one of which must read it.

    model: what it is for, None: not known; notify hears where the file names another one, which may be a copy of it.
    Raises InputError.
    """
    from moeedge.analysis.expert_ranking import read_ranking

    if file is None:
        return None
    if "static" not in rankings and _FITTED not in layers:
        raise InputError(
            "--budget-file is read for the ranking static and for fitted layers only.",
            "Add --budget-ranking static or --budget-layers fitted, or leave it out.",
        )
    found = read_ranking(file)
    if model is not None and found.model != model.name:
        notify(Notification(f"{file} was made with {found.model}, not with {model.name}.", Level.WARNING))
    return found


def make_budget(
    n_experts: int,
    file: ExpertRanking | None,
    *,
    ranking: str | None,
    policy: str | None,
    prefer_resident: float | None,
    layers: str | None,
    order: Ids | None = None,
) -> ExpertBudget:
    """A budget of `n_experts` per layer, as values of the options with these names describe it; None: the default.

    file: the ranking of --budget-file. order: of the ranking static without a file. Raises InputError.
    """
    from moeedge.analysis.expert_ranking import fit_layers
    from moeedge.policies.expert_budget import ExpertBudget

    if ranking == "oracle":
        raise InputError(
            "The oracle ranking computes all experts before it chooses some: it saves nothing.",
            "Use router, picks or static; moeedge profile --budget-analysis compares them with the oracle.",
        )
    if layers not in (None, "uniform", _FITTED):
        raise InputError(f'--budget-layers takes uniform or fitted, not "{layers}".')
    order = order if file is None else file.order
    lacking = ["--budget-ranking static"] if ranking == "static" and order is None else []
    lacking += [f"--budget-layers {_FITTED}"] if layers == _FITTED and file is None else []
    if lacking:
        raise InputError(
            f"{' and '.join(lacking)} need{'s' * (len(lacking) == 1)} the model's ranking.",
            "Write it with moeedge profile --save-ranking FILE, and give --budget-file FILE.",
        )
    return ExpertBudget(
        budget=fit_layers(file, n_experts) if file is not None and layers == _FITTED else n_experts,
        order=order if ranking == "static" else None,
        ranking=cast("Ranking", ranking or ExpertBudget.ranking),
        coverage=cast("Coverage", policy or ExpertBudget.coverage),
        prefer_resident=ExpertBudget.prefer_resident if prefer_resident is None else prefer_resident,
    )
