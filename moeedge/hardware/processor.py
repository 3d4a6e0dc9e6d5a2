"""The processor: its name, the instructions that matter here, and how many cores this process may use."""

from __future__ import annotations

import math
import os
import platform
from contextlib import suppress
from pathlib import Path

import psutil

from moeedge.hardware.memory import control_groups
from moeedge.paths import text_of

CPU_INFO = Path("/proc/cpuinfo")  # Linux only
_QUOTA = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # of version 2 and 1 of control groups
# flag in /proc/cpuinfo: the instructions' name; those that kernels of llama.cpp or ours use
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
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
