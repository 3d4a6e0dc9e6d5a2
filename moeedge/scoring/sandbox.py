"""Runs a small Python program written by a model, and reports whether it reached its end without an error.

Each program has its own process with limits on processor time, memory, files and processes, an empty folder, no
standard input, and discarded output. The kernel's filter blocks the network, new processes, signals to
others and every file opened for writing. If the kernel accepts no filter, Python's audit hook blocks them, which stops
mistakes but not a program made to get past it. `SandboxResult.protection` names the one in use.

Files can be read. The sandbox protects against programs that are wrong, not against attacks on this module.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import secrets
import select
import signal
import struct
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

# numbers on x86_64 (unistd_64.h) and aarch64 (asm-generic/unistd.h) of Linux
_CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "readv": (19, 65),
    "writev": (20, 66), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23),
    "nanosleep": (35, 101), "getitimer": (36, 102), "setitimer": (38, 103), "getpid": (39, 172), "exit": (60, 93),
    "uname": (63, 160), "getcwd": (79, 17), "gettimeofday": (96, 169), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "rt_sigpending": (127, 136), "sigaltstack": (131, 132), "gettid": (186, 178),
    "futex": (202, 98), "sched_getaffinity": (204, 123), "getdents64": (217, 61), "set_tid_address": (218, 96),
    "restart_syscall": (219, 128), "fadvise64": (221, 223), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "newfstatat": (262, 79), "readlinkat": (267, 78),
    "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99),
    "dup3": (292, 24), "getcpu": (309, 168), "getrandom": (318, 278), "membarrier": (324, 283), "statx": (332, 291),
    "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
_X86_64_CALLS = {
    "stat": 4, "lstat": 6, "poll": 7, "access": 21, "select": 23, "dup2": 33, "readlink": 89, "arch_prctl": 158,
    "time": 201,
}  # fmt: skip
_X86_64, _AARCH64 = zip(*_CALLS.values(), strict=True)
# (call number, index of the argument that must have none of these bits) of open and openat
_WRITING = 0o3 | 0o100 | 0o1000  # O_WRONLY and O_RDWR, O_CREAT, O_TRUNC: equal on both
_OPEN_X86_64, _OPEN_AARCH64 = ((2, 1), (257, 2)), ((56, 2),)
_ARGUMENT_LISTS = {"ioctl": (0x5401, 0x541B, 0x5450, 0x5451), "fcntl": (0, 1, 2, 3, 4, 1030)}
# TCGETS, FIONREAD, FIONCLEX, FIOCLEX; F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
_MACHINES = {
    "x86_64": (0xC000003E, [*_X86_64, *_X86_64_CALLS.values()], _OPEN_X86_64, {"ioctl": 16, "fcntl": 72}),
    "aarch64": (0xC00000B7, _AARCH64, _OPEN_AARCH64, {"ioctl": 29, "fcntl": 25}),
}

# instructions of the classic packet filter, linux/bpf_common.h
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16  # bytes in struct seccomp_data; an argument has 8


def syscall_filter() -> bytes:
    """Returns the filter as an array of struct sock_filter for this machine; empty for an unsupported one."""
    machine = _MACHINES.get(platform.machine())
    if machine is None or sys.platform != "linux" or sys.byteorder != "little" or sys.maxsize < 2**32:
        return b""
    audit_machine, plain, openings, with_arguments = machine
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    # kill calls of another instruction set (32-bit on x86_64), whose numbers differ
    code = [(_LOAD, 0, 0, _MACHINE_AT), (_IF_EQUAL, 1, 0, audit_machine), (_RETURN, 0, 0, _KILL_PROCESS)]
    code += [(_LOAD, 0, 0, _NUMBER_AT)]
    for number in plain:
        code += [(_IF_EQUAL, 0, 1, number), allow]
    for number, argument in openings:
        code += [(_IF_EQUAL, 0, 5, number), (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), (_AND, 0, 0, _WRITING)]
        code += [(_IF_EQUAL, 0, 1, 0), allow, refuse]
    for name, number in with_arguments.items():
        allowed = _ARGUMENT_LISTS[name]
        code += [(_IF_EQUAL, 0, 2 + 2 * len(allowed), number), (_LOAD, 0, 0, _ARGUMENTS_AT + 8)]
        for value in allowed:
            code += [(_IF_EQUAL, 0, 1, value), allow]
        code += [refuse]
    code += [refuse]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


Protection = Literal["kernel filter", "audit hook"]
_PROTECTIONS: dict[bytes, Protection] = {b"K": "kernel filter", b"A": "audit hook"}
_CHILD = Path(__file__).with_name("sandbox_child.py")
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
    command = [sys.executable, "-S", "-s", "-B", "-c", _CHILD.read_text(encoding="utf-8")]
    command += [str(cpu_s), str(memory_bytes), syscall_filter().hex()]
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
    environment |= {key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"}
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
        failed = "The process for a program's tests did not start"
        if not in_time:
            raise SandboxError(f"{failed} within {_CLOCK_PER_CPU_S * timeout_s:g} s.")
        hint = "Give it more memory, or check that this Python runs with -S."
        raise SandboxError(f"{failed} (exit code {exit_code}).", hint)
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
