"""`moeedge devices`, `doctor`, `ps` and `worker` as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moeedge import native
from moeedge.hardware import rpc
from moeedge.hardware.devices import list_devices
from moeedge.health.doctor import Finding, Report
from moeedge.health.running import command_of
from moeedge.ui.console import stdout_console
from moeedge.ui.machine_views import print_devices, print_report
from tests.support.commands import refused, run, run_json
from tests.support.machine import CPU, Here
from tests.support.worker import WorkerProcess, start_worker


def test_devices_are_named_with_bytes_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    result = run("devices")
    assert result.exit_code == 0
    for device in native.devices():  # workers' devices of earlier tests are not this machine's
        assert (device.name in result.stdout) == (device.kind != "RPC")
    assert "emulated: " in result.stdout and "rpc://HOST:PORT" in result.stdout
    assert ("GGML_RPC=on" in result.stdout) == (not rpc.is_built_in())
    rows = {row["name"]: row for row in run_json("devices")}
    assert rows["CPU"]["file"] is None
    assert rows["CPU"]["total_bytes"] >= rows["CPU"]["free_bytes"] > 0
    assert rows["emulated"]["usable"]
    assert rows["rpc://HOST:PORT"]["total_bytes"] is None


def test_a_driver_without_cuda_is_said_in_one_line_that_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    here.offer(CPU, cards=("NVIDIA [Made] Up",))
    print_devices(list_devices(), stdout_console())
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("NVIDIA [Made] Up: "))
    assert "--backend FILE" in line
    command = 'CMAKE_ARGS="-DGGML_CUDA=on" pip install --no-cache-dir --force-reinstall --no-deps llama-cpp-python=='
    assert command in line


def test_doctor_has_every_topic_and_something_broken_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_json("doctor")
    topics = [finding["topic"] for finding in report["findings"]]
    assert {"library", "GPU", "kernels", "threads", "memory", "models", "disk", "kept files", "variables"} <= {*topics}
    assert set(report["findings"][0]) == {"topic", "status", "text", "hint"}
    assert report["is_broken"] is False
    monkeypatch.setenv("MOEEDGE_CATALOG", "/none/catalog.toml")
    result = run("doctor", "-o", "json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["is_broken"] is True
    assert {finding["topic"] for finding in report["findings"] if finding["status"] == "ok"} >= {"library", "memory"}


def test_doctor_without_llama_cpp(tmp_path: Path) -> None:
    """What fails first in a broken installation."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("raise OSError('no libllama.so')\n")
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-m", "moeedge", "doctor"], {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no libllama.so" in done.stdout and "kept files" in done.stdout


@pytest.mark.parametrize("columns", [80, 100])
def test_doctor_is_one_screen(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding(f"topic {i}", "ok", "a long text " * 20) for i in range(14)]
    findings += [Finding("threads", "warning", "a long text " * 20, "Do something about it.")]
    findings += [Finding("library", "broken", "what is wrong " * 20, "Install it again.")]
    print_report(Report(tuple(findings)), Console(width=columns, force_terminal=True, color_system=None))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= columns for line in lines)
    assert any("Do something about it." in line for line in lines)
    assert sum(line.count("what is wrong") for line in lines) > 20  # entire where it matters


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/usr/bin/python3", "-m", "moeedge", "chat", "-m", "x"], "chat"),
        (["/usr/bin/python3", "/home/me/.venv/bin/moeedge", "bench"], "bench"),
        (["moeedge"], ""),
        (["vim", "moeedge"], None),
        (["/usr/bin/python3", "-m", "pytest", "moeedge"], None),
        ([], None),
    ],
)
def test_command_lines_of_moeedge(words: list[str], command: str | None) -> None:
    assert command_of(words) == command


def test_ps_lists_a_chat_and_its_models(pair: list[str]) -> None:
    command = [sys.executable, "-m", "moeedge", "chat", *pair, "-p", "one two", "-n", "100000", "-dev", "none"]
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen([*command, "--context-shift"], **silent)
    try:
        deadline = time.monotonic() + 60
        mine: list[dict[str, Any]] = []
        while not (mine and len(mine[0]["models"]) == 2) and time.monotonic() < deadline:  # the draft comes last
            assert process.poll() is None
            mine = [row for row in run_json("ps") if row["pid"] == process.pid]
            time.sleep(0.2)
        [row] = mine
        assert row["command"] == "chat" and row["memory_bytes"] > 2**20
        assert set(row["models"]) == {str(Path(pair[1]).resolve()), str(Path(pair[3]).resolve())}
    finally:
        process.kill()
        process.wait()
    assert all(row["pid"] != process.pid for row in run_json("ps"))


def test_a_worker_without_rpc() -> None:
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
def test_what_a_worker_refuses(needs_rpc: None, arguments: list[str], complaint: str) -> None:
    assert complaint in refused("worker", *arguments)


def test_a_port_in_use(needs_rpc: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused("worker", "--listen", f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in message and "in use" in message


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_worker_ends_with_the_exit_code_of_the_signal(
    worker: WorkerProcess, signum: signal.Signals, code: int
) -> None:
    assert worker.line.startswith("Serving CPU (")
    process = worker.process
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (code, "", "")


def test_insecure_listen(needs_rpc: None) -> None:
    with start_worker("--insecure-listen", listen="0.0.0.0:0") as worker:
        port = worker.endpoint.rsplit(":", 1)[1]
        assert rpc.greet(f"127.0.0.1:{port}").n_devices == 1
