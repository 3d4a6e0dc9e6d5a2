"""What /set changes in the engine while a chat runs."""

from __future__ import annotations

from dataclasses import replace

from moeedge.engine.budgets import usable_budget
from moeedge.engine.session import Session, prepare_answers
from moeedge.errors import InputError
from moeedge.notifications import Notification
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.ui.chat.settings import Settings

SEED_NOTE = Notification(
    "With automatic draft lengths the same seed may give other answers. /set gamma 4 makes answers repeat."
)


def change_engine(session: Session, old: Settings, settings: Settings, *, raw: bool) -> list[str]:
    """Makes answers follow the new settings. Returns what the user should know about them. Raises InputError."""
    info = session.info
    if settings.gamma != old.gamma:
        if info.draft == "none":
            raise InputError(
                "There is no draft, so speculation stays off.", "Start the chat with -md FILE or -md ngram."
            )
        session.set_draft_length(settings.gamma)
    notes: list[str] = []
    if (settings.gamma, settings.budget) != (old.gamma, old.budget):
        budget, found = usable_budget(
            _budget(session, settings.budget), session.model.info, gamma=session.gamma, draft=info.draft
        )
        notes += found
        # without drafts answers are exact, once what was verified under the budget is out of the KV cache
        if settings.budget != old.budget or (budget is not None and session.gamma == 0):
            session.set_expert_budget(budget)
    if settings.context_shift != old.context_shift:
        session.config = replace(session.config, context_shift=settings.context_shift)
        if settings.context_shift and not session.target.can_shift:
            notes.append("The memory of this model cannot drop single tokens: an answer still ends where it is full.")
    if settings.ignores_seed and not old.ignores_seed:
        notes.append(SEED_NOTE)
    if (settings.sampling.grammar, settings.template) != (old.sampling.grammar, old.template):
        notes += prepare_answers(session, settings.sampling, settings.template, raw=raw)
    return notes


def _budget(session: Session, n_experts: int | None) -> ExpertBudget | None:
    """A budget of `n_experts` per layer, with the ranking and policy that the chat began with."""
    began = session.config.expert_budget
    if n_experts is None:
        return None
    if began is None or session.model.info.n_experts == 0:
        raise InputError(
            "This chat was started without --expert-budget, or its model has no experts.",
            "Start a chat with --expert-budget B.",
        )
    return replace(began, budget=n_experts)
