"""What a shared library's file says about itself, read without loading it: loading runs its code.

ELF: the gABI's "Object Files" (64-bit, little-endian: the machines that llama.cpp has backends for). Of Mach-O only the
names in its string table are read.
"""

from __future__ import annotations

import mmap
import platform
import re
import struct
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_MACOS = platform.system() == "Darwin"
_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_MACH_O = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # 64-bit; for several machines
_PACKED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"BZh": "bzip2"}
_HEADER_BYTES = 64  # of an ELF file
_SHARED_OBJECT = 3  # e_type: ET_DYN
_DYNAMIC, _DYNAMIC_SYMBOLS = 6, 11  # sh_type: SHT_DYNAMIC, SHT_DYNSYM
_NEEDED = 1  # d_tag: DT_NEEDED
_C_NAME = re.compile(rb"\0_([A-Za-z]\w*)(?=\0)")  # in Mach-O, where C names begin with _


@dataclass(frozen=True)
class SharedLibrary:
    """One shared library."""

    defined: frozenset[str]  # names of functions and data that it offers (Mach-O: that it mentions)
    needed: tuple[str, ...]  # sonames of the libraries that it is loaded with (Mach-O: unknown, none)


@dataclass(frozen=True)
class _Section:
    """struct Elf64_Shdr, as far as it matters."""

    kind: int
    offset: int
    n_bytes: int
    link: int  # of a table of symbols or dynamic entries: the section with its strings


def read_shared_library(path: Path) -> SharedLibrary:
    """Reads the file. Raises OSError, and ValueError for one that cannot be loaded here: the rest of "it is ..."."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
        for magic, name in _PACKED.items():
            if start.startswith(magic):
                raise ValueError(f"packed by {name}")
        if len(start) < _HEADER_BYTES:
            raise ValueError("not a shared library")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if start.startswith(_MACH_O):
                return _read_mach_o(content)
            if not start.startswith(_ELF64_LITTLE_ENDIAN) or _MACOS:
                raise ValueError("not a shared library of this system")
            try:
                return _read_elf(content)
            except (struct.error, IndexError, OverflowError, UnicodeDecodeError):
                raise ValueError("damaged or incomplete") from None


def _read_mach_o(content: mmap.mmap) -> SharedLibrary:
    if not _MACOS:
        raise ValueError("a library of macOS")
    return SharedLibrary(frozenset(name.decode() for name in _C_NAME.findall(content)), ())


def _read_elf(content: mmap.mmap) -> SharedLibrary:
    kind, machine = struct.unpack_from("<HH", content, 16)
    if kind != _SHARED_OBJECT:
        raise ValueError("not a shared library")
    if machine != _own_machine():
        raise ValueError("a library for another kind of processor")
    (table,) = struct.unpack_from("<Q", content, 40)
    entry_bytes, n_sections = struct.unpack_from("<HH", content, 58)
    # the table is at the end: reading it fails where a download stopped
    sections = [
        _Section(*struct.unpack_from("<4xI16xQQI", content, table + index * entry_bytes)) for index in range(n_sections)
    ]
    defined, needed = set(), []
    for section in sections:
        entries = content[section.offset : section.offset + section.n_bytes]
        if section.kind == _DYNAMIC_SYMBOLS:
            for name, in_section in struct.iter_unpack("<I2xH16x", entries):
                if in_section:  # 0: expected from another library
                    defined.add(_text(content, sections[section.link], name))
        elif section.kind == _DYNAMIC:
            for tag, value in struct.iter_unpack("<QQ", entries):
                if tag == _NEEDED:
                    needed.append(_text(content, sections[section.link], value))
    return SharedLibrary(frozenset(defined), tuple(needed))


def _text(content: mmap.mmap, strings: _Section, offset: int) -> str:
    start = strings.offset + offset
    end = content.find(b"\0", start)
    if end < 0:
        raise IndexError(start)
    return content[start:end].decode()


@cache
def _own_machine() -> int:
    """e_machine of this interpreter."""
    with open(sys.executable, "rb") as file:
        machine: int = struct.unpack_from("<H", file.read(20), 18)[0]
    return machine
