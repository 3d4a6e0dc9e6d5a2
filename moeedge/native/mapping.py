"""Model files in this process's memory: mapping them lazily, and keeping ranges of them in memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from moeedge.native.library import load

_MAPS = Path("/proc/self/maps")  # Linux only
_NORMAL = 0  # MADV_NORMAL
_PAGE = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def map_lazily() -> Iterator[None]:
    """Lets llama.cpp map model files that this thread loads without reading them, where it reads all by default."""
    library = load()
    library.moeedge_set_lazy_mapping(1)
    try:
        yield
    finally:
        library.moeedge_set_lazy_mapping(0)


def advise_normal(path: Path, ranges: Sequence[tuple[int, int]]) -> None:
    """Lets faults in ranges of a mapped file read ahead, which `map_lazily` has switched off.

    ranges: (offset, bytes) in the file. Does nothing where the system does not list mappings.
    """
    for address, n_bytes in _addresses(path, ranges):
        _libc().madvise(address, n_bytes, _NORMAL)


def lock_in_memory(path: Path, ranges: Sequence[tuple[int, int]]) -> int:
    """Locks ranges of a mapped file into memory as long as the mapping lives; returns the locked bytes, in pages.

    ranges: as of `advise_normal`. Stops where the limit of locked memory (ulimit -l) is reached.
    """
    n_locked = 0
    for address, n_bytes in _addresses(path, ranges):
        end, piece_bytes = address + n_bytes, n_bytes
        while address < end:
            piece_bytes = min(piece_bytes, end - address)
            if _libc().mlock(address, piece_bytes) == 0:
                address += piece_bytes
                n_locked += piece_bytes
            elif piece_bytes > _PAGE:
                piece_bytes = max(_PAGE, piece_bytes // 2 // _PAGE * _PAGE)
            else:
                return n_locked
    return n_locked


def _addresses(path: Path, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where ranges of a mapped file are in memory: address of the first page, bytes."""
    mappings = _mappings(path)
    for offset, n_bytes in ranges:
        for address, start, end in mappings:
            first = max(offset // _PAGE * _PAGE, start)
            last = min(offset + n_bytes, end)
            if first < last:
                yield address + first - start, last - first


def _mappings(path: Path) -> list[tuple[int, int, int]]:
    """The memory of this process that maps the file: address, first and last offset in the file."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    name = os.path.realpath(path)
    found = []
    for line in lines:
        addresses, _access, offset, _device, _inode, *rest = line.split(maxsplit=5)
        if rest and rest[0] == name:
            first, last = (int(address, 16) for address in addresses.split("-"))
            found.append((first, int(offset, 16), int(offset, 16) + last - first))
    return found


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
