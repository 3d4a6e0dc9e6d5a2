"""A chat with a scripted user."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from moeedge.engine.autosave import unfinished_chats
from moeedge.engine.conversation import Conversation, Message
from moeedge.engine.session import Session
from moeedge.engine.types import SamplingConfig
from moeedge.scheduler.stats import StepRecord
from moeedge.ui.chat.repl import Repl
from moeedge.ui.chat.settings import Settings

GREEDY = Settings(sampling=SamplingConfig(temperature=0), n_predict=12, gamma=4)
Line = str | type[BaseException] | Callable[["Talk"], None]


class Talk:
    """A chat that reads `lines` and ends; `err` is all output but the answers."""

    def __init__(
        self,
        session: Session,
        lines: Sequence[Line],
        folder: Path,
        *,
        settings: Settings = GREEDY,
        raw: bool = False,
        switch: Callable[[str], Session] | None = None,
        saves: bool = True,
    ) -> None:
        out, err = io.StringIO(), io.StringIO()
        self.begun: list[str] = []  # what the prompts began with
        self.repl = Repl(
            session,
            Conversation(),
            settings,
            read=self._reader(lines),
            switch=switch,
            out=Console(file=out),
            err=Console(file=err, width=200),
            folder=(lambda: folder) if saves else None,
            unfinished=unfinished_chats(lambda: folder),
            raw=raw,
        )
        self.code = self.repl.run()
        self.out, self.err = out.getvalue(), err.getvalue()

    def _reader(self, lines: Sequence[Line]) -> Callable[[str], str]:
        left = iter(lines)

        def read(begun: str) -> str:
            self.begun.append(begun)
            line = next(left, None)
            while callable(line) and not isinstance(line, type):  # a look at the chat between two lines
                line(self)
                line = next(left, None)
            if line is None:
                raise EOFError
            if isinstance(line, str):
                return line
            raise line

        return read

    @property
    def messages(self) -> list[Message]:
        return self.repl.conversation.messages

    @property
    def asked(self) -> list[str]:
        """The user's messages."""
        return [message.content for message in self.messages if message.role == "user"]


def on_step(session: Session, number: int, action: Callable[[], None]) -> None:
    """Call `action` in the middle of an answer, after its step `number`."""
    seen: list[StepRecord] = []

    def observe(record: StepRecord, _session: Session) -> None:
        seen.append(record)
        if len(seen) == number:
            action()

    session.observers.append(observe)


def cut_off(session: Session, folder: Path, n_steps: int, *, settings: Settings = GREEDY) -> list[int]:
    """A chat that a signal ends after `n_steps` steps of its answer; the tokens of the answer until then."""
    on_step(session, n_steps, lambda: signal.raise_signal(signal.SIGTERM))
    Talk(session, ["/system be kind", "tell me"], folder, settings=settings)
    session.observers.clear()
    session.reset()
    return unfinished_chats(lambda: folder)[0].tokens
