"""Runs a small Python program written by a model, and reports whether it reached its end without an error.

Each program has its own process with limits on processor time, memory, files and processes, an empty folder, no
standard input, and discarded output. The kernel's filter (seccomp, built by libseccomp) blocks the network, new
processes, signals to others and every file opened for writing; where it cannot be installed, nothing is run. Where
bubblewrap is installed and works, the program sees Python and the system's libraries alone, no file of the user's.
`SandboxResult.protection` names what is in use.

This protects from programs that are wrong, and the machine from the others; one that looks for this module's variables
can still claim to have passed.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import select
import shutil
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

_CALLS = """
    access arch_prctl brk clock_getres clock_gettime clock_nanosleep close dup dup2 dup3 exit exit_group faccessat
    faccessat2 fadvise64 fstat futex getcpu getcwd getdents64 getegid geteuid getgid getitimer getpid getppid getrandom
    getrusage gettid gettimeofday getuid lseek lstat madvise membarrier mmap mprotect mremap munmap nanosleep newfstatat
    poll ppoll pread64 pselect6 read readlink readlinkat readv restart_syscall rseq rt_sigaction rt_sigpending
    rt_sigprocmask rt_sigreturn sched_getaffinity sched_yield select set_robust_list set_tid_address setitimer
    sigaltstack stat statx sysinfo time times uname write writev
"""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OPENINGS = {"open": 1, "openat": 2}  # index of the argument that must have none of these bits
# requests that change nothing outside: TCGETS, FIONREAD, FIONCLEX, FIOCLEX; F_DUPFD, F_GETFD, ..., F_DUPFD_CLOEXEC
_REQUESTS = {"ioctl": (0x5401, 0x541B, 0x5450, 0x5451), "fcntl": (0, 1, 2, 3, 4, 1030)}
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
_NEEDS_FILTER = "Programs that a model writes run only under the kernel's filter"


@lru_cache
def syscall_filter() -> bytes:
    """Returns the filter as an array of struct sock_filter for this machine. Raises SandboxError without libseccomp."""
    try:
        import pyseccomp

        made = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))

        def allow(name: str, *arguments: pyseccomp.Arg) -> None:
            if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) != _UNKNOWN_CALL:  # to an old libseccomp
                made.add_rule(pyseccomp.ALLOW, name, *arguments)

        for name in _CALLS.split():
            allow(name)
        for name, argument in _OPENINGS.items():
            allow(name, pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, _WRITING, 0))
        for name, values in _REQUESTS.items():
            for value in values:
                allow(name, pyseccomp.Arg(1, pyseccomp.EQ, value))
        with os.fdopen(os.memfd_create("filter"), "r+b") as file:
            made.export_bpf(file)
            file.seek(0)
            return file.read()
    except (ImportError, RuntimeError, AttributeError, OSError) as error:  # the module; the library that it loads
        hint = 'Install what makes it: pip install "moeedge[score]", and libseccomp2 (Debian) or libseccomp (others).'
        raise SandboxError(f"{_NEEDS_FILTER}, which cannot be made ({error}).", hint) from None


def _bubblewrap(program: str, folder: str) -> list[str]:
    """Command in front of a program: an own root with Python and the system's libraries, `folder` empty."""
    pythons = sorted({Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]})
    shown = [str(python / part) for python in pythons for part in ("bin", "lib", "lib64", "pyvenv.cfg")]
    shown += [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if _is_library_folder(Path(path))]
    words = [program, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    for path in (*_SYSTEM, *shown):
        words += ["--ro-bind-try", path, path]
    return [*words, "--dev", "/dev", "--dir", folder, "--chdir", folder]


def _is_library_folder(path: Path) -> bool:
    """Whether showing it shows neither the user's home nor the current folder."""
    return path.is_absolute() and not {path, path.resolve()} & {*(own := Path.home()).parents, own, *Path.cwd().parents}


@lru_cache
def _find_bubblewrap() -> str | None:
    """Its path, where it is installed and may make namespaces here."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    words = [*_bubblewrap(program, "/run/moeedge"), sys.executable, "-S", "-c", "pass"]
    try:
        works = subprocess.run(words, capture_output=True, timeout=_TRIAL_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return None
    return program if works else None


Protection = Literal["kernel filter", "kernel filter and bubblewrap"]
_CHILD = Path(__file__).with_name("sandbox_child.py")
_REPORT_BYTES = 4096
# processor time decides, so that a busy machine changes no result; wall time only ends programs that sleep
_CLOCK_PER_CPU_S = 4.0
_LEAST_CLOCK_S = 5.0  # a busy machine takes so long to start a process
_POLL_S, _TRIAL_S = 0.005, 10.0
_UNKNOWN_CALL = -1
_BY_SIGNAL = 128  # bubblewrap's exit code for a program that a signal ended is this plus the signal


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended; `reason` is one line, empty when it passed."""

    passed: bool
    reason: str
    protection: Protection


def run_python(source: str, *, timeout_s: float = 5.0, memory_bytes: int = 512 * 2**20) -> SandboxResult:
    """Runs `source` as a program; it passes if it reaches its last line without an error.

    Leaving early, also by os._exit(0) or sys.exit, does not pass. timeout_s: processor time, rounded up to whole
    seconds; wall time is limited to four times as much, at least 5 s. Raises SandboxError if the process cannot start
    or be isolated.
    """
    token = secrets.token_hex(16).encode()
    cpu_s = max(1, math.ceil(timeout_s))
    command = [sys.executable, "-S", "-s", "-B", "-c", _CHILD.read_text(encoding="utf-8")]
    command += [str(cpu_s), str(memory_bytes), syscall_filter().hex()]
    bubblewrap = _find_bubblewrap()
    deadline_s = time.monotonic() + _clock_s(timeout_s)
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
    exit_code = process.returncode
    if bubblewrap and exit_code - _BY_SIGNAL in set(signal.Signals):
        exit_code = _BY_SIGNAL - exit_code
    guarded: Protection = "kernel filter and bubblewrap" if bubblewrap else "kernel filter"
    return _judge(report, token, exit_code, in_time, timeout_s, guarded)


def _clock_s(timeout_s: float) -> float:
    return max(_CLOCK_PER_CPU_S * timeout_s, _LEAST_CLOCK_S)


@contextmanager
def _started(command: list[str], folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process in its own group and kills the group when the block ends."""
    # a fixed hash seed keeps the order of sets on every run
    environment = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    environment |= {key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"}
    if (program := _find_bubblewrap()) is not None:
        command = [*_bubblewrap(program, folder), *command]
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


def protection() -> Protection:
    """Returns the protection of programs on this machine. Raises SandboxError where they cannot be isolated."""
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


def _judge(
    report: bytes, token: bytes, exit_code: int, in_time: bool, timeout_s: float, guarded: Protection
) -> SandboxResult:
    before, *parts = report.split(token)
    if before or not parts or parts[0][:1] not in (b"K", b"N"):
        failed = "The process for a program's tests did not start"
        if not in_time:
            raise SandboxError(f"{failed} within {_clock_s(timeout_s):g} s.")
        hint = "Give it more memory, or check that this Python runs with -S."
        raise SandboxError(f"{failed} (exit code {exit_code}).", hint)
    if parts[0][:1] == b"N":
        raise SandboxError(
            f"{_NEEDS_FILTER}, which this kernel does not take.",
            "Leave out --run-code, or use a kernel with seccomp (CONFIG_SECCOMP_FILTER).",
        )
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
