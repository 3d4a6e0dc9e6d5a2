"""What every command shares: errors become one sentence and an exit code, here and nowhere else."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console

from moeedge.errors import InputError, MoeedgeError

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: handled wherever Ctrl-C is, but with its own exit code."""


def _raise_terminated(_signum: int, _frame: FrameType | None) -> None:
    raise Terminated


def print_error(message: str, mend: str = "") -> None:
    """One sentence on standard error, and the mend after it; never wrapped, so that it can be searched for."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    console.print("error: ", style="bold red", end="")
    console.print(f"{message} {mend}".strip())


@contextmanager
def cli_errors() -> Iterator[None]:
    """Run a command's body; errors raised on purpose end it with one sentence and their exit code.

    Exit codes: 2 bad input, 1 failure, 130 Ctrl-C, 143 SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    except MoeedgeError as error:
        print_error(error.message, error.mend)
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
    finally:
        signal.signal(signal.SIGTERM, before)
