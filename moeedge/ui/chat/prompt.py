"""Input of the chat: history across runs, several lines between triple quotes, completion of commands."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.utils import is_dumb_terminal

from moeedge.errors import EmptyPromptError, InputError, MoeedgeError
from moeedge.run import Level, Run
from moeedge.ui.console import is_terminal

QUOTES = '"""'
PROMPT = ">>> "
CONTINUATION = "... "
_PATIENCE_S = 2.0  # until a notice that standard input is being waited for


def block_is_open(text: str) -> bool:
    """Whether `text` opens a triple-quoted block without closing it: Enter then starts a new line."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and (len(stripped) < 2 * len(QUOTES) or not stripped.endswith(QUOTES))


def unquote(text: str) -> str:
    """The text inside the triple quotes, or `text` without surrounding blanks."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and not block_is_open(text):
        return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")
    return stripped


def _bindings() -> KeyBindings:
    """Ctrl-C drops typed text (on an empty line the reader raises KeyboardInterrupt); Alt-Enter begins a new line."""
    bindings = KeyBindings()

    @bindings.add("c-c", filter=Condition(lambda: bool(get_app().current_buffer.text)))
    def _drop(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    @bindings.add("c-x", "c-e")
    def _open_editor(event: KeyPressEvent) -> None:
        buffer = event.current_buffer

        def edit() -> None:
            if (text := edited(buffer.text)) is not None:
                buffer.document = Document(text.rstrip("\n"))
                buffer.validate_and_handle()

        run_in_terminal(edit)

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        if block_is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def _begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class _CommandCompleter(Completer):
    """Completes the first word of a line that starts with a slash, and the first word after it."""

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._commands = commands  # and the words that each takes

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> list[Completion]:
        command, space, typed = document.text_before_cursor.partition(" ")
        names = self._commands.get(command, ()) if space else self._commands if command.startswith("/") else ()
        word = typed if space else command
        return [Completion(name, start_position=-len(word)) for name in names if name.startswith(word)]


class _SavedHistory(FileHistory):
    """A history in a file that ends where this cannot be written any more; `failure` says why, until it is told."""

    failure = ""
    _has_ended = False

    def store_string(self, string: str) -> None:
        if self._has_ended:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._has_ended, self.failure = True, error.strerror or str(error)


def open_history(path: Callable[[], Path], run: Run) -> History:
    """The history in the file `path()`, readable by its owner only; in memory if the file cannot be written."""
    try:
        file = path()
        file.touch(mode=0o600, exist_ok=True)
        with file.open("ab"):  # writable?
            return _SavedHistory(str(file))
    except (OSError, MoeedgeError) as error:
        run.say(f"Input history is not kept: {error}.", Level.WARNING)
        return InMemoryHistory()


def edited(text: str) -> str | None:
    """The text as $EDITOR leaves it; None where it is not saved, or after a message that the editor failed."""
    try:
        return click.edit(text)
    except click.ClickException as error:  # there is none, or it failed
        reason = error.message
    except UnicodeDecodeError:
        reason = "The editor wrote what is not UTF-8 text"
    except (OSError, ValueError) as error:  # no temporary file, or quotes in its name that do not close
        reason = getattr(error, "strerror", None) or str(error)
    sys.stderr.write(f"{reason}. Set EDITOR to a program that edits text.\n")
    return None


def _read_plainly(history: History, begun: str) -> str:
    """A message from a dumb terminal, which does its own editing; a text to begin with goes to $EDITOR."""
    if begun:
        return edited(begun) or ""
    text = _read_line(PROMPT)
    while block_is_open(text):
        text += "\n" + _read_line(CONTINUATION)
    if text.strip():
        history.append_string(text)
    return text


def _read_line(prompt: str) -> str:
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def make_reader(commands: Mapping[str, Sequence[str]], history: History, run: Run) -> Callable[[str], str]:
    """A function that reads one message, given its beginning. It raises EOFError and, on Ctrl-C, KeyboardInterrupt."""
    read = _make_reader(commands, history)

    def read_and_tell(begun: str) -> str:
        text = read(begun)
        if isinstance(history, _SavedHistory) and history.failure:  # told once
            run.say(f"Input history is not kept from here on: {history.failure}.", Level.WARNING)
            history.failure = ""
        return text

    return read_and_tell


def _make_reader(commands: Mapping[str, Sequence[str]], history: History) -> Callable[[str], str]:
    if is_dumb_terminal():
        return lambda begun: _read_plainly(history, begun)
    session: PromptSession[str] = PromptSession(
        message=PROMPT,
        multiline=True,
        prompt_continuation=CONTINUATION,
        history=history,
        completer=_CommandCompleter(commands),
        complete_while_typing=False,
        key_bindings=_bindings(),
        output=create_output(always_prefer_tty=True),  # stdout may be a file: then prompt on stderr
    )
    return lambda begun: session.prompt(default=begun)


def one_shot_prompt(prompt: str | None, stream: TextIO | None, *, notice: Callable[[str], None]) -> str | None:
    """The prompt of -p and of piped input; None for a terminal without -p. Raises EmptyPromptError for blanks."""
    if is_terminal(stream) and prompt is None:
        return None
    piped = "" if is_terminal(stream) else _read_piped(stream, with_prompt=prompt is not None, notice=notice)
    parts = [part for part in (prompt or "", piped.strip("\n")) if part.strip()]
    if not parts:
        where = "the text of -p or -f is blank" if prompt is not None else "standard input is empty and not a terminal"
        hint = "Give -p TEXT, pipe a text in, or start the chat in a terminal."
        raise EmptyPromptError(f"The prompt is empty: {where}.", hint)
    return "\n\n".join(parts)


def _read_piped(stream: TextIO | None, *, with_prompt: bool, notice: Callable[[str], None]) -> str:
    """All of standard input, which is no terminal; a notice if the other end stays silent."""
    if stream is None or stream.closed:
        return ""
    if with_prompt and not _is_pipe_or_file(stream):
        return ""  # a socket or device that a service manager left open may never end; -p is enough
    waiting = threading.Timer(_PATIENCE_S, notice, ["Reading the prompt from standard input until it ends (Ctrl-D)."])
    waiting.daemon = True
    waiting.start()
    try:
        text = stream.read()
        text.encode("utf-8")  # in the C locale, bytes that are not UTF-8 become lone surrogates instead of an error
        return text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        what = f"Byte {error.start:,} of standard input is not UTF-8 text."
        raise InputError(what, "Convert the text, for instance with iconv.") from None
    except OSError:  # closed in the meantime, or not readable
        return ""
    finally:
        waiting.cancel()


def _is_pipe_or_file(stream: TextIO) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    except (OSError, ValueError):  # no descriptor: the text of a test or of an embedding program
        return True
