"""The consoles of the program: what a terminal can do, safe text for it, progress, and checks of output files."""

from __future__ import annotations

import errno
import os
import select
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich import progress as rich_progress
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from moeedge.errors import InputError
from moeedge.run import Level, Notification, Notify, Progress
from moeedge.ui.figures import FigureRow
from moeedge.units import format_bytes, format_rate, visible

if TYPE_CHECKING:
    from typing_extensions import Self

MIN_PANEL_COLUMNS = 40
MIN_PANEL_ROWS = 10
_LEAST_ROOM = 12  # columns for values next to their labels
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")

_quiet, _plain = False, False


def set_modes(*, quiet: bool, plain: bool) -> None:
    """Sets how consoles made from now on write. quiet: no notes; plain: no colour, and nothing is repainted."""
    global _quiet, _plain
    _quiet, _plain = quiet, plain


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a person sees or types here; False for a closed or missing stream."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def terminal_is_gone() -> bool:
    """Whether standard input is a terminal that was closed: reading it ends as after Ctrl-D."""
    try:
        termios.tcgetattr(sys.stdin.fileno())
    except termios.error as error:
        return error.args[:1] == (errno.EIO,)
    except (AttributeError, OSError, ValueError):  # there is no standard input, or it has no descriptor
        return False
    return False


def supports_panel(console: Console) -> bool:
    """Whether this is a terminal that can be repainted and is large enough, and NO_COLOR or TERM do not forbid it."""
    if _plain or not is_terminal(console.file) or os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    utf8 = (getattr(console.file, "encoding", None) or "").lower().replace("-", "") == "utf8"
    return utf8 and console.width >= MIN_PANEL_COLUMNS and console.height >= MIN_PANEL_ROWS


def stderr_console() -> Console:
    """A console on standard error without markup and highlighting."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False, no_color=_plain or None)


def stdout_console() -> Console:
    return Console(markup=False, highlight=False, emoji=False, no_color=_plain or None)


def say(console: Console, text: str, *, style: str = "dim") -> None:
    """Print a line of the program's own, wrapped between words on a terminal and unbroken in a file."""
    with suppress(OSError):  # of a lost terminal, as after SIGHUP
        console.print(visible(text), style=style, soft_wrap=not console.is_terminal)


def note(console: Console, text: str) -> None:
    """Print a line about a choice or about what takes a while, unless the program is to be quiet."""
    if not _quiet:
        say(console, text)


def notifier(console: Console) -> Notify:
    """Shows notifications on `console`: warnings in yellow; only these if the program is to be quiet."""

    def show(notification: Notification) -> None:
        if notification.level is Level.WARNING:
            say(console, notification, style="yellow")
        else:
            note(console, notification)

    return show


def show_figures(console: Console, figures: list[FigureRow], *, style: str = "") -> None:
    """Print labels and values in two columns."""
    if not figures:
        return
    is_narrow = console.width - max(len(item.label) for item in figures) - 2 < _LEAST_ROOM  # a value is below its label
    table = Table.grid(padding=(0, 2, 0, 0))
    if not is_narrow:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in figures:
        label, value = Text(item.label), Text(item.value, style="" if style else "bold")
        for cells in [(label,), (Padding(value, (0, 0, 0, 2)),)] if is_narrow else [(label, value)]:
            table.add_row(*cells)
    with suppress(OSError):
        console.print(table, style=style)


@contextmanager
def typing_hidden(*, drop: bool = False) -> Iterator[None]:
    """Do not echo what is typed meanwhile; drop: discard it, unless something was typed before. Ctrl-C still works."""
    fd = _foreground_terminal()
    if fd is None:
        yield
        return
    drop = drop and not select.select([fd], [], [], 0)[0]
    before = termios.tcgetattr(fd)
    silent = before.copy()
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSANOW, silent)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal may be gone
            if drop:
                termios.tcflush(fd, termios.TCIFLUSH)
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _foreground_terminal() -> int | None:
    """The descriptor of standard input if it is a terminal that this process may change without being stopped."""
    try:
        fd = sys.stdin.fileno()
        termios.tcgetattr(fd)
        return fd if os.tcgetpgrp(fd) == os.getpgrp() else None
    except (AttributeError, OSError, ValueError, termios.error):
        return None


def check_output(path: Path) -> None:
    """Raises InputError if no file can be written at `path`; to be called before the work."""
    folder = path.absolute().parent
    reason, hint = "", "Choose another path."
    if path.is_dir():
        reason, hint = "it is a folder", "Give the path of a file in it."
    elif not folder.is_dir():
        reason, hint = f"there is no folder {folder}", "Create it, or choose another path."
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "you have no permission"
    elif not path.exists():
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:  # /proc, a read-only disk
            reason = error.strerror or str(error)
    if reason:
        raise InputError(f"{path} cannot be written: {reason}.", hint)


def check_picture(path: Path) -> None:
    """Raises InputError if no picture can be written at `path`, whose suffix selects the format."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise InputError(f"--plot cannot write {path.name}.", f"End the name in {', '.join(PICTURE_SUFFIXES)}.")
    check_output(path)


BYTES = "bytes"  # a unit
_WIDE = 80  # columns from which names and remaining times have room
LINE_S = 10.0  # between lines where a bar is not shown


class _Amount(ProgressColumn):
    """How many units are done, of how many; of bytes the rate, too. Its text is written where there is no bar."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        if self.unit != BYTES:
            return Text(f"{task.completed:,.0f} of {task.total:,.0f} {self.unit}")
        rate = f", {format_rate(task.speed)}" if task.speed else ""
        return Text(f"{format_bytes(int(task.completed))} of {format_bytes(int(task.total or 0))}{rate}")


class Bar(Progress):
    """A context manager around the work. is_shown: by default in every terminal; transient: it goes at the end."""

    def __init__(self, console: Console, unit: str, *, is_shown: bool | None = None, transient: bool = True) -> None:
        self.is_shown = console.is_terminal if is_shown is None else is_shown
        self.is_wide = console.width >= _WIDE
        self._console = console
        self._amount = _Amount(unit)
        columns = [TextColumn("{task.description}"), BarColumn(40 if self.is_wide else 12), self._amount]
        left = [TimeRemainingColumn()] if self.is_wide else []
        self._progress = rich_progress.Progress(
            *columns, *left, console=console, transient=transient, disable=not self.is_shown
        )
        self._task: TaskID | None = None
        self._line_s, self._part = time.monotonic(), ""

    def start(self, label: str, total: float) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(label, total=total)

    def update(self, **changes: Any) -> None:
        """Change the running task: total, completed, advance or description."""
        if self._task is None:
            return
        self._progress.update(self._task, **changes)
        if not self.is_shown and time.monotonic() >= self._line_s + LINE_S:
            self._line_s = time.monotonic()
            task = self._progress.tasks[-1]
            self.note(f"{task.description}: {self._amount.render(task)}")

    def add(self, amount: float = 1) -> None:
        self.update(advance=amount)

    def phase(self, text: str, part: str = "") -> None:
        if part != self._part:
            self._part, self._line_s = part, -LINE_S  # a line now
        self.update(description=text)

    def note(self, text: str) -> None:
        """A sentence for the user, above the bar."""
        say(self._console, text)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def count_bar(console: Console, label: str, unit: str, total: int) -> Bar:
    bar = Bar(console, unit)
    bar.start(label, total)
    return bar


class PullProgress(Bar):
    def __init__(self) -> None:
        console = stderr_console()
        super().__init__(console, BYTES, is_shown=supports_panel(console), transient=False)

    @contextmanager
    def file(self, name: str, total_bytes: int) -> Iterator[Callable[[int, str], None]]:
        """The bar of a file; yields what moves it: `n_bytes` of the file are here, in a phase of `hub.remote.At`."""
        self._phase = ""
        if not self.is_shown or not self.is_wide:
            self.note(f"{name}: {format_bytes(total_bytes)}")
        short, room = name.rpartition("/")[2], self._console.width // 3
        self.start((short if len(short) <= room else f"...{short[3 - room :]}") if self.is_wide else "", total_bytes)
        task = self._progress.tasks[-1]
        try:
            yield self._at
        except BaseException:
            self.note(f"{name}: stopped at {self._amount.render(task)}.")
            raise
        finally:
            self._progress.stop_task(task.id)
            self._task = None

    def _at(self, n_bytes: int, phase: str) -> None:
        if phase != self._phase and self._task is not None:  # bytes that were here before say nothing about the rate
            self._progress.reset(self._task, completed=n_bytes)
        self._phase = phase
        self.update(completed=n_bytes)
