"""The interactive chat: read a message or a command, answer, show the figures, repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console

from moeedge.engine.answer import Generation
from moeedge.engine.autosave import Autosave, Origin, UnfinishedChat, take_over
from moeedge.engine.conversation import Conversation, Message
from moeedge.engine.session import Session, prepare_answers
from moeedge.engine.types import EngineInfo
from moeedge.errors import ContextTooSmallError, InputError, MoeedgeError
from moeedge.ui import figures
from moeedge.ui.chat import greeting
from moeedge.ui.chat.commands import LEAVING, Next, Turn, last_messages, run_command
from moeedge.ui.chat.interrupt import HANGUP, Ended, Interrupt
from moeedge.ui.chat.panel import CacheMeter
from moeedge.ui.chat.prompt import unquote
from moeedge.ui.chat.session_changes import FULL, SEED_NOTE, PromptFitter, Switch, change_engine, settings_of
from moeedge.ui.chat.settings import Settings, restored, saved_settings
from moeedge.ui.chat.single import answer_view, print_turn
from moeedge.ui.console import say, show_figures, terminal_is_gone


class SwitchError(MoeedgeError):
    """Another model could not be opened; `session` has the old one again."""

    def __init__(self, message: str, hint: str, session: Session) -> None:
        super().__init__(message, hint)
        self.session = session


def origin_of(session: Session, *, raw: bool) -> Origin:
    """What a chat with this session is held with."""
    return Origin(session.info.model, session.model.info.size_bytes, raw)


class Repl:
    """One chat: answers go to `out`, everything else to `err`.

    `read` asks for a message, given the text to begin with: it raises EOFError on Ctrl-D and KeyboardInterrupt on
    Ctrl-C. switch: None: the session stays. autosave: keeps the chat on disk while it goes on; None: it is not saved.
    unfinished: chats that /resume can take over, the newest first.
    """

    def __init__(
        self,
        session: Session,
        conversation: Conversation,
        settings: Settings,
        *,
        read: Callable[[str], str],
        out: Console,
        err: Console,
        switch: Switch | None = None,
        autosave: Autosave | None = None,
        unfinished: Sequence[UnfinishedChat] = (),
        raw: bool = False,
        panel: bool = True,
        single_turn: bool = False,
    ) -> None:
        self.session = session
        self.conversation = conversation
        self.settings = replace(settings, ctx=session.info.n_ctx, context_shift=session.config.context_shift)
        self.raw = raw
        self.attached = ""
        self.unfinished = list(unfinished)
        self.turns: list[Turn] = []
        self._read = read
        self._switch = switch
        self._fitter = PromptFitter()
        self._edited: str | None = None  # the last question, in the prompt to be changed
        self._before_edit: list[Message] = []  # the last question and answer, which come back if there is no new answer
        self._out = out
        self._err = err
        self._autosave = autosave
        self._save_failed = False  # and the user was told
        self._origin = origin_of(session, raw=raw)
        self._panel = panel
        self._single_turn = single_turn
        self._interrupt = Interrupt()
        self._replaced: str | None = None  # the answer that /regen took back, or that was cut off
        self._begun: list[int] = []  # tokens of an answer that was cut off: it goes on after them
        self._attempt = 0  # number of earlier answers to the open question

    @property
    def info(self) -> EngineInfo:
        """The session's info with the current draft length."""
        session = self.session
        return replace(session.info, gamma=session.gamma, auto_gamma=session.governor is not None)

    def run(self, first_line: str | None = None) -> int:
        """Chat until the user leaves. Returns the exit code: 0, or 128 + the signal that ended it.

        first_line: carried out before the first one is read.
        """
        with self._interrupt:
            try:
                self._talk(first_line)
            except Ended as ended:
                return self._end_by_signal(ended.exit_code)
            if self._interrupt.ending:
                return self._end_by_signal(self._interrupt.exit_code)
        if self._autosave is not None:
            self._autosave.close()
        return 0

    def _talk(self, first_line: str | None) -> None:
        """Obey commands and answer messages until one of them ends the chat. Raises Ended."""
        try:
            result = Next.READ if first_line is None else self._carry_out(first_line)
            while result is not Next.EXIT:
                result = self._next_message()
        except OSError:
            if terminal_is_gone():  # reading or writing failed before SIGHUP came
                raise Ended(HANGUP) from None
            raise

    def apply(self, settings: Settings) -> list[str]:
        """Apply changed settings, also to the engine. Returns what the user should know about them."""
        if settings.ctx != self.settings.ctx:
            return self._resize(settings)
        lines = change_engine(self.session, self.settings, settings, raw=self.raw)
        self.settings = settings
        return lines

    def _resize(self, settings: Settings) -> list[str]:
        """Go on with a context of another size, and with these settings; the conversation is read again."""
        if self._switch is None:
            raise InputError("This chat cannot change its context.", "Start one with -c N.")
        failed: SwitchError | None = None
        try:
            self.session = self._switch.resize(settings.ctx)
        except SwitchError as error:
            self.session, settings, failed = error.session, self.settings, error
        opened = settings_of(self.session, settings)
        settings = replace(settings, ctx=opened.ctx)
        change_engine(self.session, opened, settings, raw=self.raw)
        self.settings = self._prepared(settings)
        if failed is not None:
            raise InputError(f"{failed.message} The context keeps {settings.ctx:,} tokens.", failed.hint)
        what = f"The context has {settings.ctx:,} tokens. The conversation is read again with the next message."
        return [what, *greeting.warnings_of(self.session.info)]

    def reopen(self) -> None:
        """Take the last answer back, so that its question is answered anew."""
        self._replaced = self.conversation.reopen()
        self._attempt += 1

    def resume(self, chat: UnfinishedChat) -> list[str]:
        """Take over a chat that ended unexpectedly. Returns how it goes on; an open question is answered next.

        Raises InputError if there is a conversation, which would be lost, or if another process has the chat.
        """
        if self.conversation.messages:
            raise InputError(
                "/resume would replace this conversation.", "Keep it with /save FILE, then /clear and /resume."
            )
        before = self.conversation.system, self.settings
        take_over(chat, lambda: self._adopt(chat))
        self.unfinished.remove(chat)
        lines = []
        changed = ("gamma", "budget", "look", "ctx", "context_shift")  # by options and /set, not by the chat
        defaults = Settings(**{name: getattr(self.settings, name) for name in changed})
        if before not in ((self.conversation.system, self.settings), ("", defaults)):
            lines.append("Its own system prompt and settings apply; /system and /set change them.")
        if self.settings.ignores_seed and not before[1].ignores_seed:
            lines.append(SEED_NOTE)
        lines += last_messages(self.conversation.messages)
        if not self.conversation.has_question:
            return [*lines, "The last answer is complete."]
        return [*lines, "The last answer goes on." if self._begun else "The last message is answered now."]

    def edit(self, text: str) -> None:
        """Put `text` into the prompt; what is sent then replaces the last question, and is answered anew."""
        self._edited = text

    def confirm(self, question: str) -> bool:
        """Ask the user; only yes is yes."""
        self._say(f"{question} y or n:")
        try:
            return self._read("").strip().lower() in ("y", "yes")
        except EOFError:
            return False

    def use_model(self, name: str) -> list[str]:
        """Go on with another model, the conversation kept. Raises MoeedgeError, and the old one stays."""
        if self._switch is None:
            raise InputError("This chat cannot change its model.", "Start one with -m.")
        try:
            self.session = self._switch(name)
        except SwitchError as error:
            self.session = error.session
            raise InputError(f"{error.message} {self.info.model} stays.", error.hint) from None
        self._origin = origin_of(self.session, raw=self.raw)
        info, before = self.session.info, self.settings
        self.settings = self._prepared(settings_of(self.session, before))
        lines = self.apply(replace(self.settings, context_shift=before.context_shift))
        self._begun = []
        if self._autosave is not None:
            self._autosave.begin_anew(self._origin)
        return [f"Model: {info.model}.", greeting.experts_line(info), *greeting.warnings_of(info), *lines]

    def _adopt(self, chat: UnfinishedChat) -> bool:
        """Make `chat` the conversation; whether it is saved."""
        self.conversation.system = chat.conversation.system
        self.conversation.messages = list(chat.conversation.messages)
        self.conversation.budgets = list(chat.conversation.budgets)
        self.settings = self._prepared(restored(chat.settings, self.settings))
        self._attempt = 0
        self._replaced = chat.text or None
        is_known = all(0 <= token < self.session.model.info.n_vocab for token in chat.tokens)
        self._begun = chat.tokens if chat.origin == self._origin and is_known else []
        self._keep()
        if self._autosave is None:
            return False
        if self._begun:
            self._autosave.add_step(chat.text, self._begun)
        return self._autosave.is_saving

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

    def _keep(self) -> None:
        """Save what has changed; a failure is reported once."""
        if self._autosave is not None:
            self._autosave.update(self.conversation, saved_settings(self.settings))
            if self._autosave.warning and not self._save_failed:
                self._save_failed = True
                say(self._err, self._autosave.warning, style="yellow")

    def _next_message(self) -> Next:
        """Read one message or command and carry it out."""
        edited, self._edited = self._edited, None
        try:
            line = unquote(self._read(edited or ""))
        except EOFError:
            if terminal_is_gone():  # before SIGHUP says so
                raise Ended(HANGUP) from None
            return Next.EXIT
        except Ended:
            raise
        except KeyboardInterrupt:
            self._say("The message stays as it was." if edited else "Use /exit or Ctrl-D to leave.")
            return Next.READ
        if edited and line.strip() and not line.startswith("/"):
            self._before_edit = self.conversation.messages[-2:]
            self.conversation.undo()
        return self._carry_out(line)

    def _carry_out(self, line: str) -> Next:
        """Obey a command, or answer a message."""
        try:
            self.session.watch_memory()
            if line.startswith("/"):
                result = run_command(self, line)
                if (
                    result.next is not Next.ANSWER
                ):  # the answer that /regen took back stays on disk until there is another
                    self._keep()
                show_figures(self._err, result.table)
                for text in result.lines:
                    self._say(text)
                return self._answer() if result.next is Next.ANSWER else result.next
            if not line and not self.attached:
                return Next.READ
            if line.lower() in LEAVING and not self.attached:
                return Next.EXIT
            self.conversation.ask(self.attached + line)
            self.attached, self._replaced, self._attempt = "", None, 0
            self._keep()
            return self._answer()
        except (MoeedgeError, ValueError) as error:
            if self.session.target.is_closed:  # a GPU failed, and the CPU could not take over: the chat stays on disk
                raise
            self._say_error(error)
            return Next.READ
        except Ended:
            raise
        except KeyboardInterrupt:  # Ctrl-C before or after the answer must not end the chat
            if self.session.target.is_closed:  # a second one, while /model or /set ctx opened the old one again
                raise
            self.conversation.take_back()
            return Next.READ

    def _answer(self) -> Next:
        """Answer the open question and print the figures; afterwards the conversation has no open question."""
        answer: Generation | None = None
        begun, self._begun = self._begun, []
        try:
            prompt = self._fitter.tokens(self.session, self.conversation, raw=self.raw, notify=self._say)
            sampling = self.settings.sampling
            if sampling.seed is not None:  # with the same seed /regen would repeat the answer
                sampling = replace(sampling, seed=sampling.seed + self._attempt)
            meter = CacheMeter(self.session)
            self._interrupt.arm()
            try:
                answer = self.session.generate(
                    prompt, n_predict=self.settings.n_predict, sampling=sampling, cancel=self._interrupt, begun=begun
                )
                self.conversation.note_budget(figures.budget(self.info) if self.session.gamma > 0 else "")
                if begun:
                    self._keep()
                with answer_view(
                    answer,
                    self.info,
                    meter,
                    self._interrupt,
                    out=self._out,
                    look=self.settings.look,
                    panel=self._panel,
                    drop_typing=True,
                ) as view:
                    n_saved = len(begun)  # tokens
                    for piece in answer.pieces():
                        if self._autosave is not None and len(answer.tokens) > n_saved:
                            if n_saved == 0:
                                self._keep()
                            self._autosave.add_step(piece, answer.tokens[n_saved:])
                            n_saved = len(answer.tokens)
                        view.write(piece)
            except Ended:
                raise
            except KeyboardInterrupt:  # Ctrl-C a second time, between two steps
                if answer is not None:
                    answer.close()
            finally:
                self._interrupt.disarm()
            if answer is not None:
                self.turns.append(Turn(answer.stats, answer.stop_reason or "interrupted", self.info, meter()))
                print_turn(self._err, answer, self.info, meter, self.settings.look, full=FULL)
                self._say("")
                if answer.stop_reason != "interrupted":
                    self._measure_postponed()
        finally:
            self._close_question(answer)
        return Next.EXIT if self._single_turn or self._interrupt.ending else Next.READ

    def _measure_postponed(self) -> None:
        """Measure what was left for after the first answer; Ctrl-C leaves it for after the next."""
        self._interrupt.arm()
        try:
            self.session.measure_postponed(self._interrupt)
        finally:
            self._interrupt.disarm()

    def _close_question(self, answer: Generation | None) -> None:
        """End the turn: keep the text of the answer, or take the question back if there is none.

        Where the program ends in mid-answer the question stays open: /resume goes on after the tokens on disk.
        """
        ended_itself = answer is not None and answer.stop_reason not in (None, "interrupted")
        if not ended_itself and (self._interrupt.ending or self.session.target.is_closed or terminal_is_gone()):
            return
        before, self._before_edit = self._before_edit, []
        if answer is not None and (answer.text or ended_itself):
            self.conversation.answer(answer.text)
        elif self._replaced is not None:
            self.conversation.answer(self._replaced)
            self._say("The previous answer stays.")
        else:
            self.conversation.take_back()
            self.conversation.messages += before
            end = "The earlier one and its answer stay." if before else "It is not part of the conversation."
            self._say(f"Your message got no answer. {end}")
        self._keep()

    def _end_by_signal(self, exit_code: int) -> int:
        """After SIGTERM or a closed terminal: the chat stays on disk."""
        self._interrupt.finish()
        if self._autosave is not None:
            is_saved = self._autosave.is_saving and bool(self.conversation.messages)
            self._autosave.close(keep=bool(self.conversation.messages))
            if is_saved:
                self._say("moeedge was ended by a signal. The chat is saved: moeedge chat --resume goes on with it.")
            elif self._autosave.warning:
                self._say(self._autosave.warning)
        return exit_code

    def _say(self, text: str) -> None:
        say(self._err, text)

    def _say_error(self, error: Exception) -> None:
        text = f"{error.message} {error.hint}".strip() if isinstance(error, MoeedgeError) else f"{error}."
        if isinstance(error, ContextTooSmallError) and self.conversation.messages:
            text = f"{error.message} {FULL}"
        say(self._err, text, style="yellow")
