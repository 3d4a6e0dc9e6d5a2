"""Checks of the machine: processor, kernels, threads, memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import psutil

from moeedge.hardware.memory import available_memory, total_memory
from moeedge.hardware.processor import core_limit, cpu_name, instruction_sets, physical_cores, usable_cores
from moeedge.health.report import Finding
from moeedge.units import format_bytes, format_rate

_LITTLE_BYTES = 2**30  # of free memory
_LONG_SPIN = 10**6  # turns of an idle thread that keeps its core: milliseconds
_READ_BYTES = 2**27  # to read once, for the memory's speed


def processor() -> Iterator[Finding]:
    """Name and instructions. An x86 processor without AVX2 is slow."""
    found = instruction_sets()
    text = f"{cpu_name()}; {', '.join(found) or 'no vector instructions that matter here'}"
    slow = not found and platform.machine() in ("x86_64", "amd64")
    hint = "Expect slow answers: kernels in plain C++ compute." if slow else ""
    yield Finding("processor", "info" if slow else "ok", text, hint)


def kernels() -> Iterator[Finding]:
    """Which of our kernels compute experts; each was compared with ggml's. Needs the native library."""
    from moeedge.native.kernels import Kernel
    from moeedge.native.kernels import kernels as native_kernels

    found = native_kernels()
    best: dict[str, Kernel] = {}
    for kernel in found:  # the newest instructions first
        if kernel.is_equal:
            best.setdefault(kernel.layout, kernel)
    if not best:
        yield Finding("kernels", "info", "llama.cpp's own compute experts: none of ours has its bits here")
        return
    gains = [max(kernel.single_speed, kernel.several_speed) for kernel in best.values()]
    instructions = ", ".join(dict.fromkeys(kernel.instructions for kernel in best.values()))
    used = sum(gain > 1 for gain in gains)
    text = f"ours ({instructions}) for {used} of {len(best)} weight layouts, up to {max(gains):.1f} x llama.cpp's"
    differing = len({kernel.layout for kernel in found}) - len(best)
    yield Finding("kernels", "ok", text + (f"; {differing} not used: other bits" if differing else ""))


def threads() -> Iterator[Finding]:
    """How many threads compute, and what may keep them from it."""
    n_threads, n_usable, limit = physical_cores(), usable_cores(), core_limit()
    n_all = psutil.cpu_count() or n_usable
    text = f"{n_threads} (-t N sets it); {n_usable} of {n_all} logical cores may be used"
    if limit is not None and limit < n_usable:
        text += f", a container's limit is {limit:g}"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5 * n_usable + 0.5:
        hint = "End other programs before you measure: they take cores from the model."
        yield Finding("threads", "warning", f"the machine's load is {load:.1f} already; {text}", hint)
        return
    spin = os.environ.get("GOMP_SPINCOUNT", "0")
    if not spin.isdigit() or int(spin) > _LONG_SPIN or os.environ.get("OMP_WAIT_POLICY", "").lower() == "active":
        hint = "Unset GOMP_SPINCOUNT and OMP_WAIT_POLICY: idle threads that keep their cores slow drafts and reads."
        yield Finding("threads", "warning", text, hint)
        return
    yield Finding("threads", "ok", text)


def memory() -> Iterator[Finding]:
    """Free memory, and how fast it is read. Needs the native library."""
    from moeedge.native.kernels import read_speed

    free, total = available_memory(), total_memory()
    text = f"{format_bytes(free)} of {format_bytes(total)} free"
    if total < psutil.virtual_memory().total:
        text += " (a container's limit)"
    if free > 4 * _READ_BYTES:
        speed = read_speed(_READ_BYTES, physical_cores(), repetitions=1)
        text += f", read at about {format_rate(speed)}"
    swapped = psutil.swap_memory().used
    if swapped > _LITTLE_BYTES and free < total / 4:
        text += f", {format_bytes(swapped)} swapped out"
    if free < _LITTLE_BYTES:
        yield Finding("memory", "warning", text, "End other programs, or choose a smaller model (moeedge plan).")
    else:
        yield Finding("memory", "ok", text)
