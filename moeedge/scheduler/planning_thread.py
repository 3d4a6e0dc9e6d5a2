"""A thread that plans next to the models, so that a step pays for the hand-over alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread

Call = Callable[[], object]


class PlanningThread:
    """Runs calls in their order, one at a time. llama.cpp computes without Python's lock, so that both really overlap.

    The calls may use what the decoding thread leaves alone until it has called `wait`. The thread begins with the first
    call, and ends with `close` or the process.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Call, Event] | None] = SimpleQueue()
        self._errors: list[BaseException] = []  # of the calls since the last `wait`
        self._last: Event | None = None  # set when the call submitted last has ended; None: waited for
        self._thread: Thread | None = None

    def submit(self, call: Call) -> None:
        """Runs `call` after those submitted before."""
        if self._thread is None:
            arguments = (self._calls, self._errors)
            self._thread = Thread(target=_run, args=arguments, name="moeedge-planning", daemon=True)
            self._thread.start()
        ended = Event()
        self._calls.put((call, ended))
        self._last = ended  # after `put`: an interrupt in between must not leave an event that no call sets

    def wait(self) -> None:
        """Returns when all calls have ended; may be interrupted, and called again. Raises what the first one raised."""
        if self._last is not None:
            if self._is_alive:
                self._last.wait()  # the calls end in their order
            self._last = None
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error

    @property
    def _is_alive(self) -> bool:
        """Whether the thread lives; a forked process does not have it, and would wait for ever."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread after its calls, whatever they raise. May be called twice."""
        try:
            with suppress(Exception):
                self.wait()
        finally:
            if self._thread is not None and self._is_alive:
                self._calls.put(None)
                self._thread.join()
            self._thread = None


def _run(calls: SimpleQueue[tuple[Call, Event] | None], errors: list[BaseException]) -> None:
    while (submitted := calls.get()) is not None:
        call, ended = submitted
        try:
            call()
        except BaseException as error:  # raised again in the thread that waits
            errors.append(error)
        ended.set()
