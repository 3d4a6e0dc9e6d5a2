"""Machines that are not this one: GPUs of any size, free memory, a clock, full disks, what Linux and drivers tell."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from moeedge import native
from moeedge.hardware import gpus, host, nvidia
from moeedge.hardware.devices import ResolvedDevice, VramReading
from moeedge.native import compute, mapping
from moeedge.scheduler import slot_memory
from moeedge.scheduler.slot_memory import MemoryWatch

if TYPE_CHECKING:
    from moeedge.llama.model import Model

MIB, GIB = 2**20, 2**30
CPU = native.Device("CPU", "CPU", "a processor", 8, 8, "CPU")


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """A write beyond that fails in the middle, as on a full disk or under a quota: EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def gpu_of(free_bytes: int, **changes: Any) -> ResolvedDevice:
    """A GPU with so much memory, all of it free; llama.cpp gets none."""
    fields: dict[str, Any] = {"free_bytes": free_bytes, "total_bytes": free_bytes, "llama_device": "none"}
    return ResolvedDevice("gpu", **{"ggml_name": "GPU0", "label": "GPU0"} | fields | changes)


class Here:
    """This machine, of which a test replaces parts; files below `root` stand for those of Linux."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.root, self.patch = root, patch.setattr

    def set_memory(self, free_bytes: int, total_bytes: int | None = None) -> None:
        """So much memory is free, by default all."""
        memory = SimpleNamespace(available=free_bytes, total=free_bytes if total_bytes is None else total_bytes)
        self.patch("psutil.virtual_memory", lambda: memory)

    def set_disk(self, free_bytes: int) -> None:
        """Every disk has so much room left."""
        usage = shutil.disk_usage(self.root)._replace(free=free_bytes)
        self.patch(shutil, "disk_usage", lambda _path: usage)

    def fill_disk(self, number: int) -> None:
        """What was written does not reach the disk; number: of the error, as of a quota."""

        def fsync(_file: int) -> None:
            raise OSError(number, os.strerror(number))

        self.patch(os, "fsync", fsync)

    def offer(self, *devices: native.Device, cards: tuple[str, ...] = ()) -> None:
        """llama.cpp lists these devices, and NVIDIA's driver these cards; Linux lists none."""
        self.patch(gpus, "ROOT", self.root)
        self.patch(native, "devices", lambda: list(devices))
        self.patch(nvidia, "cards", lambda: cards)

    def set_memory_of_models(self, free_bytes: int) -> list[Model]:
        """So much is free above the reserve until models are loaded, which are returned; mapped pages are free."""
        from moeedge.llama.model import Model  # which loads llama.cpp, too early for tests/conftest.py

        reserve_bytes, load, loaded = host.default_reserve(0), Model.load, list[Model]()

        def remember(path: Path, **options: Any) -> Model:
            model = load(path, **options)
            if not model.header_only:
                loaded.append(model)
            return model

        def memory() -> SimpleNamespace:
            taken = sum(model.info.size_bytes for model in loaded if model.handle and model.storage == "loaded")
            return SimpleNamespace(
                available=max(0, free_bytes + reserve_bytes - taken), total=free_bytes + reserve_bytes
            )

        self.patch(Model, "load", remember)
        self.patch("psutil.virtual_memory", memory)
        return loaded

    def set_memory_interval(self, seconds: float) -> None:
        """A thread looks at the free memory so often."""
        self.patch(slot_memory, "_INTERVAL_S", seconds)

    def limit_locks(self, left_bytes: int) -> None:
        """So much memory may be locked."""

        def mlock(_address: int, n_bytes: int) -> int:
            nonlocal left_bytes
            if n_bytes > left_bytes:
                return -1
            left_bytes -= n_bytes
            return 0

        self.patch(mapping.libc(), "mlock", mlock)

    def read_by(self, preadv: Callable[[int, list[Any], int], int]) -> None:
        """Files are read by this function, in place of the system's preadv."""

        def pread(file: int, n_bytes: int, offset: int) -> bytes:
            content = bytearray(n_bytes)
            return bytes(content[: preadv(file, [content], offset)])

        self.patch(os, "preadv", preadv)
        self.patch(os, "pread", pread)

    def fail_reads(self) -> None:
        """Every read fails, as on a damaged disk."""

        def fail(*_arguments: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        self.read_by(fail)

    def refuse_direct_reads(self, *, at_open: bool) -> None:
        """The file system opens no file for reads past the page cache, or opens it and has none."""
        preadv = os.preadv

        def read(file: int, buffers: list[Any], offset: int) -> int:
            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return preadv(file, buffers, offset)

        if at_open:
            self.patch(os, "O_DIRECT", os.O_DIRECTORY, raising=False)  # which is refused for a file
        else:
            self.read_by(read)

    def seen_reads(self) -> list[tuple[int, int]]:
        """Offset and bytes of all reads from here on."""
        seen, preadv = list[tuple[int, int]](), os.preadv

        def read(file: int, buffers: list[Any], offset: int) -> int:
            seen.append((offset, sum(map(len, buffers))))
            return preadv(file, buffers, offset)

        self.read_by(read)
        return seen

    def set_access(self, is_allowed: bool) -> None:
        """Whether this user may use any file or folder."""
        self.patch(os, "access", lambda _path, _mode: is_allowed)

    def set_cores(self, logical: int, physical: int, limit: float | None = None) -> None:
        """The processor has so many cores, of which a container may use `limit`."""
        self.patch(os, "cpu_count", lambda: logical)
        self.patch(os, "sched_getaffinity", lambda _process: range(logical))
        self.patch("psutil.cpu_count", lambda **what: physical if what else logical)
        self.patch(host, "_GROUPS", self.root)
        self.patch(host, "_MEMBERSHIP", self.write("membership", "0::/\n"))
        self.write("cpu.max", f"{'max' if limit is None else round(limit * 100_000)} 100000\n")

    def set_kernels(self, *kernels: compute.Kernel) -> None:
        """Of ours these run on the processor, and AMX works."""
        self.patch(compute, "kernels", lambda: list(kernels))
        self.patch(compute, "is_amx_disabled", lambda: False)

    def set_clock(self, clock: Callable[[], float]) -> None:
        """What is timed takes as long as this clock says."""
        self.patch(time, "perf_counter", clock)

    def set_load(self, others: float) -> None:
        """Other programs use so many processors."""

        def times() -> SimpleNamespace:
            return SimpleNamespace(_asdict=lambda: {"user": time.process_time() + others * time.perf_counter()})

        self.patch("psutil.cpu_times", times)

    def write(self, name: str, text: str) -> Path:
        """Writes a file and its folders."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


class Machine(Here):
    """A machine that only `root` describes: no GPU, 48 of 64 GiB free."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        super().__init__(patch, root)
        self.patch(host, "_GROUPS", root)
        self.patch(host, "_MEMBERSHIP", root / "membership")
        self.patch(host, "CPU_INFO", root / "cpuinfo")
        self.patch(host, "LARGE_PAGES", root / "large-pages")
        self.set_memory(48 * GIB, 64 * GIB)
        self.offer(CPU)


@dataclass
class FreeMemory:
    """Free memory and a clock, all that a MemoryWatch sees; step_s: with each look at the clock it is so much later."""

    free_bytes: int = 1000 * MIB
    step_s: float = 0.0
    time_s: float = 0.0
    n_readings: int = 0

    def clock(self) -> float:
        self.time_s += self.step_s
        return self.time_s

    def read(self) -> VramReading | None:
        self.n_readings += 1
        return VramReading(0, self.free_bytes, self.free_bytes, "system")

    def watch(self, reserve_bytes: int) -> MemoryWatch:
        """A watch that wants so much to stay free."""
        return MemoryWatch(reserve_bytes, self.read, self.clock)
