"""Model files in this process's memory: mapping them lazily, and keeping ranges of them in memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moeedge.native.abi import declare
from moeedge.native.library import load

_MAPS = Path("/proc/self/maps")  # Linux only
_NORMAL = 0  # MADV_NORMAL
_PAGE = os.sysconf("SC_PAGE_SIZE")
N_READERS = 4
PIECE_BYTES = 1 << 20  # a multiple of every page size
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED
_MOVE = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED


@dataclass(frozen=True)
class FileVersion:
    """Identifies the content of a file: another version has other values."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileVersion:
        """The version of a path, or of an open file. Raises OSError."""
        status = os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Mapped:
    """Pages of a file in this process's memory."""

    address: int
    offset: int  # in the file, bytes
    n_bytes: int


@contextmanager
def map_lazily() -> Iterator[None]:
    """Lets llama.cpp map model files that this thread loads without reading them, where it reads all by default."""
    library = load()
    library.moeedge_set_lazy_mapping(1)
    try:
        yield
    finally:
        library.moeedge_set_lazy_mapping(0)


def mapped(path: Path) -> list[Mapped]:
    """Where this process maps a file; nothing where the system does not list mappings."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    name = os.path.realpath(path)
    mappings = []
    for line in lines:
        addresses, _access, offset, _device, _inode, *rest = line.split(maxsplit=5)
        if rest and rest[0] == name:
            first, end = (int(address, 16) for address in addresses.split("-"))
            mappings.append(Mapped(first, int(offset, 16), end - first))
    return mappings


def pages_of(mappings: Iterable[Mapped], ranges: Sequence[tuple[int, int]]) -> list[Mapped]:
    """The pages of mappings that hold a part of the ranges, which are (offset, bytes) in the file."""
    pages = []
    for offset, n_bytes in ranges:
        for each in mappings:
            first = max(offset // _PAGE * _PAGE, each.offset)
            end = min(-(-(offset + n_bytes) // _PAGE) * _PAGE, each.offset + each.n_bytes)
            if first < end:
                pages.append(Mapped(each.address + first - each.offset, first, end - first))
    return pages


def advise_normal(pages: Iterable[Mapped]) -> None:
    """Lets faults in pages of a file read ahead, which `map_lazily` has switched off."""
    for each in pages:
        libc().madvise(each.address, each.n_bytes, _NORMAL)


def lock_in_memory(pages: Iterable[Mapped]) -> int:
    """Locks pages into memory, up to the limit of locked memory (ulimit -l); returns the locked bytes."""
    n_locked = 0
    for each in pages:
        address, end, piece_bytes = each.address, each.address + each.n_bytes, each.n_bytes
        while address < end:
            piece_bytes = min(piece_bytes, end - address)
            if libc().mlock(address, piece_bytes) == 0:
                address += piece_bytes
                n_locked += piece_bytes
            elif piece_bytes > _PAGE:
                piece_bytes = max(_PAGE, piece_bytes // 2 // _PAGE * _PAGE)
            else:
                return n_locked
    return n_locked


def give_own_memory(file: Path, version: FileVersion, pages: Iterable[Mapped]) -> int:
    """Reads mapped pages of a file past the page cache, and puts these copies in the place of the pages.

    What happens to the file afterwards does not reach them. Returns the bytes copied: fewer than all where the system
    has no memory or cannot move it (only Linux can); the rest stays mapped. Raises OSError if the file cannot be read:
    ESTALE if it is not of that version any more.
    """
    n_copied = 0
    descriptor, _is_direct = open_direct(file)
    try:
        with ThreadPoolExecutor(N_READERS) as pool:
            for each in pages:
                copy = libc().mmap(
                    None, each.n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
                )
                if copy == _FAILED:
                    break
                try:
                    _read(pool, descriptor, Mapped(copy, each.offset, each.n_bytes), version.size_bytes)
                    if not FileVersion.of(descriptor) == FileVersion.of(file) == version:
                        raise OSError(errno.ESTALE, "it was changed while it was being loaded")
                except BaseException:
                    pool.shutdown(cancel_futures=True)  # no thread may read into memory that is not ours any more
                    libc().munmap(copy, each.n_bytes)
                    raise
                libc().mprotect(copy, each.n_bytes, mmap.PROT_READ)
                if not _move(copy, each):
                    libc().munmap(copy, each.n_bytes)
                    break
                n_copied += each.n_bytes
        if hasattr(os, "posix_fadvise"):  # of what was mapped, or read where the file system has no direct reads
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return n_copied


def _move(copy: int, to: Mapped) -> bool:
    """Puts memory in the place of mapped pages."""
    try:
        return bool(libc().mremap(copy, to.n_bytes, to.n_bytes, _MOVE, ctypes.c_void_p(to.address)) == to.address)
    except AttributeError:  # not Linux
        return False


def _read(pool: ThreadPoolExecutor, descriptor: int, to: Mapped, file_bytes: int) -> None:
    """Fills pages from the file in pieces, several at once; what is after the file's end stays zero."""
    n_bytes = min(to.n_bytes, file_bytes - to.offset)
    pieces = [
        Mapped(to.address + at, to.offset + at, min(PIECE_BYTES, n_bytes - at)) for at in range(0, n_bytes, PIECE_BYTES)
    ]
    list(pool.map(lambda piece: _read_piece(descriptor, piece), pieces))


def _read_piece(descriptor: int, piece: Mapped) -> None:
    done = 0
    while done < piece.n_bytes:
        room = -(-(piece.n_bytes - done) // _PAGE) * _PAGE  # direct reads are of entire blocks
        to = (ctypes.c_char * room).from_address(piece.address + done)
        n = os.preadv(descriptor, [to], piece.offset + done)
        done += n if done + n >= piece.n_bytes else n // _PAGE * _PAGE
        if n < _PAGE and done < piece.n_bytes:
            raise OSError(errno.ESTALE, "it ended too early")


def open_direct(file: Path) -> tuple[int, bool]:
    """A descriptor for reading, and whether its reads go past the page cache. Raises OSError."""
    with suppress(OSError, AttributeError):
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _PAGE) as page:
                os.preadv(descriptor, [page], 0)
            return descriptor, True
        except OSError:  # the file system opens files for direct reads and has none
            os.close(descriptor)
    return os.open(file, os.O_RDONLY), False


@cache
def libc() -> Any:
    """The C library's functions for memory; an array or structure is an address."""
    library = ctypes.CDLL(None)
    place, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    signatures: dict[tuple[Any, ...], str] = {
        (number, place, size): "mlock munmap",
        (number, place, size, number): "madvise mprotect",
        (place, place, size, number, number, number, ctypes.c_ssize_t): "mmap",  # the last is an off_t
        (place, place, size, size, number, place): "mremap" if hasattr(library, "mremap") else "",  # Linux
    }
    return declare(library, signatures)
