"""What the expert cache does during one answer, from its first token on: the prompt is another matter."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from moeedge.engine.session import Session
from moeedge.engine.types import PlacementStats, StepRecord


class CacheMeter:
    """A context manager around one answer; call it for the counters so far. None where there is no expert cache.

    Any thread may call it: the decoding thread looks at the session between its steps, every `interval_s` at most.
    `notes` gets a sentence for whatever goes off meanwhile (a lost device), to be shown after the answer.
    """

    def __init__(self, session: Session, interval_s: float = 0.25) -> None:
        self._session = session
        self._interval_s = interval_s
        self._read_s = 0.0
        self.notes: list[str] = []
        self._listener: Callable[[str], None] | None = None
        self._start: PlacementStats | None = None
        self._newest: PlacementStats | None = None

    def __call__(self) -> PlacementStats | None:
        start, newest = self._start, self._newest
        return None if start is None or newest is None else newest - start

    def __enter__(self) -> CacheMeter:
        self._listener = self._session.on_note
        self._session.on_note = self.notes.append
        self._start = self._newest = self._session.placement_stats()
        if self._start is not None:
            self._session.observers.append(self._observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.on_note = self._listener
        if self._start is not None:
            self._session.observers.remove(self._observe)
            self._newest = self._session.placement_stats()

    def _observe(self, record: StepRecord, session: Session) -> None:
        now_s = time.perf_counter()
        prompt_read = record.n_verified == 0
        if prompt_read or now_s - self._read_s >= self._interval_s:
            self._read_s = now_s
            self._newest = session.placement_stats()
            if prompt_read:
                self._start = self._newest
