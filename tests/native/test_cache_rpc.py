"""The expert cache on a device in another process, over llama.cpp's own RPC on loopback; also when the worker dies.

Needs a llama-cpp-python built with CMAKE_ARGS=-DGGML_RPC=on; skips visibly without.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeedge.hardware.devices import resolve
from moeedge.hardware.spec import DeviceSpec
from moeedge.native.cache import ExpertCache
from tests.support.experts import ask, assert_balanced, assert_bytes, drain, write_experts
from tests.support.worker import WorkerProcess

ROOT = Path(__file__).parents[2]
END_S = 60


def ggml_name(worker: WorkerProcess) -> str:
    return resolve(DeviceSpec.parse(worker.device)).ggml_name


def test_remote_slots_hold_the_files_bytes(tmp_path: Path, worker: WorkerProcess) -> None:
    # up to 2 MiB per tensor, so that one is sent in several pieces
    model = write_experts(tmp_path / "experts.bin", n_layers=3, n_experts=6, width=512, wide_layers=(1,))
    device, everything = ggml_name(worker), model.everything
    with ExpertCache(model.config(0.5, device=device, n_stage=2)) as cache:
        assert not cache.info.is_host
        assert not cache.info.unpinned, "a remote worker has no use for pinned memory"
        assert cache.info.staging_bytes > 0
        for turn in range(6):
            ask(cache, everything[turn::2], victims=everything[(turn + 1) % 2 :: 2])
            assert cache.drain(END_S)
            assert assert_bytes(cache, model) > 0
            assert_balanced(cache)
        assert cache.stats().evictions > 0
        cache.clear()
    with ExpertCache(model.config(1.0, device=device)) as again:
        ask(again, everything)
        assert again.drain(END_S)
        assert assert_bytes(again, model) == 18


def test_the_cache_shrinks_to_the_workers_memory(tmp_path: Path, worker: WorkerProcess) -> None:
    """A worker rejects allocations that do not fit; here its address space is limited."""
    resource = pytest.importorskip("resource")
    model = write_experts(tmp_path / "sparse.bin", n_layers=2, n_experts=1024, width=512, sparse=True)
    process = worker.process.pid
    status = Path(f"/proc/{process}/status").read_text()
    used_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmSize"))
    limit = used_kib * 1024 + (512 << 20)
    resource.prlimit(process, resource.RLIMIT_AS, (limit, limit))
    with ExpertCache(model.config(1.0, device=ggml_name(worker))) as cache:
        assert 1 <= cache.info.n_slots < cache.info.slots_wanted == 2048
        ask(cache, [(0, 0), (1, 1023)])
        drain(cache)
        assert assert_bytes(cache, model) == 2


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_the_process_survives_the_workers_death(delay_s: float, worker: WorkerProcess) -> None:
    command = [sys.executable, "-m", "tests.support.cache_loss", worker.device]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as user:
        try:
            assert user.stdout is not None
            assert user.stdout.readline() == "moving\n", user.communicate(timeout=END_S)[1]
            time.sleep(delay_s)
            worker.process.kill()
            out, errors = user.communicate(timeout=END_S)
        finally:
            user.kill()
    assert (out, user.returncode) == ("done\n", 0), errors
