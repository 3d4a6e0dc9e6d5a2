"""What every command shares: errors become one sentence and an exit code, here and nowhere else.

What --verbose does.

The choice of `-o` where a command prints a table or JSON.

Options that take lists, separated by commas.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from types import FrameType

import typer
from rich.console import Console

from moeedge.errors import InputError, MoeedgeError

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_LOG_CALLBACK = ("moeedge.llama.library", "_on_log")  # by name: it is not imported for --help
_AGAIN_S = 0.01  # until a signal that came too early is sent again


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: handled wherever Ctrl-C is, but with its own exit code."""


def _receive(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C and SIGTERM become exceptions; inside llama.cpp's log callback Python would swallow them, so not there."""
    if _in_log_callback(frame):
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signum))
        again.daemon = True
        again.start()
        return
    raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt


def _in_log_callback(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _LOG_CALLBACK[1] and frame.f_globals.get("__name__") == _LOG_CALLBACK[0]:
            return True
        frame = frame.f_back
    return False


def print_error(message: str, hint: str = "") -> None:
    """One sentence on standard error, and the mend after it; never wrapped, so that it can be searched for."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    console.print("error: ", style="bold red", end="")
    console.print(f"{message} {hint}".strip())


def _drop_unwritten() -> None:
    """Forgets what standard output could not take: Python would try once more at its end, and complain."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextmanager
def cli_errors() -> Iterator[None]:
    """Run a command's body; errors raised on purpose end it with one sentence and their exit code.

    Exit codes: 2 bad input, 1 failure, 130 Ctrl-C, 143 SIGTERM.
    """
    before = {signum: signal.signal(signum, _receive) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except MoeedgeError as error:
        print_error(error.message, error.hint)
        raise typer.Exit(error.exit_code) from None
    except ValueError as error:  # a frozen configuration refused a value
        print_error(f"{error}.", "See --help.")
        raise typer.Exit(InputError.exit_code) from None
    except MemoryError:
        print_error("Out of memory.", "Use a smaller context (-c N) or model.")
        raise typer.Exit(EXIT_FAILURE) from None
    except Terminated:
        raise typer.Exit(EXIT_TERMINATED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # the reader of a pipe left, as `head` does
        raise typer.Exit(EXIT_FAILURE) from None
    except OSError as error:  # standard output on a full disk, a folder that may not be read
        print_error(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")
        _drop_unwritten()
        raise typer.Exit(EXIT_FAILURE) from None
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def show_log() -> None:
    """Send the logs of moeedge and of llama.cpp, which does not propagate, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))  # moeedge.llama: ...
    for name in ("moeedge", "moeedge.llama"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)  # llama.cpp debugs with hundreds of lines per graph


class Output(str, Enum):
    """How the result is printed."""

    TABLE = "table"
    JSON = "json"


def words(text: str, option: str) -> list[str]:
    """The names, each once. Raises InputError where there is none."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise InputError(f"{option} names nothing.", "Give names, separated by commas.")
    return words


def numbers(text: str, option: str) -> list[float]:
    """Numbers, each once. Raises InputError."""
    try:
        return [float(word) for word in words(text, option)]
    except ValueError:
        raise InputError(f'{option} takes numbers, not "{text}".', "Separate them by commas.") from None


def whole_numbers(text: str, option: str) -> list[int]:
    """Integers. Raises InputError."""
    values = numbers(text, option)
    broken = [value for value in values if not value.is_integer()]
    if broken:
        raise InputError(f"{option} takes whole numbers, not {broken[0]:g}.", "Separate them by commas.")
    return [int(value) for value in values]
