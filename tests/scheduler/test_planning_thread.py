"""The thread that plans: order, errors, end."""

from __future__ import annotations

import threading

import pytest

from moeedge.scheduler.manager import PlanningThread


def test_calls_run_in_order_next_to_the_caller() -> None:
    planning, seen, go = PlanningThread(), [], threading.Event()
    planning.submit(lambda: seen.append(go.wait(10)))
    for number in range(20):
        planning.submit(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert seen == []
    go.set()
    planning.wait()
    assert seen == [True, *range(20)]
    planning.wait()  # nothing to wait for
    planning.close()
    planning.close()


def test_an_error_is_raised_where_the_caller_waits() -> None:
    planning, seen = PlanningThread(), []
    planning.submit(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    planning.submit(lambda: seen.append(1))
    with pytest.raises(ZeroDivisionError):
        planning.wait()
    assert seen == [1]
    planning.wait()
    planning.submit(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    planning.close()
    assert not any(thread.name.startswith("moeedge-planning") for thread in threading.enumerate())


def test_an_interrupted_wait_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    planning, go, seen = PlanningThread(), threading.Event(), []
    planning.submit(lambda: seen.append(go.wait(10)))

    def interrupted(_condition: threading.Condition, _timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            planning.wait()
    go.set()
    planning.wait()
    assert seen == [True]
    planning.close()
