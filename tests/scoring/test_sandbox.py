"""Programs in the sandbox: which pass, which fail, and what the sandbox blocks."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import get_args

import psutil
import pytest

from moeedge.errors import SandboxError
from moeedge.scoring import sandbox
from moeedge.scoring.sandbox import Protection, SandboxResult, run_python, syscall_filter

_STANDARD_LIBRARY = """
from dataclasses import dataclass
import collections, datetime, decimal, fractions, hashlib, heapq, itertools, json, math, random, re, string, typing

@dataclass
class Point:
    x: int

assert Point(1).x == 1 and __name__ == "__main__"
assert hashlib.md5(b"x").hexdigest().startswith("9dd4e4")
print("discarded", random.Random(1).random())
if __name__ == "__main__":
    assert json.loads("[1]") == [1]
"""


@pytest.fixture(params=get_args(Protection))
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Protection:
    """The filter alone, and with bubblewrap, where it is installed and works."""
    protection: Protection = request.param
    if protection == "kernel filter":
        monkeypatch.setattr(sandbox, "_find_bubblewrap", lambda: None)
    elif sandbox.protection() != protection:
        pytest.skip("bubblewrap is not installed, or may not make namespaces here")
    return protection


def _run(source: str, guarded: Protection) -> SandboxResult:
    result = run_python(source)
    assert result.protection == guarded
    assert result.passed == (result.reason == "")
    assert "\n" not in result.reason
    return result


@pytest.mark.parametrize("source", ["", "x = 1", _STANDARD_LIBRARY, "x = '\ud800'", "assert {'b', 'a'} == {'a', 'b'}"])
def test_programs_that_reach_their_end_pass(guarded: Protection, source: str) -> None:
    assert _run(source, guarded).passed


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\nassert x == 2, 'not two'", "AssertionError: not two (line 2)"),
        ("def f(:\n", "SyntaxError: invalid syntax (line 1)"),
        ("x = 'a\0b'", "SyntaxError: source code "),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError: "),
        ("raise SystemExit", "it called sys.exit before its end"),
        ("import sys\nsys.exit(0)", "it called sys.exit before its end"),
        ("import os\nos._exit(0)\nassert False", "it left before its end (exit code 0)"),
        ("import os\nos._exit(3)", "it left before its end (exit code 3)"),
        ("input()", "EOFError: "),
        ("import sys\nassert sys.stdin.read() == 'x'", "AssertionError"),
        ("x = bytearray(4 << 30)", "MemoryError (line 1)"),
        ("raise ValueError('a\\nb' + 'c' * 9999)", "ValueError: a bccc"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E", ""),
        ("import atexit\natexit.register(print)\nraise KeyboardInterrupt", "KeyboardInterrupt (line 3)"),
    ],
)
def test_programs_that_stop_early_fail_with_a_reason(guarded: Protection, source: str, reason: str) -> None:
    result = _run(source, guarded)
    assert not result.passed
    assert result.reason.startswith(reason)
    assert len(result.reason) < 400


@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "import os\nos.closerange(0, 64)\nwhile True: pass",
        "while True: print('x' * 100_000)",
    ],
)
def test_endless_programs_are_killed(source: str) -> None:
    begin_s = time.monotonic()
    assert run_python(source, timeout_s=1.0).reason == "it took longer than 1 s"
    assert time.monotonic() - begin_s < 8


def test_growing_memory_is_limited() -> None:
    result = run_python("x = 'a'\nwhile True: x += x", memory_bytes=128 * 2**20)
    assert result.reason == "MemoryError (line 2)"


@pytest.mark.parametrize(
    "attempt",
    [
        "open({file!r}, 'w')",
        "open({file!r}, 'a')",
        "open({file!r}, 'r+')",
        "open('here', 'w')",
        "import os; os.open({file!r}, os.O_RDONLY | os.O_TRUNC)",
        "import os; os.remove({file!r})",
        "import os; os.rename({file!r}, 'x')",
        "import os; os.truncate({file!r}, 0)",
        "import os; os.chmod({file!r}, 0)",
        "import os; os.mkdir({file!r} + 'd')",
        "import os; os.symlink({file!r}, 'x')",
        "import shutil; shutil.copy({file!r}, {file!r} + '2')",
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "import os; os.fork()",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: raise",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.killpg(0, 9)",
        "import os; os.execv('/bin/sh', ['sh'])",
        "import os; os.posix_spawn('/bin/sh', ['sh'], {{}})",
        "import subprocess; subprocess.run(['true'])",
        "import ctypes; assert ctypes.CDLL(None).syscall(41, 2, 1, 0) == 0",
        "import os; assert os.system('true') == 0",
        "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",  # TIOCSTI: a key pressed on the terminal
        "import fcntl; fcntl.fcntl(0, 8, 1)",  # F_SETOWN: signals to another process
        "import multiprocessing; multiprocessing.Process(target=print).start()",
    ],
)
def test_forbidden_calls_are_refused(guarded: Protection, tmp_path: Path, attempt: str) -> None:
    file = tmp_path / "kept.txt"
    file.write_text("kept")
    result = _run(attempt.format(file=str(file)), guarded)
    assert not result.passed
    refusals = ("PermissionError", "AssertionError", "URLError", "FileNotFoundError")  # the last: bubblewrap hides it
    assert result.reason.startswith(refusals if guarded == "kernel filter and bubblewrap" else refusals[:-1])
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert file.read_text() == "kept"


def test_threads_are_refused_too(guarded: Protection) -> None:
    assert _run("import threading\nthreading.Thread(target=print).start()", guarded).reason.startswith("RuntimeError")


def test_bubblewrap_hides_the_files_of_the_user(guarded: Protection, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    result = _run(f"assert open({str(tmp_path / 'key')!r}).read() == 'secret'", guarded)
    assert result.passed == (guarded == "kernel filter")
    assert _run("import os\nassert os.path.exists('/proc/self/environ')", guarded).passed == result.passed


def test_nothing_runs_without_the_kernels_filter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = f"open({str(tmp_path / 'written')!r}, 'w')"
    monkeypatch.setattr(sandbox, "_find_bubblewrap", lambda: None)  # it would hide the file
    with monkeypatch.context() as patch, pytest.raises(SandboxError):
        patch.setattr(sandbox, "syscall_filter", lambda: b"")  # as from a kernel that refuses it
        run_python(written)
    syscall_filter.cache_clear()
    with monkeypatch.context() as patch, pytest.raises(SandboxError) as refused:
        patch.setitem(sys.modules, "pyseccomp", None)
        run_python(written)
    assert "libseccomp" in refused.value.hint and not list(tmp_path.iterdir())


@pytest.mark.parametrize("forged", ["b'P'", "b'x' * 100_000", "b'0' * 32 + b'P'"])
def test_a_report_cannot_be_forged_without_the_token(guarded: Protection, forged: str) -> None:
    source = f"import os\nfor fd in range(64):\n    try: os.write(fd, {forged})\n    except OSError: pass\nos._exit(0)"
    assert not _run(source, guarded).passed


def test_calls_of_another_kind_end_the_program(guarded: Protection) -> None:
    """x32's numbers have a bit of their own on x86_64."""
    if platform.machine() != "x86_64":
        pytest.skip("x86_64 alone has x32")
    source = "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)"  # getpid
    assert _run(source, guarded).reason == "it crashed (SIGSYS)"


def test_the_home_is_no_folder_of_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home/libraries").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "LD_LIBRARY_PATH", ":".join(map(str, ("", ".", "/", tmp_path / "home", tmp_path / "home/libraries")))
    )
    shown = sandbox._bubblewrap("bwrap", "/run/x")
    assert str(tmp_path / "home/libraries") in shown
    assert not {"", ".", "/", str(tmp_path / "home")} & set(shown)


def test_a_program_cannot_redefine_its_end(guarded: Protection) -> None:
    assert not _run("import os\nos.write = os._exit = lambda *a: None\nraise ValueError", guarded).passed


def test_the_folder_is_empty_and_gone_afterwards(guarded: Protection) -> None:
    result = _run("import os\nassert False, os.getcwd() + str(os.listdir())", guarded)
    folder = result.reason.removeprefix("AssertionError: ").partition("[]")[0]
    assert Path(folder).name.startswith("moeedge-run-")
    assert not Path(folder).exists()


def test_sets_have_the_same_order_on_every_run() -> None:
    source = "assert False, list({'a', 'b', 'c', 'd', 'e'})"
    assert run_python(source).reason == run_python(source).reason


def test_a_process_that_cannot_start_raises_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("raise SystemExit(3)")
    with monkeypatch.context() as patch, pytest.raises(SandboxError, match=r"did not start \(exit code 3\)"):
        patch.setattr(sandbox, "_CHILD", tmp_path / "child.py")
        run_python("x = 1\n" * 200_000)  # more than a pipe holds
    with monkeypatch.context() as patch, pytest.raises(SandboxError, match="Cannot start"):
        patch.setattr("sys.executable", "/absent/python")
        patch.setattr(sandbox, "_find_bubblewrap", lambda: None)
        run_python("pass")
    monkeypatch.setattr("tempfile.tempdir", "/absent")
    with pytest.raises(SandboxError, match="Cannot start"):
        run_python("pass")


def test_an_interruption_also_ends_the_program() -> None:
    code = (  # in the background of a shell the signal would be ignored
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from moeedge.scoring.sandbox import run_python; run_python('while True: pass', timeout_s=60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        child = _await_child(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
        assert not _is_running(child)
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        child = _await_child(process.pid)
        process.kill()  # no cleanup by the parent
        process.wait(timeout=20)
        deadline_s = time.monotonic() + 10
        while _is_running(child) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not _is_running(child)


def _await_child(pid: int) -> int:
    """The program that `pid` started, under its filter."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            for child in psutil.Process(pid).children(recursive=True):
                if "Seccomp:\t2" in Path(f"/proc/{child.pid}/status").read_text():
                    return child.pid
        time.sleep(0.02)
    pytest.fail("it never started")


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.flaky(reruns=2)
def test_many_programs_take_little_processor_time() -> None:
    begin_s = time.process_time()  # of this process alone: other load does not count
    for _ in range(20):
        assert run_python("assert sum(range(10)) == 45").passed
    assert time.process_time() - begin_s < 1  # and 0.02 s each on the clock of an idle machine


def test_no_process_is_left_running() -> None:
    before = psutil.Process().children(recursive=True)
    result = run_python("import time\ntime.sleep(60)", timeout_s=0.2)
    assert result.reason == "it took longer than 0.2 s"
    assert psutil.Process().children(recursive=True) == before
    assert signal.getsignal(signal.SIGCHLD) in (signal.SIG_DFL, None)


def test_the_filter_consists_of_complete_instructions() -> None:
    filter_bytes = syscall_filter()
    assert filter_bytes and len(filter_bytes) % 8 == 0
    assert len(filter_bytes) // 8 < 4096  # the kernel's limit
