"""Whole sessions whose experts are loaded on demand: files in parts or in memory, and files that others change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import MoeedgeError
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from tests.conftest import TinyFactory
from tests.lossless.conftest import PROMPT
from tests.support.hybrid import MANY_EXPERTS, greedy_answer
from tests.support.split_files import split

N_PREDICT = 12
_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def path(tiny: TinyFactory) -> Path:
    return tiny("qwen3moe", layers=4, experts=MANY_EXPERTS)


def config_of(path: Path, ratio: float = 0.3) -> EngineConfig:
    tensors, _ = expert_tensors(path)
    ram = int(ratio * expert_bytes(tensors)) + MANY_EXPERTS
    return EngineConfig(model=path, gamma=0, n_ctx=512, n_threads=1, device="none", ram=ram)


def answer(path: Path) -> list[int]:
    with Session.open(config_of(path)) as session:
        assert session.info.device == "RAM"
        return greedy_answer(session, PROMPT, N_PREDICT)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[int]:
    config = EngineConfig(model=path, gamma=0, n_ctx=512, n_threads=1, device="none", mode="stock")
    with Model.load(path, storage="mapped") as model, Session.open(config, model=model) as session:
        return greedy_answer(session, PROMPT, N_PREDICT)


def test_a_file_in_parts(path: Path, expected: list[int], tmp_path: Path) -> None:
    files = split(path, tmp_path)
    assert len(files) > 1
    assert answer(files[0]) == expected


@pytest.mark.skipif(not os.access(_MEMORY, os.W_OK), reason="needs a file system in memory")
def test_a_file_system_without_direct_reads(path: Path, expected: list[int]) -> None:
    copy = _MEMORY / f"moeedge-test-{os.getpid()}.gguf"
    try:
        shutil.copy(path, copy)
        assert answer(copy) == expected
    finally:
        copy.unlink(missing_ok=True)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touch(path: Path) -> None:
    os.utime(path, (0, 0))


def replace_file(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere dense weights are mapped")
@pytest.mark.parametrize("change", [cut_off, touch, replace_file, Path.unlink])
def test_a_file_that_others_change(
    path: Path, expected: list[int], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Answers stay right while what they need is in RAM, then end with a sentence that names the file."""
    copy = tmp_path / "model.gguf"
    shutil.copy(path, copy)
    with Session.open(config_of(copy)) as session:
        assert greedy_answer(session, PROMPT, N_PREDICT) == expected
        time.sleep(0.01)  # a file system's clock has ticks
        change(copy)
        if not copy.exists() or change is replace_file:
            time.sleep(2.1)  # paths are looked up every two seconds
        with pytest.raises(MoeedgeError) as raised:
            for shift in range(20):
                greedy_answer(session, [(token + shift) % 256 for token in PROMPT], N_PREDICT)
        assert raised.value.message.startswith("Expert ") and str(copy) in raised.value.message and raised.value.hint
        with pytest.raises(MoeedgeError):
            greedy_answer(session, list(range(200)), N_PREDICT)


@pytest.mark.slow
def test_two_processes_on_one_file(path: Path) -> None:
    command = [sys.executable, "-m", "moeedge", "chat", "-m", str(path), "-md", "none", "-c", "512", "-t", "1", "--raw"]
    command += ["-p", "tell me of the sea", "-n", "40", "--temp", "0", "-dev", "none"]
    mapped = subprocess.run([*command, "--ram", "off"], capture_output=True, timeout=120, check=True).stdout
    both = [subprocess.Popen([*command, "--ram", "200KiB"], stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in both] == [mapped, mapped]
