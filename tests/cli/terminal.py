"""A program in a pseudo-terminal: type, wait for what it shows, send signals."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]|\r")
TIMEOUT_S = 15.0
PROMPT = ">>>"  # the chat's; its blank comes with the first character


class Terminal:
    """`moeedge ARGUMENTS` with a terminal on all three standard streams; cleans up at its end.

    module: that runs the command. program: another program with its arguments, instead. timeout_s: of each wait.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        columns: int = 100,
        rows: int = 40,
        module: str = "moeedge",
        program: Sequence[str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.raw = ""  # everything shown, with the control sequences
        self.events: list[tuple[float, str]] = []  # time in s (monotonic) and what was shown then
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
        self._at = 0  # in `text`: the end of what was waited for
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments] if program is None else [*program, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "COLUMNS": "", "LINES": "", **env},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)

    @property
    def text(self) -> str:
        """Everything shown, without control sequences."""
        return _CONTROL.sub("", self.raw)

    def type(self, text: str) -> None:
        """Type `text`; end it with a carriage return to send it."""
        os.write(self._master, text.encode())

    def ask(self, line: str, *shown: str) -> None:
        """Type a line to the chat, wait for each text of `shown`, one after the other, and for the next prompt."""
        self.type(line + "\r")
        self.expect(*shown, PROMPT)

    def leave(self) -> None:
        """Type Ctrl-D and wait for the end."""
        self.type("\x04")
        assert self.wait() == 0

    def expect(self, *texts: str) -> None:
        """Wait until the texts are shown, each after the one before and after those of earlier calls."""
        for text in texts:
            self._at = self._find(text)

    def expect_all(self, *texts: str) -> None:
        """Wait until all are shown after the last expected text, in any order."""
        for text in texts:
            self._find(text)

    def rest(self, n_s: float) -> None:
        """Take in what is shown in the next `n_s` seconds."""
        until_s = time.monotonic() + n_s
        while (left_s := until_s - time.monotonic()) > 0 and self._read(left_s):
            pass

    def expect_length(self, n_characters: int) -> None:
        """Wait until that many characters are shown after the last expected text."""
        self._read_until(lambda: len(self.text) >= self._at + n_characters, f"{n_characters} characters")

    def _find(self, text: str) -> int:
        """The position after `text`, once it is shown."""
        self._read_until(lambda: self.text.find(text, self._at) >= 0, repr(text))
        return self.text.find(text, self._at) + len(text)

    def _read_until(self, is_shown: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not is_shown():
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{what} not shown after position {self._at} of:\n{self.text}"
            assert self._read(left_s), f"the program ended without {what}:\n{self.text}"

    def wait(self) -> int:
        """Wait for the end. Returns the exit code."""
        deadline_s = time.monotonic() + self._timeout_s
        while self._read(max(deadline_s - time.monotonic(), 0)):
            assert time.monotonic() < deadline_s, f"the program did not end:\n{self.text}"
        return self.process.wait(self._timeout_s)

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def hang_up(self) -> None:
        os.close(self._master)
        self._master = -1

    def _read(self, timeout_s: float) -> bool:
        """Take in what is shown next; False when the program closed the terminal."""
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        if not ready:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says EIO when the other side is closed
            return False
        shown = self._decoder.decode(data)
        self.raw += shown
        self.events.append((time.monotonic(), shown))
        os.write(self._master, b"\x1b[1;1R" * data.count(b"\x1b[6n"))  # asked where the cursor is
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._master >= 0:
            os.close(self._master)


def _take_terminal() -> None:
    """In the child: make standard input the controlling terminal, so that Ctrl-C typed there is a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
