"""Measuring random reads of a model's file, and keeping the figures."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.errors import ModelFileError
from moeedge.llama import gguf_file
from moeedge.scheduler import disk
from moeedge.scheduler.calibration import measurement_json, parse_measurement
from moeedge.scheduler.disk import DiskCalibration, ReadRate
from tests.conftest import TinyFactory
from tests.support.commands import refused, run, run_json
from tests.support.machine import Here
from tests.support.progress import SeenProgress

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "preadv"), reason="needs preadv"),
    pytest.mark.usefixtures("cache_folder"),
]

SIZES = tuple(2**exponent for exponent in range(16, 23))
quick = partial(disk.measure, depths=(1, 4), read_s=0.002, pieces_bytes=(65536,))


@pytest.fixture(scope="module")
def wide(tiny: TinyFactory) -> Path:
    """An expert matrix takes 288 KiB."""
    return tiny("qwen3moe", embd=512, expert_ff=1024)


def test_rates_of_every_size_and_depth(wide: Path) -> None:
    progress = SeenProgress()
    found = quick(wide, pieces_bytes=(65536, 2**30), progress=progress)
    experts, _ = gguf_file.expert_tensors(wide)
    assert found.matrix_bytes == 1024 * 512 // 32 * 18
    assert found.expert_bytes == max(gguf_file.expert_bytes_by_layer(experts, 3)) == 3 * found.matrix_bytes
    assert found.file_bytes == wide.stat().st_size
    # 1 GiB is more than the file has; a matrix is a size of its own
    sizes = (65536, found.matrix_bytes)
    assert [(rate.depth, rate.piece_bytes) for rate in found.rates] == [(n, size) for n in (1, 4) for size in sizes]
    assert all(rate.bytes_per_s > 0 and rate.reads >= 3 * rate.depth for rate in found.rates)
    assert any(rate.reads > 3 * rate.depth for rate in found.rates)  # threads read on until the time is over
    assert (progress.tasks, progress.amounts) == ([("reading", 12)], [1] * 12)


def test_reads_are_aligned_and_among_the_experts(wide: Path, here: Here) -> None:
    seen = here.seen_reads()
    quick(wide)
    experts, _ = gguf_file.expert_tensors(wide)
    first = min(tensor.offset for tensor in experts)
    last = max(tensor.offset + tensor.stride * tensor.n_experts for tensor in experts)
    offsets, sizes = np.array([read for read in seen if read[0]]).T  # 0: to find out about direct reads
    assert (offsets % 4096 == 0).all() and (sizes % 4096 == 0).all()
    assert first <= offsets.min() and (offsets + sizes).max() <= last
    assert len(set(offsets.tolist())) > 3


@pytest.mark.parametrize("is_refused", [True, False], ids=["not opened", "not read"])
def test_the_page_cache_is_emptied_where_it_cannot_be_bypassed(
    wide: Path, here: Here, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    dropped: list[int] = []
    here.refuse_direct_reads(at_open=is_refused)
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: dropped.append(arguments[3]))
    found = quick(wide)
    assert not found.direct
    assert set(dropped) == {os.POSIX_FADV_DONTNEED}


def test_figures_are_kept_by_disk(wide: Path, tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.read_kept(wide) is None
    found = quick(wide)
    assert found.kept and not found.kept_from
    kept = disk.read_kept(tiny_moe)  # on the same disk
    assert kept == found and kept.kept_from
    disk.calibration_file(wide).write_text("{}", encoding="utf-8")
    assert disk.read_kept(wide) is None
    (tmp_path / "file").touch()  # a folder that cannot be written
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "file"))
    assert not quick(wide).kept
    assert disk.read_kept(wide) is None


def test_the_best_has_few_and_small_requests() -> None:
    """A disk that needs four requests or 1 MiB, with one rate that is too high: the median of neighbours counts."""
    limits = {(depth, size): min(1e9, 2e8 * depth * size / 2**18) for depth in (1, 2, 4, 8) for size in SIZES}
    limits[1, 2**17] = 3e9
    rates = tuple(ReadRate(*cell, bytes_per_s, 1) for cell, bytes_per_s in limits.items())
    sizes = {"file_bytes": 1, "expert_bytes": 1, "matrix_bytes": 1}
    about = {"model": "m", "mount": "", "file_system": "ext4", "direct": True}
    found = DiskCalibration(**about, **sizes, rates=rates, seconds=1.0)
    # of 1 request and 2 MiB the neighbours have 2 requests, 1 and 4 MiB
    assert found.best == ReadRate(1, 2**21, 1e9, 1)
    # more requests need smaller pieces
    assert found.best_from(4) == ReadRate(4, 2**19, 1e9, 1)
    assert found.best_from(16) == found.best
    decision = found.decision(4)
    assert (decision.chosen, decision.over) == ("4 of 512 KiB at a time (1 GB/s)", "one")
    assert decision.gain == pytest.approx(1e9 / 6e8)  # the neighbours of one request of this size count, too
    assert found.decision().gain is None and found.decision(16).gain is None  # not compared with itself, not measured
    one = replace(found, rates=rates[:1])
    assert one.best == rates[0]
    assert parse_measurement(DiskCalibration, measurement_json(found)) == found


def test_a_read_error_is_reported(wide: Path, here: Here) -> None:
    here.fail_reads()
    with pytest.raises(ModelFileError, match="Input/output"):
        quick(wide)
    here.read_by(lambda *_arguments: 4096)  # a file that was cut
    with pytest.raises(ModelFileError, match="shorter"):
        quick(wide)


@pytest.mark.parametrize(("part", "error"), [(threading.Thread, RuntimeError("no threads")), (mmap, OSError("full"))])
def test_no_thread_waits_for_one_that_cannot_begin(
    part: Any, error: Exception, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mmap" if part is mmap else "start"
    real, n_calls = getattr(part, name), count(1)

    def failing(*arguments: Any) -> Any:
        if next(n_calls) == 3:
            raise error
        return real(*arguments)

    monkeypatch.setattr(part, name, failing)
    with pytest.raises(ModelFileError, match=str(error)):
        quick(wide)


def test_the_command(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "measure", quick)
    found = run_json("calibrate", "--disk", "-m", wide)
    assert (found["schema"], found["model"], found["best"]["piece_bytes"] > 0) == (1, wide.name, True)
    assert {(rate["depth"], rate["piece_bytes"]) for rate in found["rates"]} >= {(1, 65536), (4, 65536)}
    shown = run("calibrate", "--disk", "-m", wide)
    assert shown.exit_code == 0 and "MB/s" in shown.stdout
    assert "no effect" not in shown.stderr
    noted = run("calibrate", "--disk", "-m", wide, "--vram", "1GiB", "--draft-max", "4").stderr
    assert "no effect" in noted and "--vram" in noted and "--draft-max" in noted
    refused("calibrate", "--disk", "-m", tmp_path / "none.gguf")
    refused("calibrate", "--disk", "-m", wide, "--expert-budget")
