"""What signals do while an answer runs, and while none does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import pytest

from moeedge.ui.chat.interrupt import Ended, Interrupt


def receive(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("signum", "code", "ending"), [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True), (signal.SIGHUP, 129, True)]
)
def test_the_first_signal_asks_to_stop_and_the_second_does_not_wait(
    signum: signal.Signals, code: int, ending: bool
) -> None:
    with Interrupt(armed=True) as interrupt:
        assert (interrupt(), interrupt.exit_code) == (False, 0)
        receive(signum)
        assert (interrupt(), interrupt.exit_code, interrupt.ending) == (True, code, ending)
        with pytest.raises(KeyboardInterrupt) as caught:
            receive(signum)
        assert getattr(caught.value, "exit_code", 130) == code


def test_ctrl_c_is_an_exception_between_answers_and_sigterm_is_not_forgotten() -> None:
    with Interrupt() as interrupt:
        with interrupt.armed():
            receive(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            receive(signal.SIGINT)
        with interrupt.armed():  # the next answer starts unstopped
            assert not interrupt()
            receive(signal.SIGTERM)
        with interrupt.armed():
            assert interrupt()


def test_nohup_is_kept() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt(armed=True) as interrupt:
            receive(signal.SIGHUP)
            assert not interrupt()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_given_back_and_another_thread_is_left_alone() -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(signum) for signum in signals]
    with Interrupt():
        assert all(signal.getsignal(signum) != handler for signum, handler in zip(signals, before, strict=True))
    assert [signal.getsignal(signum) for signum in signals] == before
    seen: list[object] = []

    def work() -> None:
        with Interrupt() as interrupt:
            seen.append(([signal.getsignal(signum) for signum in signals], interrupt()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_an_end_that_was_dropped_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a finalizer is reported and dropped, also that of a signal's handler."""
    monkeypatch.setattr("moeedge.ui.chat.interrupt._REPEAT_S", 0.05)
    with Interrupt() as interrupt:
        with contextlib.suppress(Ended):
            receive(signal.SIGTERM)
        with pytest.raises(Ended) as caught:
            time.sleep(5)
        assert caught.value.exit_code == 143
        interrupt.finish()
        time.sleep(0.15)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_ctrl_c_in_the_log_callback_comes_after_it() -> None:
    """A model is being loaded: Python would drop the exception, and print it."""
    library: dict[str, Any] = {"__name__": "moeedge.llama.library"}
    exec("def _on_log(act):\n    act()", library)
    with Interrupt():
        library["_on_log"](lambda: receive(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10)
