"""A chat between two answers: its session, which /set and /model change, its conversation and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

from rich.console import Console

from moeedge.engine.autosave import Autosave, Origin, UnfinishedChat, take_over
from moeedge.engine.context_choice import usable_budget
from moeedge.engine.conversation import Conversation, Message, prompt_tokens
from moeedge.engine.layer_search import open_session
from moeedge.engine.session import RESERVED_TOKENS, Session, prepare_answers
from moeedge.engine.types import EngineConfig, EngineInfo
from moeedge.errors import InputError, MoeedgeError
from moeedge.run import Notification, Run
from moeedge.ui.chat.greeting import experts_line, warnings_of
from moeedge.ui.chat.interrupt import Ended
from moeedge.ui.chat.settings import Settings, restored, saved_settings
from moeedge.ui.console import say
from moeedge.ui.figures import Turn

FULL = "/clear forgets the conversation, /set ctx N enlarges the context, /set context_shift on drops what is oldest."
SEED_NOTE = Notification(
    "With automatic draft lengths the same seed may give other answers. /set gamma 4 makes answers repeat."
)


def change_engine(session: Session, old: Settings, settings: Settings, *, raw: bool) -> list[str]:
    """Makes answers follow the new settings. Returns what the user should know about them. Raises InputError."""
    info = session.info
    if settings.gamma != old.gamma:
        if info.draft == "none":
            hint = "Start the chat with -md FILE or -md ngram."
            raise InputError("There is no draft, so speculation stays off.", hint)
        session.set_draft_length(settings.gamma)
    notes: list[str] = []
    if settings.gamma not in (old.gamma, "auto", session.gamma):
        notes.append(f"Drafts are limited to {session.gamma} tokens: the chat was opened for no more.")
    if (settings.gamma, settings.budget) != (old.gamma, old.budget):
        budget, kind = session.config.expert_budget, session.model.info  # as the chat began
        if settings.budget is not None and (budget is None or kind.n_experts == 0):
            reason = "This chat was started without --expert-budget, or its model has no experts."
            raise InputError(reason, "Start a chat with --expert-budget B.")
        wanted = None if budget is None or settings.budget is None else replace(budget, budget=settings.budget)
        budget, more = usable_budget(wanted, kind, gamma=session.gamma, draft=info.draft)
        notes += more
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


class SwitchError(MoeedgeError):
    """Another model could not be opened; the old one is open again."""


class ModelSwitch:
    """Opens a session, and another in its place when it is called with a name that `configure` understands."""

    def __init__(self, config: EngineConfig, configure: Callable[[str], EngineConfig], run: Run) -> None:
        self._config, self._configure, self._run = config, configure, run
        self.session = open_session(config, run=run)

    def __enter__(self) -> ModelSwitch:
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()

    def __call__(self, name: str) -> Session:
        """Opens the model of that name. Raises MoeedgeError if it is not here, SwitchError if it cannot be opened."""
        if self._config.expert_budget is not None:
            reason = "An expert budget belongs to the model that the chat began with."
            raise InputError(reason, "Start another chat with -m.")
        config = self._configure(name)
        if not config.model.exists():
            raise InputError(f"There is no model {name} here.", "moeedge list shows the names, moeedge pull downloads.")
        return self._replace(config)

    def resize(self, n_ctx: int) -> Session:
        """A session with the same model and a context of so many tokens (0: as without -c), as a call opens it."""
        return self._replace(replace(self._config, n_ctx=n_ctx))

    def _replace(self, config: EngineConfig) -> Session:
        self.session.close()
        try:
            self.session = open_session(config, run=self._run)
        except Ended:  # the program ends
            raise
        except (MoeedgeError, ValueError, KeyboardInterrupt) as error:
            self.session = open_session(self._config, run=self._run)
            stopped = isinstance(error, KeyboardInterrupt)
            message = error.message if isinstance(error, MoeedgeError) else "Stopped." if stopped else f"{error}."
            raise SwitchError(message, getattr(error, "hint", "")) from None
        self._config = config
        return self.session


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


def origin_of(session: Session, *, raw: bool) -> Origin:
    return Origin(session.info.model, session.model.info.size_bytes, raw)


@dataclass(eq=False)
class Chat:
    """A chat between two answers, as commands read and change it.

    read: asks for a message, given the text to begin with; it raises EOFError on Ctrl-D and KeyboardInterrupt on
    Ctrl-C. err: takes all output but answers. folder: where the chat is kept while it goes on; None: it is not saved.
    unfinished: chats that /resume can take over, the newest first.
    """

    session: Session
    conversation: Conversation
    settings: Settings
    _: KW_ONLY
    read: Callable[[str], str]
    err: Console
    switch: ModelSwitch
    folder: Callable[[], Path] | None = None
    unfinished: list[UnfinishedChat] = field(default_factory=list)
    raw: bool = False
    attached: str = field(default="", init=False)  # text of /read, put before the next message
    turns: list[Turn] = field(default_factory=list, init=False)
    begun: list[int] = field(default_factory=list, init=False)  # tokens of an answer that was cut off: it goes on
    attempt: int = field(default=0, init=False)  # number of earlier answers to the open question
    # the last question, in the prompt to be changed; the answer that /regen took back, or that was cut off
    edited: str | None = field(default=None, init=False)
    replaced: str | None = field(default=None, init=False)
    # conversation, tokens of the context, messages that stay left out, so that the KV cache stays useful
    _left_out: tuple[Conversation | None, int, list[Message]] = field(default=(None, 0, []), init=False)
    _as_opened: Settings = field(init=False)  # before any /set
    _save_failed: bool = field(default=False, init=False)  # and the user was told

    def __post_init__(self) -> None:
        self.settings = self._as_opened = settings_of(self.session, self.settings)
        self.autosave = Autosave(self.folder, origin_of(self.session, raw=self.raw))

    @property
    def info(self) -> EngineInfo:
        """The session's info with the current draft length."""
        session = self.session
        return replace(session.info, gamma=session.gamma, auto_gamma=session.governor is not None)

    def prompt(self) -> list[int]:
        """The tokens of the conversation, with a shift without its oldest messages once they fill the context."""
        session, messages, n_ctx = self.session, self.conversation.messages, self.session.info.n_ctx
        shifts = session.config.context_shift
        of, *before = self._left_out
        n = len(self._left_out[2])
        if not shifts or of is not self.conversation or len(messages) <= n or before != [n_ctx, messages[:n]]:
            n = 0
        n_before = n

        def tokens() -> list[int]:
            rest = Conversation(self.conversation.system, messages[n:])
            return prompt_tokens(session.model, rest, raw=self.raw, template=session.template)

        prompt = tokens()
        if shifts and len(prompt) > n_ctx - RESERVED_TOKENS:
            while len(prompt) > n_ctx // 2 and n + 2 < len(messages):
                n += 2  # a question and its answer
                prompt = tokens()
            if n > n_before:
                self.say(f"The context of {n_ctx:,} tokens is full: the model no longer sees the oldest {n} messages.")
        self._left_out = self.conversation, n_ctx, messages[:n]
        return prompt

    def apply(self, settings: Settings) -> list[str]:
        """Apply changed settings, also to the engine. Returns what the user should know about them."""
        if settings.ctx != self.settings.ctx:
            return self._resize(settings)
        lines = change_engine(self.session, self.settings, settings, raw=self.raw)
        if settings.gamma not in (self.settings.gamma, "auto"):
            settings = replace(settings, gamma=self.session.gamma)
        self.settings = settings
        return lines

    def _resize(self, settings: Settings) -> list[str]:
        """Go on with a context of another size, and with these settings; the conversation is read again."""
        self._reopen(lambda: self.switch.resize(settings.ctx), f"The context keeps {self.settings.ctx:,} tokens.")
        self._follow(settings)
        what = f"The context has {self.settings.ctx:,} tokens. The conversation is read again with the next message."
        return [what, *warnings_of(self.session.info)]

    def _reopen(self, opened: Callable[[], Session], else_text: str) -> None:
        """Go on with another session. Raises InputError, ending in `else_text`, where the old one was opened again."""
        try:
            self.session = opened()
        except SwitchError as error:
            self.session = self.switch.session
            self._follow(self.settings)
            raise InputError(f"{error.message} {else_text}", error.hint) from None

    def _follow(self, settings: Settings) -> None:
        """Makes a session that was opened just now follow the settings, but for the size of its context."""
        opened = settings_of(self.session, settings)
        settings = replace(settings, ctx=opened.ctx)
        change_engine(self.session, opened, settings, raw=self.raw)
        self.settings = self._prepared(settings)

    def resume(self, chat: UnfinishedChat) -> list[str]:
        """Take over a chat that ended unexpectedly. Returns what is new to the user; an open question is answered next.

        Raises InputError if there is a conversation, which would be lost, or if another process has the chat.
        """
        if self.conversation.messages:
            hint = "Keep it with /save FILE, then /clear and /resume."
            raise InputError("/resume would replace this conversation.", hint)
        before = self.conversation.system, self.settings
        take_over(chat, lambda: self._adopt(chat))
        self.unfinished.remove(chat)
        lines = []
        changed = ("gamma", "budget", "look", "ctx", "context_shift")  # by options and /set, not by the chat
        defaults = Settings(**{name: getattr(self.settings, name) for name in changed})
        if restored(chat.settings, self.settings) is self.settings:
            lines.append("Its settings cannot be read: those of this chat stay.")
        elif before not in ((self.conversation.system, self.settings), ("", defaults)):
            lines.append("Its own system prompt and settings apply; /system and /set change them.")
        if self.settings.ignores_seed and not before[1].ignores_seed:
            lines.append(SEED_NOTE)
        return lines

    def confirm(self, question: str) -> bool:
        """Ask the user; only yes is yes."""
        self.say(f"{question} y or n:")
        try:
            return self.read("").strip().lower() in ("y", "yes")
        except Ended:
            raise
        except (EOFError, KeyboardInterrupt):
            return False

    def use_model(self, name: str) -> list[str]:
        """Go on with another model, the conversation kept. Raises MoeedgeError, and the old one stays."""
        self._reopen(lambda: self.switch(name), f"{self.info.model} stays.")
        info, before = self.session.info, self.settings
        self.settings = self._prepared(settings_of(self.session, before))
        lines = self.apply(replace(self.settings, context_shift=before.context_shift))
        was_set = [name for name in ("gamma", "ctx") if getattr(before, name) != getattr(self._as_opened, name)]
        self._as_opened = self.settings
        if was_set:
            lines.append(f"No longer as /set: {' and '.join(was_set)}.")
        self.begun = []
        self.autosave.begin_anew(origin_of(self.session, raw=self.raw))
        return [f"Model: {info.model}.", experts_line(info), *warnings_of(info), *lines]

    def _adopt(self, chat: UnfinishedChat) -> bool:
        """Make `chat` the conversation; whether it is saved."""
        saved = chat.conversation
        self.conversation = replace(saved, messages=list(saved.messages), budgets=list(saved.budgets))
        self.settings = self._prepared(restored(chat.settings, self.settings))
        self.attempt, self.replaced = 0, chat.text or None
        is_known = all(0 <= token < self.session.model.info.n_vocab for token in chat.tokens)
        self.begun = chat.tokens if chat.origin == origin_of(self.session, raw=self.raw) and is_known else []
        self.keep()
        if self.begun:
            self.autosave.add_step(chat.text, self.begun)
        return self.autosave.is_saving

    def _prepared(self, settings: Settings) -> Settings:
        """The settings of a saved chat, without a template or a grammar that this model cannot use."""
        current = self.settings
        for usable in (settings, replace(settings, template=current.template), replace(current, look=settings.look)):
            try:
                prepare_answers(self.session, usable.sampling, usable.template, raw=self.raw)
                return usable
            except InputError:
                continue
        return current

    def keep(self) -> None:
        """Save what has changed; a failure is reported once."""
        self.autosave.update(self.conversation, saved_settings(self.settings))
        if self.autosave.warning and not self._save_failed:
            self._save_failed = True
            say(self.err, self.autosave.warning, style="yellow")

    def say(self, text: str) -> None:
        say(self.err, text)
