"""The interactive chat: read a message or a command, answer, show the figures, repeat."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rich.console import Console

from moeedge.engine.answer import Generation
from moeedge.engine.conversation import Message
from moeedge.errors import ContextTooSmallError, MoeedgeError
from moeedge.run import Run
from moeedge.ui import figures
from moeedge.ui.chat.commands import LEAVING, Next, run_command
from moeedge.ui.chat.interrupt import HANGUP, Ended, Interrupt
from moeedge.ui.chat.prompt import QUOTES, unquote
from moeedge.ui.chat.session import FULL, Chat
from moeedge.ui.chat.single import CacheMeter, answer_view, print_turn
from moeedge.ui.console import say, show_figures, terminal_is_gone

_UNCHANGED = "The message stays as it was."


@dataclass(eq=False, kw_only=True)
class Repl(Chat):
    """One chat: answers go to `out`; panel: with figures below them; single_turn: it ends after one answer."""

    out: Console
    panel: bool = True
    single_turn: bool = False
    # the last question and answer, which come back if there is no new answer
    _before_edit: list[Message] = field(default_factory=list, init=False)
    _interrupt: Interrupt = field(default_factory=Interrupt, init=False)

    def run(self, first_line: str | None = None) -> int:
        """Chat until the user leaves, beginning with `first_line`. Returns the exit code: 0, or 128 + the signal."""
        with self._interrupt:
            try:
                result = Next.READ if first_line is None else self._carry_out(first_line)
                while result is not Next.EXIT:
                    result = self._next_message()
            except Ended as ended:
                return self._end_by_signal(ended.exit_code)
            except OSError:
                if terminal_is_gone():  # reading or writing failed before SIGHUP came
                    return self._end_by_signal(Ended(HANGUP).exit_code)
                raise
            if self._interrupt.ending:
                return self._end_by_signal(self._interrupt.exit_code)
        self.autosave.close()
        return 0

    def _next_message(self) -> Next:
        edited, self.edited = self.edited, None
        try:
            typed = self.read(edited or "")
        except EOFError:
            if terminal_is_gone():  # before SIGHUP says so
                raise Ended(HANGUP) from None
            return Next.EXIT
        except Ended:
            raise
        except KeyboardInterrupt:
            self.say(_UNCHANGED if edited else "Use /exit or Ctrl-D to leave.")
            return Next.READ
        line = unquote(typed)
        is_text = typed.strip().startswith(QUOTES)
        if edited and line.strip() and (is_text or not line.startswith("/")):
            self._before_edit = self.conversation.messages[-2:]
            self.conversation.undo()
        elif edited and not line.strip():
            self.say(_UNCHANGED)
            return Next.READ
        return self._carry_out(line, is_text=is_text)

    def _carry_out(self, line: str, *, is_text: bool = False) -> Next:
        """Runs a command, or answers a message; is_text: it was quoted, so it is no command."""
        try:
            self.session.watch_memory()
            if line.startswith("/") and not is_text:
                result = run_command(self, line)
                if result.next is not Next.ANSWER:  # what /regen took back stays on disk until there is another answer
                    self.keep()
                show_figures(self.err, result.table)
                for text in result.lines:
                    self.say(text)
                return self._answer() if result.next is Next.ANSWER else result.next
            if not line and not self.attached:
                return Next.READ
            if line.lower() in LEAVING and not self.attached and not is_text:
                return Next.EXIT
            self.conversation.ask(self.attached + line)
            self.attached, self.replaced, self.attempt = "", None, 0
            self.keep()
            return self._answer()
        except (MoeedgeError, ValueError) as error:
            if self.session.target.is_closed:  # a GPU failed, and the CPU could not take over: the chat stays on disk
                raise
            text = f"{error.message} {error.hint}".strip() if isinstance(error, MoeedgeError) else f"{error}."
            if isinstance(error, ContextTooSmallError) and self.conversation.messages:
                text = f"{error.message} {FULL}"
            say(self.err, text, style="yellow")
            return Next.READ
        except KeyboardInterrupt as error:  # Ctrl-C before or after the answer must not end the chat
            # but a second one does, while /model or /set ctx opened the old one again
            if isinstance(error, Ended) or self.session.target.is_closed:
                raise
            self.conversation.take_back()
            return Next.READ

    def _answer(self) -> Next:
        """Answer the open question and print the figures; afterwards the conversation has no open question."""
        answer: Generation | None = None
        begun, self.begun = self.begun, []
        try:
            prompt = self.prompt()
            sampling, look = self.settings.sampling, self.settings.look
            if sampling.seed is not None:  # with the same seed /regen would repeat the answer
                sampling = replace(sampling, seed=sampling.seed + self.attempt)
            meter = CacheMeter(self.session)
            run = Run(cancelled=self._interrupt)
            try:
                with self._interrupt.armed():
                    answer = self.session.generate(
                        prompt, n_predict=self.settings.n_predict, sampling=sampling, run=run, begun=begun
                    )
                    self.conversation.add_budget(figures.budget(self.info) if self.session.gamma > 0 else "")
                    if begun:
                        self.keep()
                    with answer_view(
                        answer, self.info, meter, self._interrupt, out=self.out, look=look, panel=self.panel, drop=True
                    ) as view:
                        n_saved = len(begun)  # tokens
                        for piece in answer.pieces():
                            if len(answer.tokens) > n_saved:
                                if n_saved == 0:
                                    self.keep()
                                self.autosave.add_step(piece, answer.tokens[n_saved:])
                                n_saved = len(answer.tokens)
                            view.write(piece)
            except Ended:
                raise
            except KeyboardInterrupt:  # Ctrl-C a second time, between two steps
                if answer is not None:
                    answer.close()
            if answer is not None:
                self.turns.append(figures.Turn(self.info, answer.stats, answer.stop_reason, meter()))
                print_turn(self.err, answer, self.info, meter, look, full=FULL)
                self.say("")
                if answer.stop_reason != "interrupted":
                    with self._interrupt.armed():  # Ctrl-C leaves it for after the next answer
                        self.session.measure_postponed(run)
        finally:
            self._close_question(answer)
        return Next.EXIT if self.single_turn or self._interrupt.ending else Next.READ

    def _close_question(self, answer: Generation | None) -> None:
        """Keep the answer, or take the question back; it stays open where the program ends in mid-answer."""
        ended_itself = answer is not None and answer.stop_reason not in (None, "interrupted")
        if not ended_itself and (self._interrupt.ending or self.session.target.is_closed or terminal_is_gone()):
            return
        before, self._before_edit = self._before_edit, []
        if answer is not None and (answer.text or ended_itself):
            self.conversation.answer(answer.text)
        elif self.replaced is not None:
            self.conversation.answer(self.replaced)
            self.say("The previous answer stays.")
        else:
            self.conversation.take_back()
            self.conversation.messages += before
            end = "The earlier one and its answer stay." if before else "It is not part of the conversation."
            self.say(f"Your message got no answer. {end}")
        self.keep()

    def _end_by_signal(self, exit_code: int) -> int:
        """After SIGTERM or a closed terminal: the chat stays on disk."""
        self._interrupt.finish()
        has_messages = bool(self.conversation.messages)
        is_saved = self.autosave.is_saving and has_messages
        self.autosave.close(keep=has_messages)
        if is_saved:
            self.say("moeedge was ended by a signal. The chat is saved: moeedge chat --resume goes on with it.")
        elif self.autosave.warning:
            self.say(self.autosave.warning)
        return exit_code
