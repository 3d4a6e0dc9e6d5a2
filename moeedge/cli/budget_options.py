"""--expert-budget and its companions, parsed to the engine's ExpertBudget."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, cast

from moeedge.cli import options
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.notifications import Level, Notification, Notify, ignore
from moeedge.policies.expert_budget import Coverage, ExpertBudget, Ranking

OFF = "off"
AUTO: Literal["auto"] = "auto"
_LAYERS = ("uniform", "fitted")
_DIGITS_MAX = 9  # no model has so many experts
_EXPERTS_OF_TEMPLATE = 1 << 20  # replaced by what auto finds


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """How many experts a verification may use per layer, and which."""

    expert_budget: options.ExpertBudget = None
    budget_ranking: options.BudgetRanking = None
    budget_policy: options.BudgetPolicy = None
    budget_prefer_resident: options.BudgetPreferResident = None
    budget_file: options.BudgetFile = None
    budget_layers: options.BudgetLayers = None

    def config(self, base: EngineConfig, *, notify: Notify) -> EngineConfig:
        """`base` with the budget that the options ask for.

        notify: hears that auto measures, and what it chose. Raises InputError for values that exclude each other, or
        that cannot be used for answers.
        """
        asked = parse_budget(self.expert_budget)
        if asked is None:
            self._expect_no_companion()
            return base
        if asked == AUTO and self.budget_layers == "fitted":
            raise InputError(
                "auto looks for one budget for all layers.", "Give --expert-budget B, or leave out fitted."
            )
        if asked == AUTO:
            from moeedge.bench.budget_search import find_budget

            template = auto_template(
                base.model,
                ranking=self.budget_ranking,
                policy=self.budget_policy,
                prefer_resident=self.budget_prefer_resident,
                file=self.budget_file,
                notify=notify,
            )
            return replace(base, expert_budget=find_budget(base, template, notify=notify))
        budget = make_budget(
            asked,
            base.model,
            ranking=self.budget_ranking,
            policy=self.budget_policy,
            prefer_resident=self.budget_prefer_resident,
            file=self.budget_file,
            layers=self.budget_layers,
            notify=notify,
        )
        return replace(base, expert_budget=budget)

    def _expect_no_companion(self) -> None:
        given = [
            "--" + field.name.replace("_", "-")
            for field in fields(self)
            if field.name != "expert_budget" and getattr(self, field.name) is not None
        ]
        if given:
            raise InputError(
                f"{' and '.join(given)} {'needs' if len(given) == 1 else 'need'} an expert budget.",
                "Add --expert-budget B.",
            )


def auto_template(
    model: Path,
    *,
    ranking: str | None,
    policy: str | None,
    prefer_resident: float | None,
    file: Path | None,
    notify: Notify,
) -> ExpertBudget:
    """What auto looks for a number of experts for; None: the default, but truncation.

    A truncated expert is not computed, which gains more than the smaller number of experts (docs/log.md).
    """
    return make_budget(
        _EXPERTS_OF_TEMPLATE,
        model,
        ranking=ranking,
        policy=policy or "truncation",
        prefer_resident=prefer_resident,
        file=file,
        notify=notify,
    )


def parse_budget(text: str | None) -> int | Literal["auto"] | None:
    """A value of --expert-budget: experts per layer, "auto", or None for none and "off". Raises InputError."""
    word = OFF if text is None else text.strip().lower()
    if word == OFF:
        return None
    if word == AUTO:
        return AUTO
    if not word.isdecimal() or len(word) > _DIGITS_MAX or int(word) < 1:
        raise InputError(
            f'--expert-budget takes a number of experts per layer, auto or off, not "{text}".',
            "Try --expert-budget 16.",
        )
    return int(word)


def make_budget(
    n_experts: int,
    model: Path,
    *,
    ranking: str | None = None,
    policy: str | None = None,
    prefer_resident: float | None = None,
    file: Path | None = None,
    layers: str | None = None,
    notify: Notify = ignore,
) -> ExpertBudget:
    """A budget of `n_experts` per layer, as values of the options with these names describe it; None: the default.

    model: what the budget is for; notify hears where `file` names another one, which may be a copy of it. Raises
    InputError.
    """
    from moeedge.analysis.expert_ranking import fit_layers, read_ranking

    if ranking == "oracle":
        raise InputError(
            "The oracle ranking computes all experts before it chooses some: it saves nothing.",
            "Use router, picks or static; moeedge profile --budget-analysis compares them with the oracle.",
        )
    if layers not in (None, *_LAYERS):
        raise InputError(f'--budget-layers takes uniform or fitted, not "{layers}".')
    readers = [name for name, reads in (("static", ranking == "static"), ("fitted", layers == "fitted")) if reads]
    if file is None and readers:
        raise InputError(
            f"{' and '.join(readers)} need{'s' * (len(readers) == 1)} the model's ranking.",
            "Write it with moeedge profile --save-ranking FILE, and give --budget-file FILE.",
        )
    if file is not None and not readers:
        raise InputError(
            "--budget-file is read for the ranking static and for fitted layers only.",
            "Add --budget-ranking static or --budget-layers fitted, or leave it out.",
        )
    rank = None if file is None else read_ranking(file)
    if rank is not None and rank.model != model.name:
        notify(Notification(f"{file} was made with {rank.model}, not with {model.name}.", Level.WARNING))
    return ExpertBudget(
        budget=fit_layers(rank, n_experts) if rank is not None and layers == "fitted" else n_experts,
        order=rank.order if rank is not None and ranking == "static" else None,
        ranking=cast(Ranking, ranking or ExpertBudget.ranking),
        coverage=cast(Coverage, policy or ExpertBudget.coverage),
        prefer_resident=ExpertBudget.prefer_resident if prefer_resident is None else prefer_resident,
    )
