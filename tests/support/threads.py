"""Work of another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Calls `work` again and again while the body runs, which begins after it; what it raises is raised at the end."""
    begun, stop = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def repeat() -> None:
        begun.set()
        try:
            while not stop.is_set():
                work()
        except BaseException as error:  # a thread's exception would not fail the caller
            failures.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]
