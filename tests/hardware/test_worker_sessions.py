"""Sessions with a worker: one after another in one process, two at a time, and after it died and came back."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.scheduler.config import PlacementConfig
from moeedge.scheduler.stats import PlacementStats
from tests.support.worker import WorkerProcess, start_worker

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

PROMPT = [17, 3, 99, 41, 17, 3, 99, 41]
N_PREDICT = 48


def _config(model: Path, draft: Path, device: str) -> EngineConfig:
    placement = PlacementConfig(cache_ratio=0.5, calibrate=False)
    return EngineConfig(model=model, draft=draft, device=device, n_threads=1, n_ctx=256, placement=placement)


def _answer(session: Session, *, kill: WorkerProcess | None = None) -> tuple[list[int], PlacementStats | None]:
    """A greedy answer; the worker is killed after a few steps of it."""
    generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=SamplingConfig(temperature=0))
    for step, _ in enumerate(generation):
        if step == 3 and kill is not None:
            os.kill(kill.process.pid, signal.SIGKILL)
            kill.process.wait(timeout=10)
    return generation.tokens, session.placement_stats()


def test_sessions_of_one_process(tiny_moe: Path, tiny_draft: Path, worker: WorkerProcess) -> None:
    with Session.open(_config(tiny_moe, tiny_draft, "none")) as session:
        expected, stats = _answer(session)
        assert stats is None
    for _ in range(3):
        with Session.open(_config(tiny_moe, tiny_draft, worker.device)) as session:
            tokens, stats = _answer(session)
        assert tokens == expected
        assert stats is not None
        assert stats.uploads > 0
        assert stats.device == worker.device
    with (  # both over the one connection that this process has
        Session.open(_config(tiny_moe, tiny_draft, worker.device)) as first,
        Session.open(_config(tiny_moe, tiny_draft, worker.device)) as second,
    ):
        assert [_answer(first)[0], _answer(second)[0], _answer(first)[0]] == [expected] * 3


def test_a_restarted_worker(tiny_moe: Path, tiny_draft: Path, worker: WorkerProcess) -> None:
    with Session.open(_config(tiny_moe, tiny_draft, "none")) as session:
        expected, _ = _answer(session)
    with Session.open(_config(tiny_moe, tiny_draft, worker.device)) as session:
        tokens, stats = _answer(session, kill=worker)
        assert tokens == expected
        assert stats is not None
        assert stats.lost
    with start_worker(listen=worker.endpoint) as again:
        assert again.device == worker.device
        with Session.open(_config(tiny_moe, tiny_draft, again.device)) as session:
            tokens, stats = _answer(session)
        assert tokens == expected
        assert stats is not None
        assert not stats.lost
        assert stats.uploads > 0


@pytest.mark.parametrize("is_noticed", [True, False], ids=["answer", "close"])
def test_a_worker_that_dies_between_two_answers(
    tiny_moe: Path, tiny_draft: Path, worker: WorkerProcess, is_noticed: bool
) -> None:
    """The next answer goes on without it, and so does the end of the session; then it comes back."""
    with Session.open(_config(tiny_moe, tiny_draft, worker.device)) as session:
        expected, _ = _answer(session)
        worker.process.kill()
        worker.process.wait(timeout=10)
        if is_noticed:
            tokens, stats = _answer(session)
            assert tokens == expected
            assert stats is not None
            assert stats.lost
    with (
        start_worker(listen=worker.endpoint) as again,
        Session.open(_config(tiny_moe, tiny_draft, again.device)) as session,
    ):
        tokens, stats = _answer(session)
        assert tokens == expected
        assert stats is not None
        assert stats.uploads > 0
