"""Runs a small Python program written by a model, and reports whether it reached its end without an error.

Each program has its own process with limits on processor time, memory, files and processes, an empty folder, no
standard input, and discarded output. The kernel's filter (syscalls.py) blocks the network, new processes, signals to
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

# Linux: unistd_64.h (x86_64) and asm-generic/unistd.h (aarch64)
_X86_64 = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "dup": 32, "dup2": 33,
    "nanosleep": 35, "getitimer": 36, "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79,
    "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104,
    "geteuid": 107, "getegid": 108, "getppid": 110, "rt_sigpending": 127, "sigaltstack": 131, "arch_prctl": 158,
    "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "dup3": 292, "getcpu": 309, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334,
    "faccessat2": 439,
}  # fmt: skip
_AARCH64 = {
    "getcwd": 17, "dup": 23, "dup3": 24, "faccessat": 48, "close": 57, "getdents64": 61, "lseek": 62, "read": 63,
    "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pselect6": 72, "ppoll": 73, "readlinkat": 78,
    "newfstatat": 79, "fstat": 80, "exit": 93, "exit_group": 94, "set_tid_address": 96, "futex": 98,
    "set_robust_list": 99, "nanosleep": 101, "getitimer": 102, "setitimer": 103, "clock_gettime": 113,
    "clock_getres": 114, "clock_nanosleep": 115, "sched_getaffinity": 123, "sched_yield": 124, "restart_syscall": 128,
    "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigpending": 136, "rt_sigreturn": 139,
    "times": 153, "uname": 160, "getrusage": 165, "getcpu": 168, "gettimeofday": 169, "getpid": 172, "getppid": 173,
    "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178, "sysinfo": 179, "brk": 214,
    "munmap": 215, "mremap": 216, "mmap": 222, "fadvise64": 223, "mprotect": 226, "madvise": 233, "getrandom": 278,
    "membarrier": 283, "statx": 291, "rseq": 293, "faccessat2": 439,
}  # fmt: skip
# (call number, index of the argument that must have none of these bits)
_WRITING = 0o3 | 0o100 | 0o1000  # O_WRONLY and O_RDWR, O_CREAT, O_TRUNC: equal on both
_OPEN_X86_64 = ((2, 1), (257, 2))  # open, openat
_OPEN_AARCH64 = ((56, 2),)
_ARGUMENT_LISTS = {"ioctl": (0x5401, 0x541B, 0x5450, 0x5451), "fcntl": (0, 1, 2, 3, 4, 1030)}
# TCGETS, FIONREAD, FIONCLEX, FIOCLEX; F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
_MACHINES = {
    "x86_64": (0xC000003E, _X86_64, _OPEN_X86_64, {"ioctl": 16, "fcntl": 72}),
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
    for number in plain.values():
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
