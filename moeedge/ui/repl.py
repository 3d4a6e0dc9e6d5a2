"""The interactive chat: read a message or command, answer, show the figures, again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from moeedge.engine.conversation import Conversation
from moeedge.engine.session import Session
from moeedge.engine.turn import Answer, prompt_tokens
from moeedge.engine.types import EngineInfo
from moeedge.errors import InputError, MoeedgeError
from moeedge.ui.cache_meter import CacheMeter
from moeedge.ui.commands import Next, Turn, run_command
from moeedge.ui.console import say, show_figures, typing_hidden
from moeedge.ui.figures import join_parts, turn_parts
from moeedge.ui.interrupt import Ended, Interrupt
from moeedge.ui.prompt import unquote
from moeedge.ui.settings import Settings
from moeedge.ui.stream import open_view


class Repl:
    """One chat. Answers go to `out`; everything else, the figures too, to `err`.

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
        self._current: Answer | None = None
        self._attempt = 0  # how often the open question was answered before

    @property
    def info(self) -> EngineInfo:
        """What is loaded, with the draft length as it is now."""
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
        """Take over changed settings, the engine's included."""
        if settings.gamma != self.settings.gamma:
            if self.session.info.draft == "none":
                raise InputError("There is no draft: speculation stays off.", "Start with -md FILE or -md ngram.")
            self.session.gamma = settings.gamma
        self.settings = settings

    def reopen(self) -> None:
        """Take the last answer back, so that its question is answered anew."""
        self._replaced = self.conversation.reopen()
        self._attempt += 1

    def _next_message(self) -> Next:
        """Read one message or command and do what it asks."""
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
        except KeyboardInterrupt:  # Ctrl-C beside the answer, in front of it or behind it, must not end the chat
            self.conversation.take_back()
            return Next.READ

    def _answer(self) -> Next:
        """Answer the open question; whatever happens, the conversation ends with an answer."""
        self._current = None
        try:
            prompt = prompt_tokens(self.session.model, self.conversation, raw=self.raw)
            self._generate(prompt)
        finally:
            self._close_question()
        return Next.EXIT if self._single_turn or self._interrupt.ending else Next.READ

    def _generate(self, prompt: list[int]) -> None:
        """Stream one answer and its figures."""
        sampling = self.settings.sampling
        if sampling.seed is not None:  # /regen with a fixed seed would say the same again
            sampling = replace(sampling, seed=sampling.seed + self._attempt)
        meter = CacheMeter(self.session)
        self._interrupt.arm()
        try:
            answer = self._current = Answer(
                self.session, prompt, n_predict=self.settings.n_predict, sampling=sampling, cancel=self._interrupt
            )
            view = open_view(
                self._out,
                self.info,
                lambda: answer.stats,
                stopping=self._interrupt,
                cache=meter,
                panel=self._panel,
            )
            with meter, typing_hidden(), view:
                for piece in answer:
                    view.write(piece)
        except Ended:
            raise
        except KeyboardInterrupt:  # Ctrl-C a second time, between two steps
            if self._current is not None:
                self._current.close()
        finally:
            self._interrupt.disarm()
        if self._current is not None:
            turn = Turn(self._current.stats, self._current.stop_reason or "interrupted", meter())
            self.turns.append(turn)
            parts = turn_parts(self.info, turn.stats, turn.stop_reason, turn.cache)
            self._say(join_parts(parts, columns=self._err.width if self._err.is_terminal else None))
            for note in dict.fromkeys(self._current.notes):  # once, however often the context was shifted
                self._say(note)
            for note in meter.notes:
                say(self._err, note, style="yellow")
            self._say("")

    def _close_question(self) -> None:
        """End the turn: keep what was said, or take the question back when nothing was."""
        answer = self._current
        ended_itself = answer is not None and answer.stop_reason not in (None, "interrupted")
        if answer is not None and (answer.text or ended_itself):
            self.conversation.answer(answer.text)
        elif self._replaced is not None:
            self.conversation.answer(self._replaced)
            self._say("The answer before stays.")
        else:
            self.conversation.take_back()
            self._say("Nothing was answered; your message is taken back.")

    def _save_on_ending(self) -> None:
        """SIGTERM or a closed terminal: save first, for saying so may fail."""
        if not self.conversation.messages:
            return
        path = self._autosave()
        self.conversation.save(path, model=self.info.model)
        self._say(f"Ended by a signal; the conversation is saved: /load {path}")

    def _say(self, text: str) -> None:
        say(self._err, text)

    def _say_error(self, error: Exception) -> None:
        text = f"{error.message} {error.mend}".strip() if isinstance(error, MoeedgeError) else f"{error}."
        say(self._err, text, style="yellow")
