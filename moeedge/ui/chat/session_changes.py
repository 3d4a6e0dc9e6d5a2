"""What changes in the engine while a chat runs: by /set, by another context or model, and where the context is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from moeedge.engine.budgets import usable_budget
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import RESERVED_TOKENS, Session, prepare_answers
from moeedge.errors import InputError
from moeedge.notifications import Notification
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.ui.chat.settings import Settings

FULL = "/clear forgets the conversation, /set ctx N enlarges the context, /set context_shift on drops what is oldest."
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


class Switch(Protocol):
    """Closes a chat's session and opens another one; where that fails, the old one again (SwitchError)."""

    def __call__(self, name: str) -> Session:
        """With the model of that name."""

    def resize(self, n_ctx: int) -> Session:
        """With the same model and a context of so many tokens; 0: as without -c."""


def settings_of(session: Session, settings: Settings) -> Settings:
    """The settings with what a session has that was opened just now."""
    budget = session.info.expert_budget
    return replace(
        settings,
        gamma="auto" if session.info.auto_gamma else session.gamma,
        budget=None if budget is None else budget.budget,
        ctx=session.info.n_ctx,
        context_shift=session.config.context_shift,
    )


class PromptFitter:
    """Makes prompts of a conversation, without its oldest messages where these do not fit and a shift is on."""

    def __init__(self) -> None:
        self._n_left_out = 0  # messages; they stay left out, so that the KV cache stays useful

    def tokens(
        self, session: Session, conversation: Conversation, *, raw: bool, notify: Callable[[str], None]
    ) -> list[int]:
        """The prompt; notify gets a sentence where it becomes shorter. Half of the context is free then."""
        messages, n_ctx = conversation.messages, session.info.n_ctx
        if not session.config.context_shift or len(messages) <= self._n_left_out:
            self._n_left_out = 0
        n = self._n_left_out

        def prompt() -> list[int]:
            rest = Conversation(conversation.system, messages[n:])
            return prompt_tokens(session.model, rest, raw=raw, template=session.template)

        found = prompt()
        if session.config.context_shift and len(found) > n_ctx - RESERVED_TOKENS:
            while len(found) > n_ctx // 2 and n + 2 < len(messages):
                n += 2  # a question and its answer
                found = prompt()
            if n > self._n_left_out:
                notify(f"The context of {n_ctx:,} tokens is full: the model no longer sees the oldest {n} messages.")
            self._n_left_out = n
        return found
