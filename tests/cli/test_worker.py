"""`moeedge worker`: what it refuses, what it prints, how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import pytest

from moeedge.errors import DeviceError
from moeedge.hardware import rpc
from tests.support.commands import refused, run
from tests.support.worker import WorkerProcess, start_worker

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)


def test_without_rpc() -> None:
    if rpc.is_built_in():
        pytest.skip("llama.cpp was built with RPC")
    result = run("worker")
    assert result.exit_code == 1
    assert 'CMAKE_ARGS="-DGGML_RPC=on" pip install --no-cache-dir --force-reinstall' in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--listen", "0.0.0.0:0"], "no authentication"),
        (["--listen", "192.0.2.1:0"], "--insecure-listen"),
        (["--listen", "127.0.0.1"], "HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], '"99999"'),
        (["--listen", "[::1]:50052"], "IPv4"),
        (["--listen", "missing.invalid:0"], "'missing.invalid'"),
        (["--listen", "192.0.2.1:0", "--insecure-listen"], "192.0.2.1:0 "),
        (["--device", "CUDA77"], "'CUDA77'"),
        (["--threads", "-1"], "--threads"),
    ],
)
def test_what_it_refuses(needs_rpc: None, arguments: list[str], complaint: str) -> None:
    assert complaint in refused("worker", *arguments)


def test_a_port_in_use(needs_rpc: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused("worker", "--listen", f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in message and "in use" in message


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_line_and_the_exit_code_of_the_signal(worker: WorkerProcess, signum: signal.Signals, code: int) -> None:
    assert worker.line.startswith("Serving CPU (")
    process = worker.process
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (code, "", "")


def test_insecure_listen(needs_rpc: None) -> None:
    with start_worker("--insecure-listen", listen="0.0.0.0:0") as worker:
        port = worker.endpoint.rsplit(":", 1)[1]
        assert rpc.greet(f"127.0.0.1:{port}").n_devices == 1


def test_sessions_one_after_the_other(worker: WorkerProcess) -> None:
    """Each in a process of its own, as users have them; the second gets the memory that the first gave back."""
    program = (
        "import sys; from moeedge.llama import library; library.start();"
        "from moeedge.hardware.devices import resolve; from moeedge.hardware.spec import DeviceSpec;"
        "print(resolve(DeviceSpec.parse(sys.argv[1])).ggml_name)"
    )
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", program, worker.device], capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stdout) == (0, "RPC0\n"), ran.stderr
    assert worker.process.poll() is None


def test_a_second_session_at_once_is_told_that_it_is_busy(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = worker.endpoint.split(":")
    monkeypatch.setattr(rpc, "_ANSWER_S", 0.5)
    with socket.create_connection((host, int(port))), pytest.raises(DeviceError, match="busy"):
        rpc.greet(worker.endpoint)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # the first has left: the worker has noticed as soon as it reads
        try:
            assert rpc.greet(worker.endpoint).n_devices == 1
            return
        except DeviceError:
            time.sleep(0.05)
    pytest.fail("the worker stayed busy")
