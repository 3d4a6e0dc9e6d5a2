"""A thread that plans next to the models, so that a step pays for the hand-over alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

Call = Callable[[], None]


class PlanningThread:
    """Runs calls in their order, one at a time. llama.cpp computes without Python's lock, so that both really overlap.

    The calls may use what the decoding thread leaves alone until it has called `wait`. The thread begins with the first
    call, and ends with `close` or the process.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._raised: SimpleQueue[BaseException | None] = SimpleQueue()  # one entry for each call that has ended
        self._n_open = 0  # submitted, and not waited for
        self._thread: threading.Thread | None = None

    def submit(self, call: Call) -> None:
        """Runs `call` after those submitted before."""
        if self._thread is None:
            arguments = (self._calls, self._raised)
            self._thread = threading.Thread(target=_run, args=arguments, name="moeedge-planning", daemon=True)
            self._thread.start()
        self._n_open += 1
        self._calls.put(call)

    def wait(self) -> None:
        """Returns when all calls have ended. Raises what the first failing one raised."""
        first: BaseException | None = None
        while self._n_open:
            error = self._raised.get()
            self._n_open -= 1
            first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Ends the thread after its calls, whatever they raise. May be called twice."""
        with suppress(Exception):
            self.wait()
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None


def _run(calls: SimpleQueue[Call | None], raised: SimpleQueue[BaseException | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException as error:  # raised again in the thread that waits
            raised.put(error)
        else:
            raised.put(None)
