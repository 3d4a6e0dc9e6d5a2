"""The interactive chat: read a message or a command, answer, show the figures, repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.generation import Generation
from moeedge.engine.session import Session
from moeedge.engine.types import EngineInfo
from moeedge.errors import InputError, MoeedgeError
from moeedge.ui.chat.commands import Next, Turn, run_command
from moeedge.ui.chat.interrupt import Ended, Interrupt
from moeedge.ui.chat.panel import CacheMeter
from moeedge.ui.chat.prompt import unquote
from moeedge.ui.chat.settings import Settings
from moeedge.ui.chat.single import answer_view, print_turn
from moeedge.ui.console import say, show_figures


class Repl:
    """One chat: answers go to `out`, everything else to `err`.

    `read` asks for a message: it raises EOFError on Ctrl-D and KeyboardInterrupt on Ctrl-C.
    """

    def __init__(
        self,
        session: Session,
        conversation: Conversation,
        settings: Settings,
        *,
        read: Callable[[], str],
        out: Console,
        err: Console,
        autosave: Callable[[], Path],
        raw: bool = False,
        panel: bool = True,
        single_turn: bool = False,
    ) -> None:
        self.session = session
        self.conversation = conversation
        self.settings = settings
        self.raw = raw
        self.attached = ""
        self.turns: list[Turn] = []
        self._read = read
        self._out = out
        self._err = err
        self._autosave = autosave
        self._panel = panel
        self._single_turn = single_turn
        self._interrupt = Interrupt()
        self._replaced: str | None = None  # the answer that /regen took back
        self._attempt = 0  # number of earlier answers to the open question

    @property
    def info(self) -> EngineInfo:
        """The session's info with the current draft length."""
        return replace(self.session.info, gamma=self.session.gamma)

    def run(self) -> int:
        """Chat until the user leaves. Returns the exit code: 0, or 128 + the signal that ended it."""
        with self._interrupt:
            try:
                while self._next_message() is not Next.EXIT:
                    pass
            except Ended as ended:
                self._save_on_ending()
                return ended.exit_code
            if self._interrupt.ending:
                self._save_on_ending()
                return self._interrupt.exit_code
        return 0

    def apply(self, settings: Settings) -> None:
        """Apply changed settings, also to the engine."""
        if settings.gamma != self.settings.gamma:
            if self.session.info.draft == "none":
                raise InputError("There is no draft, so speculation stays off.", "Start with -md FILE or -md ngram.")
            self.session.gamma = settings.gamma
        self.settings = settings

    def reopen(self) -> None:
        """Take the last answer back, so that its question is answered anew."""
        self._replaced = self.conversation.reopen()
        self._attempt += 1

    def _next_message(self) -> Next:
        """Read one message or command and carry it out."""
        try:
            line = unquote(self._read())
        except EOFError:
            return Next.EXIT
        except Ended:
            raise
        except KeyboardInterrupt:
            self._say("Use /exit or Ctrl-D to leave.")
            return Next.READ
        try:
            if line.startswith("/"):
                result = run_command(self, line)
                show_figures(self._err, result.table)
                for text in result.lines:
                    self._say(text)
                return self._answer() if result.next is Next.ANSWER else result.next
            if not line and not self.attached:
                return Next.READ
            self.conversation.ask(self.attached + line)
            self.attached, self._replaced, self._attempt = "", None, 0
            return self._answer()
        except (MoeedgeError, ValueError) as error:
            self._say_error(error)
            return Next.READ
        except Ended:
            raise
        except KeyboardInterrupt:  # Ctrl-C before or after the answer must not end the chat
            self.conversation.take_back()
            return Next.READ

    def _answer(self) -> Next:
        """Answer the open question and print the figures; afterwards the conversation has no open question."""
        answer: Generation | None = None
        try:
            prompt = prompt_tokens(self.session.model, self.conversation, raw=self.raw)
            sampling = self.settings.sampling
            if sampling.seed is not None:  # with the same seed /regen would repeat the answer
                sampling = replace(sampling, seed=sampling.seed + self._attempt)
            meter = CacheMeter(self.session)
            self._interrupt.arm()
            try:
                answer = self.session.generate(
                    prompt, n_predict=self.settings.n_predict, sampling=sampling, cancel=self._interrupt
                )
                with answer_view(answer, self.info, meter, self._interrupt, out=self._out, panel=self._panel) as view:
                    for piece in answer.pieces():
                        view.write(piece)
            except Ended:
                raise
            except KeyboardInterrupt:  # Ctrl-C a second time, between two steps
                if answer is not None:
                    answer.close()
            finally:
                self._interrupt.disarm()
            if answer is not None:
                self.turns.append(Turn(answer.stats, answer.stop_reason or "interrupted", meter()))
                print_turn(self._err, answer, self.info, meter)
                self._say("")
        finally:
            self._close_question(answer)
        return Next.EXIT if self._single_turn or self._interrupt.ending else Next.READ

    def _close_question(self, answer: Generation | None) -> None:
        """End the turn: keep the text of the answer, or take the question back if there is none."""
        ended_itself = answer is not None and answer.stop_reason not in (None, "interrupted")
        if answer is not None and (answer.text or ended_itself):
            self.conversation.answer(answer.text)
        elif self._replaced is not None:
            self.conversation.answer(self._replaced)
            self._say("The previous answer stays.")
        else:
            self.conversation.take_back()
            self._say("There is no answer; your message is taken back.")

    def _save_on_ending(self) -> None:
        """After SIGTERM or a closed terminal; saves before it prints, since printing may fail."""
        if not self.conversation.messages:
            return
        path = self._autosave()
        self.conversation.save(path, model=self.info.model)
        self._say(f"Ended by a signal; the conversation is saved: /load {path}")

    def _say(self, text: str) -> None:
        say(self._err, text)

    def _say_error(self, error: Exception) -> None:
        text = f"{error.message} {error.hint}".strip() if isinstance(error, MoeedgeError) else f"{error}."
        say(self._err, text, style="yellow")
