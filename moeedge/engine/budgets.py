"""What a session says about its expert budget: notes, and the keys of JSON records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moeedge.notifications import Level, Notification
from moeedge.policies.expert_budget import ExpertBudget

if TYPE_CHECKING:
    from moeedge.llama.model import ModelInfo
    from moeedge.scheduler.stats import StepRecord


def usable_budget(
    budget: ExpertBudget | None, info: ModelInfo, *, gamma: int, draft: str, n_parallel: int = 1
) -> tuple[ExpertBudget | None, list[Notification]]:
    """The budget as it suits a model, None where it has no experts, and a note for each thing that it does not do.

    gamma: the draft length; draft: the source of drafts, "none" without. n_parallel: texts in a batch. Raises
    InputError for a budget below the experts per token.
    """
    if budget is None:
        return None, []
    if info.n_experts == 0:
        return None, [_warning("The expert budget is off: the model is dense, so it has no experts to leave out.")]
    layers = np.asarray(info.expert_layers, dtype=np.intp)
    used = np.asarray(info.used_per_layer)[layers]
    budgets = budget.per_layer(layers, info.n_layers, info.n_experts, info.used_per_layer)[layers]
    notes = []
    if budgets.min() >= info.n_experts:
        notes.append(_warning(f"The expert budget changes nothing: a layer has only {info.n_experts} experts."))
    elif draft == "none" or gamma == 0:
        missing = "there is no draft (-md FILE or -md ngram)" if draft == "none" else "the draft length is 0"
        notes.append(_warning(f"The expert budget has no effect: it limits verifications of drafts, and {missing}."))
    elif (budgets >= n_parallel * (gamma + 1) * used).all():
        n_tokens = n_parallel * (gamma + 1)
        most = f"{n_tokens} tokens select at most {n_tokens * info.n_expert_used} experts per layer"
        notes.append(_warning(f"The expert budget changes nothing: {most}."))
    return budget, notes


def unmet_budget(record: StepRecord) -> Notification | None:
    """A note where a step's verification, which had a budget, did not keep to it as it was asked for."""
    if record.n_drafted == 0:
        return None
    if record.kept_probability is None:
        return _warning("The expert budget has no effect: moeedge does not recognise the routers of this model.")
    if record.substituted_layers > 0:
        return _warning(
            "Experts are substituted, not truncated: moeedge does not recognise their weights in this model."
        )
    return None


def budget_record(budget: ExpertBudget | None, *, gamma: int) -> dict[str, Any]:
    """The keys about the expert budget in a JSON record: the same in the chat's and in bench's, null without one.

    gamma: the draft length; at 0 the budget is idle.
    """
    if budget is None:
        names = ("budget", "expert_budget", "budget_ranking", "budget_policy")
        return {"lossy": False, **dict.fromkeys(names)}
    return {
        "lossy": gamma > 0,
        "budget": budget.label_at(gamma),
        "expert_budget": budget.budget,
        "budget_ranking": budget.ranking,
        "budget_policy": budget.coverage,
    }


def _warning(text: str) -> Notification:
    return Notification(text, Level.WARNING)
