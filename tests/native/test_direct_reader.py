"""The reader of a cache in RAM: bytes of any place in a file, order, faults, files that change, slow disks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.errors import BackendError, ModelFileError
from moeedge.experts import Residency
from moeedge.native.abi import ReadFault
from moeedge.native.cache import CacheConfig, ExpertCache, ExpertTensor
from tests.support.cache_stress import stress
from tests.support.experts import (
    F32,
    ExpertFile,
    ask,
    assert_bytes,
    carry_out,
    demand,
    drain,
    fail_reads,
    read,
    resident,
    write_experts,
)

ROOT = Path(__file__).parents[2]
LOOK_UP_S = 2.0  # how often a path is looked up (direct-file.cpp)
MEMORY_FOLDER = Path("/dev/shm")  # a file system without blocks


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    """4 layers of 8 experts of 33 KB, whose places are no multiples of a block."""
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin", width=64)


@pytest.fixture
def copied(experts: ExpertFile, tmp_path: Path) -> ExpertFile:
    """A copy of that file for a test that changes it."""
    return replace(experts, path=Path(shutil.copy(experts.path, tmp_path / "copied.bin")))


# bytes


@dataclass
class Parts:
    """Experts at odd places of several files, with gaps between them."""

    files: list[Path]
    tensors: list[ExpertTensor]
    contents: list[bytes]

    def bytes_of(self, tensor: ExpertTensor, expert: int) -> bytes:
        begin = tensor.offset + expert * tensor.stride
        return self.contents[tensor.file][begin : begin + 4 * tensor.ne0 * tensor.ne1]


def write_parts(folder: Path, *, n_layers: int = 5, n_experts: int = 6, n_files: int = 3) -> Parts:
    """Matrices from 4 bytes to 300 KB; those of a layer may lie in different files, the last ends with its file."""
    rng = np.random.default_rng(7)
    ends = [int(rng.integers(1, 9000)) for _ in range(n_files)]
    shapes = {
        "up_exps.weight": (96, 801),
        "down_exps.weight": (33, 31),
        "up_exps.scale": (1, 1),
        "gate_exps.bias": (1025, 1),
    }
    tensors = []
    for layer, (role, (ne0, ne1)) in product(range(n_layers), shapes.items()):
        file = int(rng.integers(n_files))
        size = 4 * ne0 * ne1
        stride = size + int(rng.integers(0, 3)) * int(rng.integers(0, 5000))
        offset = ends[file] + int(rng.integers(0, 5000))
        ends[file] = offset + (n_experts - 1) * stride + size
        name = f"blk.{layer}.ffn_{role}"
        tensors.append(ExpertTensor(layer, F32, ne0, ne1, n_experts, file, offset, stride, name))
    parts = Parts([folder / f"part-{i}.bin" for i in range(n_files)], tensors, [rng.bytes(end) for end in ends])
    for path, content in zip(parts.files, parts.contents, strict=True):
        path.write_bytes(content)
    return parts


@pytest.fixture(scope="module", params=["disk", "memory"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("parts")
    if request.param == "disk":
        yield write_parts(folder)
        return
    if not MEMORY_FOLDER.is_dir():
        pytest.skip("no file system in memory")
    folder = MEMORY_FOLDER / f"moeedge-{os.getpid()}"
    folder.mkdir()
    written = write_parts(folder)
    yield written
    for path in written.files:
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(("n_threads", "piece_bytes"), [(1, 1 << 30), (4, 1 << 20), (8, 4096), (3, 70_001)])
def test_slots_hold_the_bytes_of_the_files(parts: Parts, n_threads: int, piece_bytes: int, buffered: bool) -> None:
    shape = {"n_layers": 5, "n_experts": 6}
    config = CacheConfig(
        device="ram", files=parts.files, tensors=parts.tensors, ratio=1.0, disk_buffered=buffered, **shape
    )
    with ExpertCache(config) as cache:
        cache.set_readers(n_threads, piece_bytes)
        carry_out(cache, list(product(range(5), range(6))))
        assert len(resident(cache)) == 5 * 6
        for tensor, expert in product(parts.tensors, range(6)):
            expected = parts.bytes_of(tensor, expert)
            assert read(cache, tensor.layer, expert, tensor.role, len(expected)) == expected, (tensor.name, expert)
        info = cache.reader()
        assert (info.n_threads, info.piece_bytes, info.retries, info.error) == (n_threads, piece_bytes, 0, "")
        assert info.bytes_read >= cache.stats().bytes_moved
        assert not (buffered and info.is_direct)


def test_two_processes_read_one_file(experts: ExpertFile) -> None:
    command = [sys.executable, "-m", "tests.support.cache_stress", "1.5", "ram"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert stress(experts, 1.5, device="ram") > 0
        assert other.communicate(timeout=60)[0] == "done\n"


# order


def slow(model: ExpertFile, experts_per_s: float) -> CacheConfig:
    return model.config(1.0, device="ram", disk_bytes_per_s=model.expert_bytes * experts_per_s)


def demand_apart(cache: ExpertCache, wanted: list[int]) -> tuple[threading.Thread, list[int]]:
    """A thread that demands experts of the first layer, and what it finds, once it has begun."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(demand(cache, 0, wanted)))
    thread.start()
    while not cache.stats().in_flight:
        time.sleep(0.001)
    return thread, found


@pytest.mark.flaky(reruns=2)
def test_a_slow_disk_takes_its_time(experts: ExpertFile) -> None:
    with ExpertCache(slow(experts, 64.0)) as cache:
        begin_s = time.monotonic()
        carry_out(cache, experts.everything)
        assert time.monotonic() - begin_s > 0.9 * (32 / 64.0 - 0.02)
        assert cache.stats().transfer_s > 0.9 * (32 / 64.0 - 0.02)
        assert assert_bytes(cache, experts) == 32


def test_a_demand_hastens_what_is_under_way(experts: ExpertFile) -> None:
    with ExpertCache(slow(experts, 20.0)) as cache:
        cache.set_readers(1, 4096)
        uploads = experts.everything[:24]
        ask(cache, uploads)
        while np.count_nonzero(cache.copy_residency() == Residency.IN_FLIGHT) < 2:
            time.sleep(0.001)
        last = max(np.argwhere(cache.copy_residency() == Residency.IN_FLIGHT).tolist())
        before = len(resident(cache))
        assert demand(cache, last[0], [last[1]]) == 1
        assert len(resident(cache)) <= before + 2, "those before it came first"
        drain(cache)
        assert resident(cache) == set(uploads)


def test_a_plan_replaces_what_has_not_begun(experts: ExpertFile) -> None:
    with ExpertCache(slow(experts, 20.0)) as cache:
        cache.set_readers(1, 4096)
        ask(cache, experts.everything)
        carry_out(cache, [(3, 1)], priority=[9])
        assert (3, 1) in resident(cache)
        assert len(resident(cache)) < 24
        assert cache.stats().cancelled == 32 - len(resident(cache))
        assert_bytes(cache, experts)


def test_a_plan_leaves_what_is_demanded(experts: ExpertFile) -> None:
    with ExpertCache(slow(experts, 40.0)) as cache:
        waiting, found = demand_apart(cache, list(range(8)))
        ask(cache, [(3, 1)], priority=[255])
        waiting.join()
        assert found == [8]
        assert (3, 1) not in resident(cache), "no priority of a plan is above a demand's"
        drain(cache)
        assert len(resident(cache)) == 9


@pytest.mark.flaky(reruns=2)
def test_closing_drops_what_is_queued(experts: ExpertFile) -> None:
    with ExpertCache(slow(experts, 1.0)) as cache:
        cache.set_readers(4, 4096)
        ask(cache, experts.everything)
        waiting, found = demand_apart(cache, list(range(8)))
        time.sleep(0.1)
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < 5.0, "a disk of one expert per second was waited for"
    waiting.join()
    assert found < [8]


# faults


@pytest.mark.parametrize(
    ("fault", "every", "buffered"),
    [
        *product((fault for fault in ReadFault if fault is not ReadFault.THREADS), (20,), (False, True)),
        # of three threads; by chance many pieces would fail four times, which ends a load
        (ReadFault.EIO, 2, False),
        (ReadFault.END, 2, False),
    ],
)
def test_faults_are_overcome(experts: ExpertFile, fault: ReadFault, every: int, buffered: bool) -> None:
    with ExpertCache(experts.config(1.0, device="ram", disk_buffered=buffered)) as cache:
        cache.set_readers(*((3, 4096) if every == 2 else (2, 8192)))
        fail_reads(cache, fault, every, 0.002)
        carry_out(cache, experts.everything)
        assert assert_bytes(cache, experts) == 32
        assert cache.stats().failed == 0
        if fault is not ReadFault.SHORT:  # less than a block is read again as a whole
            assert (cache.reader().retries > (32 if every == 2 else 0)) == (fault is not ReadFault.DELAY)


@pytest.mark.parametrize(
    ("fault", "sentence"), [(ReadFault.EIO, "Input/output error"), (ReadFault.END, "ended before")]
)
def test_a_disk_that_fails(experts: ExpertFile, fault: ReadFault, sentence: str) -> None:
    with ExpertCache(experts.config(1.0, device="ram")) as cache:
        fail_reads(cache, fault, 1)
        assert demand(cache, 2, [5]) == 0
        error = cache.reader().error
        assert sentence in error and "Expert 5 of layer 2" in error and str(experts.path) in error
        assert (cache.stats().failed, cache.stats().in_flight) == (1, 0)
        fail_reads(cache, fault, 0)
        assert demand(cache, 2, [5]) == 1
        carry_out(cache, experts.everything)
        assert assert_bytes(cache, experts) == 32


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"x")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("change", [overwrite, truncate])
def test_a_file_that_is_changed(copied: ExpertFile, change: Callable[[Path], None]) -> None:
    with ExpertCache(copied.config(1.0, device="ram")) as cache:
        assert demand(cache, 0, [1, 2]) == 2
        time.sleep(0.01)  # a file system's clock has ticks
        change(copied.path)
        assert demand(cache, 0, [3]) == 0
        assert f"{copied.path} was changed" in cache.reader().error
        assert resident(cache) == {(0, 1), (0, 2)}
        with pytest.raises(ModelFileError, match="changed"):
            cache.resize(0.5)


def test_a_file_that_is_deleted_or_replaced(experts: ExpertFile, tmp_path: Path) -> None:
    paths = [Path(shutil.copy(experts.path, tmp_path / name)) for name in ("deleted.bin", "replaced.bin")]
    caches = [ExpertCache(replace(experts, path=path).config(1.0, device="ram")) for path in paths]
    paths[0].unlink()
    (tmp_path / "other.bin").write_bytes(bytes(experts.path.stat().st_size))
    (tmp_path / "other.bin").replace(paths[1])
    time.sleep(LOOK_UP_S + 0.1)
    for path, cache in zip(paths, caches, strict=True):
        with cache:
            assert demand(cache, 0, [3]) == 0
            assert f"{path} was deleted or replaced" in cache.reader().error


def test_bad_arguments(experts: ExpertFile, tmp_path: Path) -> None:
    with ExpertCache(experts.config(0.5, device="ram")) as cache:
        with pytest.raises(BackendError, match="Fewer than one thread"):
            cache.set_readers(0)
        with pytest.raises(BackendError, match="less than one byte"):
            cache.set_readers(1, -1)
    with ExpertCache(experts.config(0.5)) as cache, pytest.raises(BackendError, match="Only a cache in RAM"):
        cache.reader()
    with pytest.raises(BackendError):
        ExpertCache(experts.config(0.5, device="ram", disk_bytes_per_s=-1.0))
    with pytest.raises(ModelFileError, match="cannot be opened"):
        ExpertCache(replace(experts, path=tmp_path / "none.bin").config(0.5, device="ram"))
