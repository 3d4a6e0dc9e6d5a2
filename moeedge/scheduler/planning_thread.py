"""A thread that plans next to the models, so that a step pays for the hand-over alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Queue
from threading import Thread

Call = Callable[[], object]


class PlanningThread:
    """Runs calls in their order, one at a time. llama.cpp computes without Python's lock, so that both really overlap.

    The calls may use what the decoding thread leaves alone until it has called `wait`. The thread begins with the first
    call, and ends with `close` or the process. overlaps: False runs each call at once, in the thread that submits it.
    """

    def __init__(self, *, overlaps: bool = True) -> None:
        self._overlaps = overlaps
        self._calls: Queue[Call | None] = Queue()
        self._errors: list[BaseException] = []  # of the calls since the last `wait`
        self._thread: Thread | None = None

    def submit(self, call: Call) -> None:
        """Runs `call` after those submitted before."""
        if not self._overlaps:
            call()
            return
        if self._thread is None:
            arguments = (self._calls, self._errors)
            self._thread = Thread(target=_run, args=arguments, name="moeedge-planning", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def wait(self) -> None:
        """Returns when all calls have ended; may be interrupted, and called again. Raises what the first one raised."""
        if self._thread is not None and self._thread.is_alive():  # a forked process does not have it
            self._calls.join()
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error

    def close(self) -> None:
        """Ends the thread after its calls, whatever they raise. May be called twice."""
        try:
            with suppress(Exception):
                self.wait()
        finally:
            if self._thread is not None and self._thread.is_alive():
                self._calls.put(None)
                self._thread.join()
            self._thread = None


def _run(calls: Queue[Call | None], errors: list[BaseException]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException as error:  # raised again in the thread that waits
            errors.append(error)
        calls.task_done()
    calls.task_done()
