"""This machine, or the container in which this process runs: memory, processor, and what other programs use of them.

Of other programs the processor time is known, that of the entire machine less our own.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from moeedge.paths import text_of

_RESERVE_MIN_BYTES, _RESERVE_MAX_BYTES = 256 * 2**20, 2**30
_MEMBERSHIP = Path("/proc/self/cgroup")  # Linux only
_GROUPS = Path("/sys/fs/cgroup")
# of version 2 and 1 of control groups: limits, use, and the page cache in memory.stat, which the kernel drops first
_NO_LIMIT = 1 << 60  # bytes; version 1 has numbers above it where there is no limit
_LIMITS = (("memory.max", "memory.high"), ("memory.limit_in_bytes",))
_USED = ("memory.current", "memory.usage_in_bytes")
_CACHED = (("active_file", "inactive_file"), ("total_active_file", "total_inactive_file"))


def available_memory() -> int:
    """Bytes that programs can take without swapping."""
    free = [psutil.virtual_memory().available]
    for limit, version, folder in _limits():
        with suppress(ValueError, KeyError):
            stat = dict(line.split() for line in text_of(folder / "memory.stat").splitlines())
            cached = sum(int(stat[name]) for name in _CACHED[version])
            free.append(max(0, limit - max(0, _number(folder / _USED[version]) - cached)))
    return min(free)


def total_memory() -> int:
    """Bytes of the machine, or that its container may use."""
    return min([psutil.virtual_memory().total, *(limit for limit, _version, _folder in _limits())])


def default_reserve(total_bytes: int) -> int:
    """Bytes of a memory that stay free for compute buffers, other programs and the screen: 1/32, 256 MiB to 1 GiB."""
    return min(max(_RESERVE_MIN_BYTES, total_bytes // 32), _RESERVE_MAX_BYTES)


def fits(n_bytes: int, free_bytes: int | None = None, total_bytes: int | None = None) -> bool:
    """Whether a memory has room for `n_bytes` and the reserve; without sizes, this machine's memory as it is now."""
    total_bytes = total_memory() if total_bytes is None else total_bytes
    return n_bytes + default_reserve(total_bytes) <= (available_memory() if free_bytes is None else free_bytes)


def _limits() -> Iterator[tuple[int, int, Path]]:
    """The control groups of this process that limit its memory: bytes, version and folder."""
    for version, folder in control_groups("memory"):
        with suppress(ValueError):  # a group without this controller
            limit = min(_number(folder / name) for name in _LIMITS[version])
            if limit < _NO_LIMIT:
                yield limit, version, folder


def control_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """Version (0: v2, 1: v1) and folder of the control groups around this process for "memory" or "cpu"."""
    for line in text_of(_MEMBERSHIP).splitlines():
        number, controllers, name = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        version, root = (0, _GROUPS) if number == "0" else (1, _GROUPS / controller)
        # in a container the folders of its own groups may be those at the root
        folder = root / name.lstrip("/")
        yield from ((version, each) for each in (folder, *folder.parents) if each == root or root in each.parents)


def _number(file: Path) -> int:
    text = text_of(file)
    return _NO_LIMIT if text == "max" else int(text)


CPU_INFO = Path("/proc/cpuinfo")  # Linux only
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # Linux only
_QUOTA = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # of version 2 and 1 of control groups
# flag in /proc/cpuinfo: the instructions' name; those that kernels of llama.cpp or ours use
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "amx_int8": "AMX",
    "asimddp": "dot product",
    "i8mm": "I8MM",
    "sve": "SVE",
}


def cpu_name() -> str:
    """Returns the processor's own name, else the architecture; family and model tell a brand's generations apart."""
    name, board, family, model = (value_in(CPU_INFO, key) for key in ("model name", "hardware", "cpu family", "model"))
    name = name or board or platform.processor() or platform.machine()
    return f"{name} (family {family}, model {model})" if family and model else name


def instruction_sets() -> list[str]:
    """Returns the vector instructions that the system reports; empty where it reports none."""
    flags = (value_in(CPU_INFO, "flags") or value_in(CPU_INFO, "features")).lower().split()
    return [name for flag, name in _INSTRUCTIONS.items() if flag in flags]


def has_large_pages() -> bool:
    """Whether a program that asks for pages of 2 MiB may get them; True where the system does not say."""
    try:
        return "[never]" not in LARGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return True


def usable_cores() -> int:
    """Returns the logical cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def concurrent_threads() -> int:
    """Returns how many threads of this process can run at the same time: usable cores, within a container's limit."""
    limit = core_limit()
    return usable_cores() if limit is None else max(1, min(usable_cores(), math.ceil(limit)))


def physical_cores() -> int:
    """Returns the physical cores that this process may use, within a container's limit: the default of threads."""
    usable, limit = usable_cores(), core_limit()
    cores = min(psutil.cpu_count(logical=False) or usable, usable)
    return max(1, cores if limit is None else min(cores, int(limit)))


def cores_next_to_gpu() -> int:
    """Returns the default of threads where experts are cached on a GPU: two threads beside them wait for it and upload.

    A thread that computes without a core stops all others. At most a quarter of the physical cores is given up.
    """
    return min(physical_cores(), max(concurrent_threads() - 2, math.ceil(0.75 * physical_cores())))


def core_limit() -> float | None:
    """Returns the processor time that the control groups of this process allow, in cores; None: no limit."""
    limits = []
    for version, folder in control_groups("cpu"):
        with suppress(ValueError):  # a group without this controller
            quota, period = " ".join(text_of(folder / name) for name in _QUOTA[version]).split()
            if quota != "max" and int(quota) > 0:
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def value_in(file: Path, key: str) -> str:
    """The first value of a key, in lower case, in a file of lines "Key: value"; empty without one."""
    pairs = (line.partition(":") for line in text_of(file).splitlines())
    return next((value.strip() for name, _, value in pairs if name.strip().lower() == key and value.strip()), "")


BUSY = 0.25  # processors' worth of other programs, from which on a run is not quiet
_INTERVAL_S = 0.1  # ten ticks of Linux's clock: of less time nothing can be said
_IDLE = ("idle", "iowait", "guest", "guest_nice")  # the last two are part of user and nice


@dataclass(frozen=True)
class LoadReading:
    """Processor seconds up to now, and the time of the reading."""

    machine_s: float  # of all programs and, in a virtual machine, of its host's others ("steal")
    own_s: float  # of this process, all threads
    at_s: float

    @classmethod
    def now(cls) -> LoadReading:
        times = psutil.cpu_times()._asdict()
        busy_s = sum(seconds for name, seconds in times.items() if name not in _IDLE)
        return cls(busy_s, time.process_time(), time.perf_counter())

    def others_s_since(self, older: LoadReading) -> float:
        """Returns the processor seconds of other programs since `older`; below 0 by at most the clocks' resolution."""
        return (self.machine_s - older.machine_s) - (self.own_s - older.own_s)

    def others_since(self, older: LoadReading) -> float:
        """Returns the processors that other programs used on average since `older`; 0 where that is too short ago."""
        elapsed_s = self.at_s - older.at_s
        return max(self.others_s_since(older), 0.0) / elapsed_s if elapsed_s >= _INTERVAL_S else 0.0


def others_now() -> float:
    """Returns the processors that other programs use now, measured for a tenth of a second."""
    before = LoadReading.now()
    time.sleep(_INTERVAL_S)
    return LoadReading.now().others_since(before)


def takes_cores(others: float, n_threads: int) -> bool:
    """Whether other programs, which use `others` processors, take some from `n_threads` that compute."""
    return others > max((os.cpu_count() or 1) - n_threads, 0) + BUSY


def busy_note(others: float, n_threads: int) -> str | None:
    """Returns a sentence where `takes_cores` is true."""
    threads = f"{n_threads} threads need" if n_threads > 1 else "one thread needs"
    text = f"Other programs use {others:.1f} of {os.cpu_count()} cores, which the model's {threads}."
    return text if takes_cores(others, n_threads) else None
