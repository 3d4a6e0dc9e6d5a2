"""Memory of this machine, or of the container in which this process runs, if that may use less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
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
