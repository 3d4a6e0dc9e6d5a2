"""A chat whose context is full, and one that gets a context of another size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import RESERVED_TOKENS, Session
from moeedge.ui.chat.settings import Settings

FULL = "/clear forgets the conversation, /set ctx N enlarges the context, /set context_shift on drops what is oldest."


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
