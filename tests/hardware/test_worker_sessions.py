"""Sessions with a worker: one after another in one process, two at a time, and after it died and came back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeedge.engine.session import Session
from tests.support.hybrid import hybrid_config
from tests.support.sessions import GREEDY, answered
from tests.support.worker import WorkerProcess, start_worker

PROMPT = [17, 3, 99, 41, 17, 3, 99, 41]
N_PREDICT = 48
Open = Callable[[str], Any]


@pytest.fixture
def opened(tiny_moe: Path, tiny_draft: Path) -> Open:
    """Opens a session with half of the experts on a device."""
    return lambda device: Session.open(hybrid_config(tiny_moe, tiny_draft, 0.5, gamma=4, device=device))


@pytest.fixture
def expected(opened: Open) -> list[int]:
    with opened("none") as session:
        assert session.placement_stats() is None
        return answer(session)


def answer(session: Session, *, kill: WorkerProcess | None = None) -> list[int]:
    """A greedy answer; the worker is killed after a few steps of it."""
    if kill is None:
        return answered(session, PROMPT, N_PREDICT).tokens
    generation = session.generate(PROMPT, n_predict=N_PREDICT, sampling=GREEDY, ignore_eos=True)
    for step, _ in enumerate(generation):
        if step == 3:
            end(kill)
    return generation.tokens


def end(worker: WorkerProcess) -> None:
    worker.process.kill()
    worker.process.wait(timeout=10)


def check_working(opened: Open, device: str, expected: list[int]) -> None:
    with opened(device) as session:
        assert answer(session) == expected
        stats = session.placement_stats()
    assert (stats.uploads > 0, stats.lost, stats.device) == (True, False, device)


def test_sessions_of_one_process(opened: Open, expected: list[int], worker: WorkerProcess) -> None:
    for _ in range(3):
        check_working(opened, worker.device, expected)
    with opened(worker.device) as first, opened(worker.device) as second:  # over the one connection of this process
        assert [answer(first), answer(second), answer(first)] == [expected] * 3


def test_a_restarted_worker(opened: Open, expected: list[int], worker: WorkerProcess) -> None:
    with opened(worker.device) as session:
        assert answer(session, kill=worker) == expected
        assert session.placement_stats().lost
    with start_worker(listen=worker.endpoint) as again:
        assert again.device == worker.device
        check_working(opened, again.device, expected)


@pytest.mark.parametrize("is_noticed", [True, False], ids=["answer", "close"])
def test_a_worker_that_dies_between_two_answers(
    opened: Open, expected: list[int], worker: WorkerProcess, is_noticed: bool
) -> None:
    """The next answer goes on without it, and so does the end of the session; then it comes back."""
    with opened(worker.device) as session:
        assert answer(session) == expected
        end(worker)
        if is_noticed:
            assert answer(session) == expected
            assert session.placement_stats().lost
    with start_worker(listen=worker.endpoint) as again:
        check_working(opened, again.device, expected)
