"""Signals in the middle of a single answer: what was said is printed, the exit code names the signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import TinyFactory
from tests.support.commands import SIGNALS

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)


@pytest.fixture
def endless(tiny: TinyFactory) -> list[str]:
    """A single answer that runs until it is stopped."""
    model = ["-m", str(tiny("qwen3moe")), "-md", str(tiny("qwen3"))]
    return [*model, "-t", "1", "-c", "512", "--context-shift", "--temp", "0", "-p", "tell me"]


@contextmanager
def running(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """`moeedge chat ARGUMENTS` with pipes on its outputs, once the header has come."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moeedge", "chat", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "on the CPU" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_json_is_whole_and_says_interrupted(endless: list[str], signum: signal.Signals, code: int) -> None:
    with running([*endless, "-o", "json"]) as process:
        time.sleep(1.0)  # answers say nothing until they are printed as a whole
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    report = json.loads(stdout)
    assert report["stop_reason"] == "interrupted"
    assert len(report["tokens"]) > 10
    assert len(report["text"]) > 10
    assert report["stats"]["tg_ts"] > 0


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_text_keeps_what_was_said(endless: list[str], signum: signal.Signals, code: int) -> None:
    with running(endless) as process:
        assert process.stdout is not None
        first = process.stdout.read(50)
        process.send_signal(signum)
        rest, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert len(first + rest) > 50
    assert rest.endswith("\n")
    assert ", stopped" in stderr
    assert "Traceback" not in stderr
