"""Signals while an answer runs: the first stops the engine at the end of its step, the second raises at once.

A KeyboardInterrupt inside a step could leave the KV cache and the token list inconsistent. While an answer runs,
Ctrl-C therefore only sets a flag that the engine polls.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HANGUP = signal.SIGHUP  # of a closed terminal window
_ENDING = (signal.SIGTERM, HANGUP)
_REPEAT_S = 1.0  # Python drops an exception that a handler raises in a callback of the garbage collector
_LOG_CALLBACK = ("moeedge.llama.library", "_on_log")  # by name: importing it would load llama.cpp
_RESEND_S = 0.01  # until a signal that arrived too early is sent again


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived while no answer could be cancelled; `exit_code` is 128 + its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


def is_sent_later(signum: int, frame: FrameType | None) -> bool:
    """Whether a signal arrived in llama.cpp's log callback, where Python drops exceptions: it is sent again."""
    while frame is not None:
        if frame.f_code.co_name == _LOG_CALLBACK[1] and frame.f_globals.get("__name__") == _LOG_CALLBACK[0]:
            resend = threading.Timer(_RESEND_S, os.kill, (os.getpid(), signum))
            resend.daemon = True
            resend.start()
            return True
        frame = frame.f_back
    return False


class Interrupt:
    """Context manager that handles SIGINT (while armed), SIGTERM and SIGHUP; a call returns whether to stop.

    Python allows signal handlers only in the main thread; in other threads a call always returns False.
    """

    def __init__(self, *, armed: bool = False) -> None:
        self.signum: int | None = None  # the signal that asked to stop
        self._armed, self._finished = armed, False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.signum is not None

    @property
    def ending(self) -> bool:
        """Whether the program should end, not only the answer."""
        return self.signum in _ENDING

    @property
    def exit_code(self) -> int:
        """Exit code for the signal: 130 for Ctrl-C, 143 for SIGTERM; 0 without a signal."""
        return 128 + self.signum if self.signum is not None else 0

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Within it signals request the end of the answer; after it Ctrl-C is an exception again."""
        self._armed = True
        if self.signum == signal.SIGINT:  # of the answer before
            self.signum = None
        try:
            yield
        finally:
            self._armed = False

    def finish(self) -> None:
        """The program ends: further signals have no effect, such as SIGHUP after the terminal's end was noticed."""
        self._finished = True
        self._stop_timer()

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, *_ENDING):
                if signum != HANGUP or signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup wants it
                    self._before[signum] = signal.signal(signum, self._receive)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._repeat)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_timer()
        for signum, before in self._before.items():
            signal.signal(signum, before)
        self._before.clear()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._finished:
            return
        again = self.signum is not None
        self.signum = signum
        if (self._armed and not again) or is_sent_later(signum, frame):
            return
        if signum in _ENDING:
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_S, _REPEAT_S)
            raise Ended(signum)
        raise KeyboardInterrupt

    def _repeat(self, _signum: int, _frame: FrameType | None) -> None:
        """The program should have ended by now."""
        if self.signum is not None and not self._finished:
            raise Ended(self.signum)

    def _stop_timer(self) -> None:
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
