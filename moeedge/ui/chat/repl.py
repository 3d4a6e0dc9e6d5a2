"""The interactive chat: read a message or command, answer, show the figures, again.

What is said before the first prompt: what was loaded, where it runs, and why something is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from moeedge.engine.conversation import Answer, Conversation, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineInfo
from moeedge.errors import InputError, MoeedgeError
from moeedge.ui import figures
from moeedge.ui.chat.commands import Next, Turn, run_command
from moeedge.ui.chat.interrupt import Ended, Interrupt
from moeedge.ui.chat.panel import CacheMeter
from moeedge.ui.chat.prompt import unquote
from moeedge.ui.chat.settings import Settings
from moeedge.ui.chat.stream import open_view
from moeedge.ui.console import say, show_figures, typing_hidden
from moeedge.ui.figures import join_parts, turn_parts


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
        text = f"{error.message} {error.hint}".strip() if isinstance(error, MoeedgeError) else f"{error}."
        say(self._err, text, style="yellow")


TOY_HINT = "This is a toy model trained on synthetic text; use -m FILE.gguf for a real one."
KEYS_HINT = 'Type a message; """ for several lines, /help for commands, Ctrl-C stops an answer, Ctrl-D exits.'


def experts(info: EngineInfo) -> str:
    """The shape that placement works on."""
    if info.n_experts == 0:
        return f"{info.n_layers} layers, no experts"
    return f"{info.n_expert_layers} layers x {info.n_experts} experts, top-{info.n_expert_used}"


def draft(info: EngineInfo) -> str:
    """Where drafts come from and how long they are, or that speculation is off."""
    if info.draft == "none" or info.gamma == 0:
        return "speculation off: " + ("no draft (-md FILE or -md ngram)" if info.draft == "none" else "draft length 0")
    return f"{info.draft}, gamma {info.gamma}"


def rows(info: EngineInfo) -> list[figures.Figure]:
    """The header as labels and values."""
    return [
        figures.Figure("model", f"{info.model} ({info.architecture})"),
        figures.Figure("experts", experts(info)),
        figures.Figure("draft", draft(info)),
        figures.Figure("device", figures.device(info)),
        figures.Figure("threads", str(info.n_threads)),
        figures.Figure("context", f"{info.n_ctx} tokens"),
    ]


def hints(info: EngineInfo, *, toy: bool) -> list[str]:
    """Notes of the engine, and that the bundled pair is a toy."""
    return [*info.notes, TOY_HINT] if toy else list(info.notes)


def print_header(console: Console, info: EngineInfo, *, version: str, toy: bool) -> None:
    """The header of an interactive chat."""
    say(console, f"moeedge {version}")
    show_figures(console, rows(info), style="dim", indent=2)
    for line in [*hints(info, toy=toy), KEYS_HINT]:
        say(console, line)


def header_line(info: EngineInfo) -> str:
    """The same in one line, for a single answer."""
    return figures.join_parts(
        [
            f"{info.model}: {experts(info)}",
            f"draft {draft(info)}" if info.gamma and info.draft != "none" else draft(info),
            figures.device(info),
            f"threads {info.n_threads}",
            f"context {info.n_ctx}",
        ]
    )
