"""`moeedge devices` and what the commands say to a device that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge import native
from moeedge.hardware import gpus, nvidia, rpc
from moeedge.ui.console import stdout_console
from moeedge.ui.machine_views import print_devices
from tests.support.commands import run, run_json


def test_table_names_every_device_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    result = run("devices")
    assert result.exit_code == 0
    for device in native.devices():  # workers' devices of earlier tests are not this machine's
        assert (device.name in result.stdout) == (device.kind != "RPC")
    assert "emulated: " in result.stdout
    assert "rpc://HOST:PORT" in result.stdout
    assert ("GGML_RPC=on" in result.stdout) == (not rpc.is_built_in())


def test_json_has_bytes() -> None:
    rows = {row["name"]: row for row in run_json("devices")}
    keys = {"name", "kind", "description", "free_bytes", "total_bytes", "usable", "remark", "file"}
    assert set(rows["CPU"]) == keys
    assert rows["CPU"]["file"] is None
    assert rows["CPU"]["total_bytes"] >= rows["CPU"]["free_bytes"] > 0
    assert rows["emulated"]["usable"]
    assert rows["rpc://HOST:PORT"]["total_bytes"] is None


def test_a_driver_without_cuda_is_said_in_one_line_that_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moeedge.hardware.devices import list_devices

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    monkeypatch.setattr(nvidia, "cards", lambda: ("NVIDIA [Made] Up",))
    monkeypatch.setattr(native, "devices", lambda: [native.Device("CPU", "CPU", "a processor", 8, 8, "CPU")])
    print_devices(list_devices(), stdout_console())
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("NVIDIA [Made] Up: "))
    assert "--backend FILE" in line
    command = 'CMAKE_ARGS="-DGGML_CUDA=on" pip install --no-cache-dir --force-reinstall --no-deps llama-cpp-python=='
    assert command in line
