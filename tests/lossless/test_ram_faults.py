"""Experts loaded on demand from a disk that fails, is slow, or whose file changes: no wrong token, a clear error.

Contexts alone, then whole sessions: also files in parts or in memory.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import MoeedgeError
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.llama.model import Model
from moeedge.native.abi import ReadFault
from moeedge.native.cache import ExpertCache
from tests.conftest import TinyFactory
from tests.lossless.conftest import PROMPT
from tests.support.experts import ask, fail_reads
from tests.support.hybrid import MANY_EXPERTS, greedy_answer
from tests.support.hybrid_driver import churn
from tests.support.ram_driver import decode, file_context, ram_context
from tests.support.split_files import split

SLOW_BYTES_PER_S = 2e6
N_PREDICT = 12
_MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.fixture(scope="module")
def expected(many: Path) -> list[np.ndarray]:
    """Stock's logits, with the kernels of a file that does not fit."""
    with file_context(many) as context:
        return decode(context)


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("ratio", [0.1, 0.4])
def test_loads_fail_now_and_then_while_plans_change(many: Path, expected: list[np.ndarray], ratio: float) -> None:
    """A plan neither drops what a block waits for nor comes before it; every 20th read fails at first."""
    with ram_context(many, ratio) as (context, cache), churn(cache, seed=2):
        for round_number in range(6):
            fail_reads(cache, list(ReadFault)[round_number % 4], 20, 0.001)
            cache.set_readers(1 + round_number % 3, 4096 << round_number % 3)
            assert_equal(decode(context), expected)
        assert cache.stats().failed == 0
        assert cache.stats().evictions > 0


def plan_nothing(cache: ExpertCache) -> None:
    ask(cache, [])


@pytest.mark.parametrize("disturb", [plan_nothing, ExpertCache.clear])
def test_what_a_block_waits_for_is_not_dropped(
    many: Path, expected: list[np.ndarray], disturb: Callable[[ExpertCache], None]
) -> None:
    """More experts are wanted than slots are free, so that some wait in the queue that a plan or a clear empties."""
    with ram_context(many, 0.1, disk_bytes_per_s=SLOW_BYTES_PER_S) as (context, cache):
        found: list[list[np.ndarray]] = []
        decoding = threading.Thread(target=lambda: found.append(decode(context)), daemon=True)
        start_s = time.monotonic()
        decoding.start()
        while decoding.is_alive() and time.monotonic() < start_s + 20.0:
            disturb(cache)
            time.sleep(0.001)
        seconds = time.monotonic() - start_s
        assert not decoding.is_alive(), "a wanted expert was forgotten"
        assert_equal(found[0], expected)
        stats = cache.stats()
        if disturb is plan_nothing:
            assert seconds > 0.9 * stats.bytes_moved / SLOW_BYTES_PER_S - 0.02
            assert stats.wait_s > 0.5 * stats.transfer_s, "the blocks waited for the slow disk"
        cache.clear()
        assert cache.stats().slots_used == 0


def test_a_disk_that_fails_ends_the_decode(many: Path, expected: list[np.ndarray]) -> None:
    """And the next one is right, if the disk is."""
    with ram_context(many, 0.3) as (context, cache):
        decode(context)
        fail_reads(cache, ReadFault.EIO, 1)
        with pytest.raises(MoeedgeError):
            for _ in range(20):
                decode(context)
        assert "Input/output error" in cache.reader().error
        assert cache.stats().pinned == 0
        fail_reads(cache, ReadFault.EIO, 0)
        assert cache.drain(10.0)  # what was under way fails, too
        assert_equal(decode(context), expected)


@pytest.mark.parametrize("n_before", [0, 1], ids=["at-once", "later"])
def test_without_a_thread_that_reads_the_mapped_file_is_computed_from(
    many: Path, expected: list[np.ndarray], n_before: int
) -> None:
    """From the middle of the block on whose experts cannot be loaded."""
    with ram_context(many, 0.1) as (context, cache):
        for _ in range(n_before):
            assert_equal(decode(context), expected)
        fail_reads(cache, ReadFault.THREADS, 1)
        for _ in range(2):
            assert_equal(decode(context), expected)
        assert cache.trouble() == (True, 0)
        assert cache.stats().pinned == 0


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/self/smaps")
def test_the_mapped_file_is_never_touched(many: Path, expected: list[np.ndarray]) -> None:
    with ram_context(many, 0.3) as (context, _cache):
        assert_equal(decode(context), expected)
        name, in_memory_kib = "", []
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
            if "-" in line.split(" ", 1)[0]:
                name = line.split(maxsplit=5)[-1]
            elif line.startswith("Rss:") and name == str(many.resolve()):
                in_memory_kib.append(int(line.split()[1]))
        assert in_memory_kib and sum(in_memory_kib) == 0


# whole sessions


@pytest.fixture(scope="module")
def path(tiny: TinyFactory) -> Path:
    return tiny("qwen3moe", layers=4, experts=MANY_EXPERTS)


def config_of(path: Path) -> EngineConfig:
    ram = int(0.3 * expert_bytes(expert_tensors(path)[0])) + MANY_EXPERTS
    return EngineConfig(model=path, gamma=0, n_ctx=512, n_threads=1, device="none", ram=ram)


def answer(path: Path) -> list[int]:
    with Session.open(config_of(path)) as session:
        assert session.info.device == "RAM"
        return greedy_answer(session, PROMPT, N_PREDICT)


@pytest.fixture(scope="module")
def tokens(path: Path) -> list[int]:
    """Stock's answer, with the kernels of a file that does not fit."""
    config = EngineConfig(model=path, gamma=0, n_ctx=512, n_threads=1, device="none", mode="stock")
    with Model.load(path, storage="mapped") as model, Session.open(config, model=model) as session:
        return greedy_answer(session, PROMPT, N_PREDICT)


def test_a_file_in_parts(path: Path, tokens: list[int], tmp_path: Path) -> None:
    files = split(path, tmp_path)
    assert len(files) > 1
    assert answer(files[0]) == tokens


@pytest.mark.skipif(not os.access(_MEMORY, os.W_OK), reason="needs a file system in memory")
def test_a_file_system_without_direct_reads(path: Path, tokens: list[int]) -> None:
    copy = _MEMORY / f"moeedge-test-{os.getpid()}.gguf"
    try:
        shutil.copy(path, copy)
        assert answer(copy) == tokens
    finally:
        copy.unlink(missing_ok=True)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touch(path: Path) -> None:
    os.utime(path, (0, 0))


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        for tensor in expert_tensors(path)[0]:
            file.seek(tensor.offset)
            file.write(os.urandom(tensor.stride))


def replace_file(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere dense weights are mapped")
@pytest.mark.parametrize("change", [cut_off, touch, overwrite, replace_file, Path.unlink])
def test_a_file_that_others_change(
    path: Path, tokens: list[int], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Answers stay right while what they need is in RAM, then end with a sentence that names the file."""
    copy = Path(shutil.copy(path, tmp_path / "model.gguf"))
    prompts = [[(token + shift) % 256 for token in PROMPT] for shift in range(20)]
    with Session.open(config_of(path)) as session:
        right = [greedy_answer(session, prompt, N_PREDICT) for prompt in prompts]
    with Session.open(config_of(copy)) as session:
        assert greedy_answer(session, PROMPT, N_PREDICT) == tokens == right[0]
        time.sleep(0.01)  # a file system's clock has ticks
        change(copy)
        if not copy.exists() or change is replace_file:
            time.sleep(2.1)  # paths are looked up every two seconds
        with pytest.raises(MoeedgeError) as raised:
            for prompt, expected in zip(prompts, right, strict=True):
                assert greedy_answer(session, prompt, N_PREDICT) == expected
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
