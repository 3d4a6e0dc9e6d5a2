"""How fast the disk of a model file gives random pieces of it: measured read-only, past the page cache, and kept.

Experts that are read from a file come in pieces at random places. A disk reaches its limit with several requests at a
time, and with pieces that are neither small nor so large that few are under way.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import ClassVar

import numpy as np
import psutil
from numpy.typing import NDArray

from moeedge.errors import ModelFileError
from moeedge.llama import gguf_file
from moeedge.llama.dense_weights import SplitWeights, ranges_by_file
from moeedge.native.mapping import open_direct
from moeedge.run import NO_PROGRESS, Decision, Progress, rotated
from moeedge.scheduler.calibration import Measurement, keep, measurement_file, read_measurement
from moeedge.units import format_bytes, format_rate

DEPTHS = (1, 2, 4, 8, 16)  # requests at a time
PIECES_BYTES = tuple(2**exponent for exponent in range(16, 24))  # 64 KiB to 8 MiB
_ALIGNMENT = 4096  # of offsets, sizes and memory: at least the blocks of the disks that there are
_PASSES = 3  # in turn; the median counts, as another program may be reading
_READ_S = 0.15  # of each depth and size in each pass
_ENOUGH = 0.95  # of the best rate
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class ReadRate:
    """Random reads of one size with one number of requests at a time."""

    depth: int
    piece_bytes: int
    bytes_per_s: float
    reads: int


@dataclass(frozen=True, kw_only=True)
class DiskCalibration(Measurement):
    """Random reads of one model's file."""

    SCHEMA: ClassVar[int] = 1
    ALSO_KEPT: ClassVar[tuple[str, ...]] = ("in_memory", "best")

    model: str  # the file's name
    file_bytes: int  # of all parts
    expert_bytes: int  # of one expert, in all its matrices; 0: a dense model
    matrix_bytes: int  # of one expert in its largest matrix; 0: a dense model
    mount: str  # of the disk: its name and folder
    file_system: str
    direct: bool  # past the page cache
    rates: tuple[ReadRate, ...]

    @property
    def best(self) -> ReadRate:
        """The fewest requests, then the smallest pieces, that reach 95 % of the best rate."""
        return self.best_from(1)

    def best_from(self, depth: int) -> ReadRate:
        """The best of so many requests and more; its rate is a smooth one."""
        smooth = self._smooth()
        allowed = [rate for rate in self.rates if rate.depth >= depth] or list(self.rates)
        limit = max(smooth[rate] for rate in allowed)
        enough = [rate for rate in allowed if smooth[rate] >= _ENOUGH * limit]
        best = min(enough, key=lambda rate: (rate.depth, rate.piece_bytes))
        return replace(best, bytes_per_s=smooth[best])

    def _smooth(self) -> dict[ReadRate, float]:
        """Each rate's median with its neighbours, as disks may vary, in bytes/s."""
        depths, rows = np.unique([rate.depth for rate in self.rates], return_inverse=True)
        sizes, columns = np.unique([rate.piece_bytes for rate in self.rates], return_inverse=True)
        table = np.full((len(depths) + 2, len(sizes) + 2), np.nan)
        table[1 + rows, 1 + columns] = [rate.bytes_per_s for rate in self.rates]
        places = zip(self.rates, rows, columns, strict=True)
        return {rate: float(np.nanmedian(table[row : row + 3, at : at + 3])) for rate, row, at in places}

    def decision(self, depth: int = 1) -> Decision:
        """The reads of `best_from`, at least `depth` at a time, compared with one at a time of the same size."""
        best = self.best_from(depth)
        chosen = f"{max(depth, best.depth)} of {format_bytes(best.piece_bytes)} at a time"
        if best.depth < depth:
            return self.decided(Decision("disk reads", chosen, why=f"the size is the best of {best.depth} at a time"))
        single = [s for rate, s in self._smooth().items() if (rate.depth, rate.piece_bytes) == (1, best.piece_bytes)]
        gain = best.bytes_per_s / single[0] if single and best.depth > 1 else None
        chosen += f" ({format_rate(best.bytes_per_s)})"
        return self.decided(Decision("disk reads", chosen, gain, "one", why="the fewest within 5 % of the fastest"))

    @property
    def in_memory(self) -> bool:
        """Whether the file system keeps its files in memory, so that no disk was measured."""
        return self.file_system in _IN_MEMORY


def calibration_file(model: Path) -> Path:
    """Where the figures of the disk that holds `model` are kept. Raises OSError without a cache folder."""
    device = model.stat().st_dev  # may change when the machine starts anew
    conditions = {"schema": DiskCalibration.SCHEMA, "device": device, "file_system": os.statvfs(model).f_fsid}
    return measurement_file(f"disk-{os.major(device)}-{os.minor(device)}", conditions)


def read_kept(model: Path) -> DiskCalibration | None:
    """The figures kept of the disk that holds `model`; None without any."""
    return read_measurement(DiskCalibration, partial(calibration_file, model))


def measure(
    model: Path,
    *,
    depths: Sequence[int] = DEPTHS,
    pieces_bytes: Sequence[int] = PIECES_BYTES,
    read_s: float = _READ_S,
    progress: Progress = NO_PROGRESS,
) -> DiskCalibration:
    """Measures random reads among the experts of a model (of a dense one: its weights), and keeps the figures.

    One size more is measured: that of an expert's largest matrix. Sizes for which the file is too small are left out.
    read_s: seconds of each size and depth in each of three passes, whose median counts. progress: of
    these parts. Raises ModelFileError.
    """
    start_s = time.perf_counter()
    experts, _ = gguf_file.expert_tensors(model)
    weights = SplitWeights.read(model)
    ranges = ranges_by_file(weights.experts or weights.dense)
    matrix_bytes = max((tensor.stride for tensor in experts), default=0)
    sizes = {*pieces_bytes, -(-matrix_bytes // _ALIGNMENT) * _ALIGNMENT} - {0}
    places = {size: rows for size in sorted(sizes) if len(rows := _places(ranges, size))}
    if not places:
        raise ModelFileError(f"{model.name} is too small to measure its disk.", "Name a larger model on that disk.")
    name, file_system = _mount_of(model)
    with ExitStack() as stack:
        files = _Files(list(ranges), stack)
        rng = np.random.default_rng(0)
        tasks = rng.permutation(list(product(depths, places))).tolist()  # neighbours, whose median counts, lie apart
        passes: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)  # reads, seconds
        progress.start("reading", _PASSES * len(tasks))
        for index in range(_PASSES):
            for depth, size in rotated(tasks, index * len(tasks) // _PASSES):  # each comes early, midway and late
                passes[depth, size].append(files.read(rng.permutation(places[size]), size, depth, read_s))
                progress.add()
    by_layer = gguf_file.expert_bytes_by_layer(experts, 1 + max((tensor.layer for tensor in experts), default=0))
    calibration = DiskCalibration(
        model=model.name,
        file_bytes=sum(file.stat().st_size for file in ranges),
        expert_bytes=max(by_layer),
        matrix_bytes=matrix_bytes,
        mount=name,
        file_system=file_system,
        direct=files.is_direct and file_system not in _IN_MEMORY,
        rates=tuple(
            ReadRate(depth, size, median(size * n / seconds for n, seconds in reads), sum(n for n, _ in reads))
            for (depth, size), reads in sorted(passes.items())
        ),
        seconds=time.perf_counter() - start_s,
    )
    return keep(calibration, partial(calibration_file, model))


def quick_rate(file: Path, *, read_s: float = 0.2) -> tuple[float, bool]:
    """Bytes/s of random reads of a file for a moment, and whether past the page cache. Raises ModelFileError."""
    size, depth = PIECES_BYTES[len(PIECES_BYTES) // 2], DEPTHS[2]
    places = _places({file: [(0, file.stat().st_size)]}, size)
    if not len(places):
        raise ModelFileError(f"{file.name} is too small to measure its disk.", "Name a larger file.")
    with ExitStack() as stack:
        files = _Files([file], stack)
        n_reads, seconds = files.read(np.random.default_rng(0).permutation(places), size, depth, read_s)
    return n_reads * size / seconds, files.is_direct


class _Files:
    """Open files, and whether all reads of them go past the page cache. Raises ModelFileError."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        self._name, self._files, self.is_direct = files[0], list[int](), True
        for file in files:
            try:
                descriptor, is_direct = open_direct(file)
            except OSError as error:
                raise ModelFileError(f"Cannot read {file}: {error.strerror}.", "Check its permissions.") from error
            stack.callback(os.close, descriptor)
            self._files.append(descriptor)
            self.is_direct &= is_direct

    def read(self, places: NDArray[np.int64], size: int, depth: int, read_s: float) -> tuple[int, float]:
        """Reads pieces at `places` [n, 2] (file, offset) in turn for `read_s` seconds; returns reads and seconds."""
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            for file in self._files:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = threading.Barrier(depth)
        is_failed = threading.Event()

        def read(thread: int, buffer: mmap.mmap) -> tuple[int, float, float]:
            own = places[thread::depth].tolist() or places.tolist()
            buffer[:1] = b"\0"
            begin.wait()
            n_reads, start_s = 0, (now_s := time.perf_counter())
            while (now_s < start_s + read_s or n_reads == 0) and not is_failed.is_set():
                file, offset = own[n_reads % len(own)]
                try:
                    if os.preadv(self._files[file], [buffer], offset) != size:
                        raise OSError(errno.EIO, "the file has become shorter")
                except OSError:
                    is_failed.set()
                    raise
                n_reads += 1
                now_s = time.perf_counter()
            return n_reads, start_s, now_s

        with ExitStack() as stack:
            try:
                buffers = [stack.enter_context(mmap.mmap(-1, size)) for _ in range(depth)]  # aligned
                pool = stack.enter_context(ThreadPoolExecutor(depth))
                stack.callback(begin.abort)  # where not all threads begin, none waits for the others
                n_reads, starts_s, ends_s = zip(*pool.map(read, range(depth), buffers), strict=True)
            except (OSError, RuntimeError) as error:  # also: no memory, no more threads
                what = getattr(error, "strerror", None) or error
                raise ModelFileError(f"Cannot read {self._name}: {what}.", "Check the disk and free memory.") from error
        return sum(n_reads), max(ends_s) - min(starts_s)


def _places(ranges: dict[Path, list[tuple[int, int]]], size: int) -> NDArray[np.int64]:
    """Where pieces of this size are, next to each other: file and offset, [n, 2]."""
    places = [np.zeros((0, 2), dtype=np.int64)]
    for index, parts in enumerate(ranges.values()):
        for offset, n_bytes in parts:
            first = -(-offset // _ALIGNMENT) * _ALIGNMENT
            offsets = np.arange(first, offset + n_bytes - size + 1, size, dtype=np.int64)
            places.append(np.stack([np.full_like(offsets, index), offsets], axis=1))
    return np.concatenate(places)


def _mount_of(model: Path) -> tuple[str, str]:
    """Name and folder of the disk that holds a file, and its file system; empty where the system does not list them."""
    mounts = []
    with suppress(OSError, RuntimeError):  # no list, or a link to itself
        resolved = model.resolve()
        mounts = [mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)]
    if not mounts:
        return "", ""
    innermost = max(reversed(mounts), key=lambda mount: len(mount.mountpoint))
    return f"{innermost.device} on {innermost.mountpoint}", innermost.fstype
