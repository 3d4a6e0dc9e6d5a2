"""A thread that runs a session's policy and plans next to the models."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread


class PlanningThread:
    """Runs calls in their order next to the models: llama.cpp computes without Python's lock, so that both overlap.

    The calls may use what the decoding thread leaves alone until it has called `wait`. overlaps: False runs each call
    at once, in the thread that submits it. Every step pays for the hand-over, which futures would make longer.
    """

    def __init__(self, *, overlaps: bool = True) -> None:
        self._overlaps, self._process = overlaps, os.getpid()
        self._calls: SimpleQueue[tuple[int, Callable[[], object]] | None] = SimpleQueue()
        self._thread: Thread | None = None  # begins with the first call
        self._numbers = itertools.count(1)  # of calls
        self._submitted = self._last_ended = 0
        self._ended = Event()  # one more call has ended
        self._errors: list[BaseException] = []  # of the calls since the last `wait`

    def submit(self, call: Callable[[], object]) -> None:
        """Runs `call` after those submitted before."""
        if not self._overlaps:
            call()
            return
        if self._thread is None:
            self._thread = Thread(target=self._run, name="moeedge-planning", daemon=True)
            self._thread.start()
        number = next(self._numbers)
        self._calls.put((number, call))
        self._submitted = number  # after `put`: an interrupt in between must not leave a call that never ends

    def wait(self) -> None:
        """Returns when all calls have ended; may be interrupted, and called again. Raises what the first one raised."""
        while self._last_ended < self._submitted and self._process == os.getpid():  # a fork does not have the thread
            self._ended.clear()
            if self._last_ended < self._submitted:
                self._ended.wait()
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Ends the thread after its calls, whatever they raise. May be called twice."""
        try:
            with suppress(Exception):
                self.wait()
        finally:
            thread, self._thread = self._thread, None
            if thread is not None and self._process == os.getpid():
                self._calls.put(None)
                thread.join()

    def _run(self) -> None:
        while (submitted := self._calls.get()) is not None:
            number, call = submitted
            try:
                call()
            except BaseException as error:  # raised again in the thread that waits
                self._errors.append(error)
            self._last_ended = number
            self._ended.set()
