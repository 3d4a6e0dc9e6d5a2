"""Experts loaded on demand from a disk that fails, is slow, or whose file changes: no wrong token, a clear error."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from moeedge.errors import MoeedgeError
from moeedge.llama.context import Context
from moeedge.llama.gguf_file import expert_tensors
from moeedge.llama.model import Model
from moeedge.native.abi import ReadFault
from tests.conftest import TinyFactory
from tests.support.hybrid import MANY_EXPERTS
from tests.support.hybrid_driver import churn
from tests.support.ram_driver import decode, ram_context

SLOW_BYTES_PER_S = 2e6


@pytest.fixture(scope="module")
def path(tiny: TinyFactory) -> Path:
    return tiny("qwen3moe", experts=MANY_EXPERTS)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[np.ndarray]:
    """Stock's logits, with the kernels of a file that does not fit."""
    with Model.load(path, storage="mapped") as model, Context(model, n_ctx=512, n_threads=1, mode="stock") as context:
        return decode(context)


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("ratio", [0.1, 0.4])
def test_loads_fail_now_and_then_while_plans_change(path: Path, expected: list[np.ndarray], ratio: float) -> None:
    """A plan neither drops what a block waits for nor comes before it; every 20th read fails at first."""
    with ram_context(path, ratio) as (context, cache), churn(cache, seed=2):
        for round_number in range(6):
            cache.set_read_faults(list(ReadFault)[round_number % 4], 20, 0.001)
            cache.set_readers(1 + round_number % 3, 4096 << round_number % 3)
            assert_equal(decode(context), expected)
        assert cache.stats().failed == 0
        assert cache.stats().evictions > 0


def test_a_plan_leaves_what_a_block_waits_for(path: Path, expected: list[np.ndarray]) -> None:
    """More experts are wanted than slots are free, so that some wait in the queue that the plan replaces."""
    with ram_context(path, 0.1, disk_bytes_per_s=SLOW_BYTES_PER_S) as (context, cache):
        found: list[list[np.ndarray]] = []
        decoding = threading.Thread(target=lambda: found.append(decode(context)), daemon=True)
        decoding.start()
        nothing = np.zeros((0, 2), dtype=np.int32)
        deadline_s = time.monotonic() + 20.0
        while decoding.is_alive() and time.monotonic() < deadline_s:
            cache.plan(nothing, np.zeros(0, dtype=np.uint8), nothing, np.zeros(0, dtype=np.float32))
            time.sleep(0.001)
        assert not decoding.is_alive(), "a wanted expert was forgotten"
        assert_equal(found[0], expected)


def test_clearing_leaves_what_a_block_waits_for(path: Path, expected: list[np.ndarray]) -> None:
    with ram_context(path, 0.1, disk_bytes_per_s=SLOW_BYTES_PER_S) as (context, cache):
        found: list[list[np.ndarray]] = []
        decoding = threading.Thread(target=lambda: found.append(decode(context)), daemon=True)
        decoding.start()
        deadline_s = time.monotonic() + 20.0
        while decoding.is_alive() and time.monotonic() < deadline_s:
            cache.clear()
            time.sleep(0.001)
        assert not decoding.is_alive(), "a wanted expert was forgotten"
        assert_equal(found[0], expected)
        cache.clear()
        assert cache.stats().slots_used == 0


def test_a_slow_disk_gives_the_same_answer(path: Path, expected: list[np.ndarray]) -> None:
    with ram_context(path, 0.3, disk_bytes_per_s=SLOW_BYTES_PER_S) as (context, cache):
        start_s = time.monotonic()
        assert_equal(decode(context), expected)
        seconds, stats = time.monotonic() - start_s, cache.stats()
        assert seconds > 0.9 * stats.bytes_moved / SLOW_BYTES_PER_S - 0.02
        assert stats.wait_s > 0.5 * stats.transfer_s, "the blocks waited for it"


def test_a_disk_that_fails_ends_the_decode(path: Path, expected: list[np.ndarray]) -> None:
    """And the next one is right, if the disk is."""
    with ram_context(path, 0.3) as (context, cache):
        decode(context)
        cache.set_read_faults(ReadFault.EIO, 1)
        with pytest.raises(MoeedgeError):
            for _ in range(20):
                decode(context)
        assert "Input/output error" in cache.reader().error
        assert cache.stats().pinned == 0
        cache.set_read_faults(ReadFault.EIO, 0)
        assert cache.drain(10.0)  # what was under way fails, too
        assert_equal(decode(context), expected)


@pytest.mark.parametrize("n_before", [0, 1], ids=["at-once", "later"])
def test_without_a_thread_that_reads_the_mapped_file_is_computed_from(
    path: Path, expected: list[np.ndarray], n_before: int
) -> None:
    """From the middle of the block on whose experts cannot be loaded."""
    with ram_context(path, 0.1) as (context, cache):
        for _ in range(n_before):
            assert_equal(decode(context), expected)
        cache.set_read_faults(ReadFault.THREADS, 1)
        for _ in range(2):
            assert_equal(decode(context), expected)
        assert cache.trouble() == (True, 0)
        assert cache.stats().pinned == 0


def test_a_file_that_changes_gives_no_wrong_token(path: Path, expected: list[np.ndarray], tmp_path: Path) -> None:
    """Answers are right until a changed expert would be needed; then there are none."""
    copy = tmp_path / "model.gguf"
    shutil.copy(path, copy)
    with ram_context(copy, 0.3) as (context, cache):
        assert_equal(decode(context), expected)
        tensors, _ = expert_tensors(copy)
        with copy.open("r+b") as file:
            for tensor in tensors:
                file.seek(tensor.offset)
                file.write(os.urandom(tensor.stride))
        with pytest.raises(MoeedgeError):
            for _ in range(20):
                assert_equal(decode(context), expected)
        assert f"{copy} was changed" in cache.reader().error


def test_a_file_that_is_cut_off_ends_with_an_error(path: Path, tmp_path: Path) -> None:
    """In a process of its own, which a signal would end."""
    copy = Path(shutil.copy(path, tmp_path / "model.gguf"))
    code = "import sys; from tests.support.ram_driver import cut_off; cut_off(sys.argv[1])"
    found = subprocess.run([sys.executable, "-c", code, str(copy)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert f"{copy} was changed" in found.stdout


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/self/smaps")
def test_the_mapped_file_is_never_touched(path: Path, expected: list[np.ndarray]) -> None:
    with ram_context(path, 0.3) as (context, _cache):
        assert_equal(decode(context), expected)
        name, in_memory_kib = "", []
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
            if "-" in line.split(" ", 1)[0]:
                name = line.split(maxsplit=5)[-1]
            elif line.startswith("Rss:") and name == str(path.resolve()):
                in_memory_kib.append(int(line.split()[1]))
        assert in_memory_kib and sum(in_memory_kib) == 0
