"""`moeedge plan` as people and programs call it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moeedge.engine.types import EngineConfig
from moeedge.hardware.devices import ResolvedDevice
from moeedge.native.backends import DRY_RUN_GPU
from moeedge.planning.memory_map import PlannedMachine
from moeedge.planning.planner import Planner
from moeedge.scheduler.config import PlacementConfig
from moeedge.units import parse_gpu_size, parse_size
from tests.conftest import TinyFactory
from tests.support.commands import refused, run, run_json
from tests.support.published import write_qwen3_30b_a3b


def record(*arguments: str) -> dict[str, Any]:
    found = run_json("plan", *arguments)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_qwen3_30b_a3b(tmp_path_factory.mktemp("header") / "[q] 30b.gguf"))


@pytest.mark.parametrize("columns", [60, 120])
def test_the_map_of_a_header_for_a_machine_that_is_not_here(
    header: str, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run("plan", "-m", header, "--vram", "8GiB", "--ram", "32GiB", "-c", "8192").stdout
    for words in ("[q] 30b.gguf", "expert slots: 1,896 of 6,144", "only its header"):
        assert words in " ".join(out.split())
    assert f"moeedge chat -m '{header}' -c 8192 --vram 5166MiB\n" in out
    assert "--cache-ratio" not in out  # which would leave no whole layers to choose
    assert max(len(line) for line in out.splitlines() if header not in line) <= columns


def test_the_command_repeats_what_was_given(header: str) -> None:
    repeated = ["--ctx-size", "8192", "-ctk", "q8_0", "-md", "none", "--draft-max", "3", "-b", "1024"]
    others = ["--vram", "8GB", "--ram", "32GiB", "--reserve", "100MB", "--hf-token", "hf_secret", "--offline", "-v"]
    words = shlex.split(record("-m", header, *repeated[:4], *others, *repeated[4:])["command"])
    assert words[:-2] == ["moeedge", "chat", "-m", header, *repeated] and words[-2] == "--cache-ratio"


def test_the_command_keeps_a_chat_to_the_planned_experts(header: str) -> None:
    """--vram of plan is the GPU, that of chat the memory of experts: on a larger GPU it gives the same slots."""
    planned = record("-m", header, "--vram", "8GiB", "--ram", "32GiB", "-c", "8192")
    words = shlex.split(planned["command"])
    vram_bytes = parse_size(words[words.index("--vram") + 1])
    device = ResolvedDevice(
        "gpu", ggml_name=DRY_RUN_GPU, llama_device=DRY_RUN_GPU, free_bytes=24 * 2**30, total_bytes=24 * 2**30
    )
    config = EngineConfig(model=Path(header), n_ctx=8192, placement=PlacementConfig(vram_bytes=vram_bytes))
    with Planner(config, PlannedMachine(device, 64 * 2**30, 64 * 2**30)) as planner:
        assert planner.map(8192).budget.n_slots == planned["plan"]["cache_slots"]
    whole = record("-m", header, "--vram", "24GB", "--ram", "32GiB")
    assert whole["plan"]["whole_on_gpu"] and "--vram" not in whole["command"]  # a chat finds that out by itself


def test_experts_from_the_file_get_the_planned_memory(header: str) -> None:
    found = record("-m", header, "-dev", "none", "--ram", "12GiB", "-c", "2048")
    words = shlex.split(found["command"])
    slots_bytes = found["ram_tier"]["rows"][0]["slots_bytes"]
    assert 0 <= parse_size(words[words.index("--ram") + 1]) - slots_bytes < 2**20
    measured = record("-m", header, "-dev", "none", "-c", "2048")
    assert "--ram" not in measured["command"]


def test_a_size_in_gb_is_a_card_s(header: str) -> None:
    total = {
        size: record("-m", header, "--vram", size, "-c", "4096")["plan"]["places"][0]["total_bytes"] / 2**20
        for size in ("12GB", "12GiB", "12000MB")
    }
    assert parse_gpu_size("0.5GB") == 5 * 10**8 and parse_gpu_size("24gb") == 24 * 2**30 - 256 * 2**20
    assert total == {"12GB": 12 * 1024 - 256, "12GiB": 12 * 1024, "12000MB": pytest.approx(12e9 / 2**20)}


def test_whole_layers_without_a_gpu_are_not_silent(tiny: TinyFactory) -> None:
    for given, words in ((["-ncmoe", "10"], "-ncmoe has"), (["--cpu-moe", "-ngl", "3"], "-ngl and --cpu-moe have")):
        found = record("-m", str(tiny("qwen3moe")), "-c", "1024", *given)
        assert any(words in note for note in found["notes"])
        assert not {"-ncmoe", "--cpu-moe", "-ngl"} & set(found["command"].split())
    planned = record("-m", str(tiny("qwen3moe")), "-c", "1024", "--vram", "2GiB", "-ncmoe", "2")
    assert "-ncmoe 2" in planned["command"] and not any("-ncmoe" in note for note in planned["notes"])


def test_what_is_refused(header: str, tiny: TinyFactory, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    assert str(path) in refused("plan", "-m", path)
    path.write_bytes(b"MZ" + bytes(40))
    assert "GGUF" in refused("plan", "-m", path)
    assert "vocabular" in refused("plan", "-m", header, "-md", tiny("qwen3"))


@pytest.mark.slow
def test_nothing_is_left_behind_by_ctrl_c_or_a_reader_that_leaves(header: str, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"  # the folder of kept measurements is next to it
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "moeedge", "plan", "-m", header]

    def left_behind() -> list[Path]:
        return list(temporary.glob("moeedge-*"))  # Python tries the folder with a file of its own

    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    piped = subprocess.Popen(command, env=environment, **pipes)
    assert piped.stdout is not None
    piped.stdout.close()
    _, complaints = piped.communicate(timeout=120)
    assert b"Traceback" not in complaints
    stopped = subprocess.Popen(command, env=environment, **pipes)
    while stopped.poll() is None and not left_behind():
        time.sleep(0.01)
    stopped.send_signal(signal.SIGINT)
    _, complaints = stopped.communicate(timeout=120)
    assert stopped.returncode in (0, 130) and b"Traceback" not in complaints
    assert not left_behind()
