"""The prompt of a single answer: -p, standard input, or both."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from moeedge.errors import EmptyPromptError, InputError
from moeedge.ui.console import is_terminal

_PATIENCE_S = 2.0  # before saying that standard input is being waited for


def one_shot_prompt(given: str | None, stream: TextIO | None, *, complain: Callable[[str], None]) -> str | None:
    """The text to answer, or None when a person sits at the terminal and -p was not given.

    With -p and piped input the prompt is -p's text, a blank line, and the input. Raises EmptyPromptError for blanks.
    """
    if is_terminal(stream):
        piped = ""
        if given is None:
            return None
    else:
        piped = _read_piped(stream, with_prompt=given is not None, complain=complain)
    parts = [part for part in (given or "", piped.strip("\n")) if part.strip()]
    if not parts:
        where = "-p is blank" if given is not None else "standard input is empty and is no terminal"
        raise EmptyPromptError(
            f"The prompt is empty: {where}.", "Give -p TEXT, pipe a text in, or start the chat in a terminal."
        )
    return "\n\n".join(parts)


def _read_piped(stream: TextIO | None, *, with_prompt: bool, complain: Callable[[str], None]) -> str:
    """All of standard input, which is no terminal; says so when the other end keeps silent."""
    if stream is None or stream.closed:
        return ""
    if with_prompt and not _is_pipe_or_file(stream):
        return ""  # a socket or device that a service manager left open may never end; -p is enough
    waiting = threading.Timer(_PATIENCE_S, complain, ["Waiting for standard input to end (Ctrl-D or closing it)."])
    waiting.daemon = True
    waiting.start()
    try:
        text = stream.read()
        text.encode("utf-8")  # in the C locale, bytes that are no UTF-8 come as lone surrogates instead of an error
        return text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InputError(f"Standard input is not UTF-8 text, from position {error.start} on.") from None
    except OSError:  # closed under us, or nothing to read from
        return ""
    finally:
        waiting.cancel()


def _is_pipe_or_file(stream: TextIO) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # not backed by a descriptor: a test's or an embedder's text
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def valid_text(argument: str) -> str:
    """The text of an option; bytes that are no UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def accept_any_text() -> None:
    """Let output that the terminal's encoding cannot show become "?" instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
