"""Shared by all commands: errors and signals as exit codes, here alone; output; lists on the command line."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from moeedge.cli.declare import Output
from moeedge.errors import InputError, MoeedgeError
from moeedge.paths import DISK_FULL_ERRORS, read_text
from moeedge.ui.chat.interrupt import Ended, is_sent_later
from moeedge.units import parse_gpu_size, parse_size, visible

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


@contextmanager
def cli_errors() -> Iterator[None]:
    """Ends a command that fails with a message and its exit code: 2 bad input, 1 failure, 130 Ctrl-C, 143 SIGTERM."""
    before = {signum: signal.signal(signum, _receive) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except MoeedgeError as error:
        print_error(error.message, error.hint)
        raise typer.Exit(error.exit_code) from None
    except ValueError as error:  # a frozen configuration rejected a value
        print_error(f"{error}.", "See --help.")
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except MemoryError:
        print_error("Out of memory.", "Use a smaller context (-c N) or model.")
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt as error:
        raise typer.Exit(interrupted_code(error)) from None
    except BrokenPipeError:  # the reader of a pipe left, as `head` does
        raise typer.Exit(EXIT_FAILURE) from None
    except OSError as error:  # standard output on a full disk, a folder without read permission
        reason = "The disk is full" if error.errno in DISK_FULL_ERRORS else error.strerror or str(error)
        print_error(f"{reason}{f': {error.filename}' if error.filename else ''}.")
        with suppress(OSError, ValueError):  # or else Python tries again to write when it exits, and reports an error
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        raise typer.Exit(EXIT_FAILURE) from None
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def interrupted_code(error: KeyboardInterrupt) -> int:
    """The exit code after Ctrl-C, or after the signal that ended the program."""
    return error.exit_code if isinstance(error, Ended) else EXIT_INTERRUPTED


def print_error(message: str, hint: str = "") -> None:
    """Message and hint on one line of standard error, never wrapped, so that it can be searched for.

    What a file contributes is shown as the terminal's text, and what is longer than a page in part.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    console.print("error: ", style="bold red", end="")
    text = f"{message} {hint}".strip().replace("\n", " ")
    console.print(visible(text if len(text) <= 4000 else f"{text[:2000]} ... {text[-1000:]}"))


def emit(output: Output, as_json: Callable[..., str], as_text: Callable[..., None], *result: Any) -> None:
    """Writes a result to standard output: as_json(*result), or the text that as_text(*result, console) prints."""
    if output is Output.JSON:
        typer.echo(as_json(*result).removesuffix("\n"))
        return
    from moeedge.ui.console import stdout_console

    as_text(*result, stdout_console())


def accept_any_text() -> None:
    """Lets output that the terminal's encoding cannot show become "?" instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def valid_text(argument: str) -> str:
    """The text of an option. Bytes that are not UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def names(text: str, option: str, hint: str = "Give names, separated by commas.") -> list[str]:
    """The elements of a comma-separated list, each once. Raises InputError, with the hint, for an empty list."""
    elements = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not elements:
        raise InputError(f"{option} is empty.", hint)
    return elements


def numbers(text: str, option: str) -> list[float]:
    """The elements of a comma-separated list as numbers. Raises InputError."""
    try:
        return [float(name) for name in names(text, option)]
    except ValueError:
        raise InputError(f'{option} takes numbers, not "{text}".', "Separate them by commas.") from None


def integers(text: str, option: str) -> list[int]:
    """The elements of a comma-separated list as integers. Raises InputError."""
    values = numbers(text, option)
    fractions = [value for value in values if not value.is_integer()]
    if fractions:
        raise InputError(f"{option} takes integers, not {fractions[0]:g}.", "Separate them by commas.")
    return [int(value) for value in values]


def text_of(text: str | None, file: Path | None, option: str, file_option: str) -> str | None:
    """The text of an option or its file ("-": standard input), without the last line break. Raises InputError."""
    if file is None:
        return None if text is None else valid_text(text)
    if text is not None:
        raise InputError(f"{option} and {file_option} cannot be used together.", "Give one of them.")
    if str(file) != "-":
        return read_text(file, f"{file_option} takes the path of a text file.").removesuffix("\n")
    try:
        text = sys.stdin.read()
        text.encode("utf-8")  # in the C locale, bytes that are not UTF-8 become lone surrogates instead of an error
        return text.removesuffix("\n")
    except UnicodeError as error:
        what = f"Standard input is not UTF-8 text: byte {getattr(error, 'start', 0):,} is not."
        raise InputError(what, f"{file_option} takes a text.") from None


def unescaped(text: str) -> str:
    r"""The text with \n, \r, \t, \', \", \\ and \xHH replaced by what they stand for, as llama.cpp's -e does."""
    meanings = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
    pattern = r"\\(x[0-9A-Fa-f]{2}|[nrt'\"\\])"
    return re.sub(pattern, lambda match: meanings.get(match[1]) or chr(int(match[1][1:], 16)), text)


def memory_size(text: str, option: str, *, parse: Callable[[str], int] = parse_size) -> int:
    """The bytes of a size. Raises InputError for a malformed one, and for one without a unit."""
    text = text.strip()
    if text.isdecimal() and int(text):  # bytes: the unit was probably forgotten
        raise InputError(f"{option} {text} has no unit.", f"Did you mean {option} {text}GB, or {text}GiB?")
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}.") from None


gpu_memory = partial(memory_size, parse=parse_gpu_size)  # the free bytes of a GPU: 12GB is a card's size


def _receive(signum: int, frame: FrameType | None) -> None:
    """Turns Ctrl-C and SIGTERM into exceptions; in llama.cpp's log callback, where Python drops them, later."""
    if is_sent_later(signum, frame):
        return
    raise Ended(signum) if signum == signal.SIGTERM else KeyboardInterrupt
