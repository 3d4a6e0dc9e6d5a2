"""Runs a small Python program written by a model, and reports whether it reached its end without an error.

Each program has its own process with limits on processor time, memory, files and processes, an empty folder, no
standard input, and discarded output. The kernel's filter (syscalls.py) blocks the network, new processes, signals to
others and every file opened for writing. If the kernel accepts no filter, Python's audit hook blocks them, which stops
mistakes but not a program made to get past it. `SandboxResult.protection` names the one in use.

Files can be read. The sandbox protects against programs that are wrong, not against attacks on this module.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from moeedge.errors import SandboxError
from moeedge.scoring.syscalls import syscall_filter

Protection = Literal["kernel filter", "audit hook"]
_PROTECTIONS: dict[bytes, Protection] = {b"K": "kernel filter", b"A": "audit hook"}
_REPORT_BYTES = 4096
# processor time decides, so that a busy machine changes no result; wall time only ends programs that sleep
_CLOCK_PER_CPU_S = 4.0
_POLL_S = 0.005


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended; `reason` is one line, empty when it passed."""

    passed: bool
    reason: str
    protection: Protection


def run_python(source: str, *, timeout_s: float = 5.0, memory_bytes: int = 512 * 2**20) -> SandboxResult:
    """Runs `source` as a program; it passes if it reaches its last line without an error.

    Leaving early, also by os._exit(0) or sys.exit, does not pass. timeout_s: processor time, rounded up to whole
    seconds; wall time is limited to four times as much. Raises SandboxError if the process cannot be started.
    """
    token = secrets.token_hex(16).encode()
    cpu_s = max(1, math.ceil(timeout_s))
    deadline_s = time.monotonic() + _CLOCK_PER_CPU_S * timeout_s
    command = [sys.executable, "-S", "-s", "-B", "-c", _child_text()]
    command += [str(cpu_s), str(memory_bytes), _filter_text()]
    try:
        with tempfile.TemporaryDirectory(prefix="moeedge-run-") as folder, _started(command, folder) as process:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # it ended before reading; the report says so
                process.stdin.write(token + source.encode("utf-8", "replace"))
            with suppress(BrokenPipeError):  # of unread bytes
                process.stdin.close()
            report = _read_report(process.stdout.fileno(), deadline_s)
            in_time = len(report) <= _REPORT_BYTES and _ends_before(process.pid, deadline_s)
    except OSError as error:
        raise SandboxError(f"Cannot start a process for a program's tests ({error.strerror or error}).") from None
    return _judge(report, token, process.returncode, in_time, timeout_s)


@contextmanager
def _started(command: list[str], folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process in its own group and kills the group when the block ends."""
    # a fixed hash seed keeps the order of sets on every run
    environment = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    environment |= {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=null, cwd=folder, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            # the process was not waited for yet, so that its number still belongs to this group
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


@lru_cache
def protection() -> Protection:
    """Returns the protection of programs on this machine."""
    return run_python("pass").protection


def _read_report(descriptor: int, deadline_s: float) -> bytes:
    """Reads until the other end closes, the time is over or the report is too long."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    report = b""
    while len(report) <= _REPORT_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            break
        piece = os.read(descriptor, _REPORT_BYTES)
        if not piece:
            break
        report += piece
    return report


def _ends_before(pid: int, deadline_s: float) -> bool:
    """Returns whether the process ended before the deadline; does not reap it."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _judge(report: bytes, token: bytes, exit_code: int, in_time: bool, timeout_s: float) -> SandboxResult:
    before, *parts = report.split(token)
    if before or not parts or parts[0][:1] not in _PROTECTIONS:
        if not in_time:
            raise SandboxError(
                f"The process for a program's tests did not start within {_CLOCK_PER_CPU_S * timeout_s:g} s."
            )
        raise SandboxError(
            f"The process for a program's tests did not start (exit code {exit_code}).",
            "Give it more memory, or check that this Python runs with -S.",
        )
    guarded = _PROTECTIONS[parts[0][:1]]
    if len(report) > _REPORT_BYTES:
        return SandboxResult(False, "it wrote to the sandbox's own channel", guarded)
    if len(parts) > 1 and parts[1][:1] == b"F":
        return SandboxResult(False, parts[1][1:].decode("utf-8", "replace"), guarded)
    if not in_time or exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return SandboxResult(False, f"it took longer than {timeout_s:g} s", guarded)
    if exit_code < 0:
        return SandboxResult(False, f"it crashed ({signal.Signals(-exit_code).name})", guarded)
    if parts[1:] == [b"P"] and exit_code == 0:
        return SandboxResult(True, "", guarded)
    return SandboxResult(False, f"it left before its end (exit code {exit_code})", guarded)


@lru_cache
def _child_text() -> str:
    return Path(__file__).with_name("sandbox_child.py").read_text(encoding="utf-8")


@lru_cache
def _filter_text() -> str:
    return syscall_filter().hex()
