"""Model files before they are written, and the streams that write them, a group of rows in memory at a time.

The file grows next to its final name with the suffix ".part" and is renamed when it is complete; any failure deletes
it. Zeros are written too, so that the file takes the room and disk traffic of a real model. A sparse file, on request,
takes only the room of its content, but reads the same from the page cache.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

import gguf
import numpy as np

from moeedge.errors import DiskSpaceError, InputError
from moeedge.lab.widen.maps import Bytes
from moeedge.paths import DISK_FULL_ERRORS
from moeedge.ui.console import check_output
from moeedge.units import format_bytes

_VALUE_TYPES = {  # for keys that the source lacks
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}

OnBytes = Callable[[int], None]


def check_target(out: Path, source: Path | None, *, force: bool) -> None:
    """Raises InputError if `out` cannot or must not be written. source: the file that is read, if any."""
    check_output(out)
    if out.exists() and not out.is_file():
        raise InputError(f"{out} is not a regular file.", "Choose another path.")
    if out.exists() and source is not None and out.samefile(source):
        raise InputError(f"{out} is the source.", "Choose another path.")
    if out.exists() and not force:
        raise InputError(f"{out} exists.", "Choose another path, or replace it with --force.")
    if not os.access(out.parent, os.W_OK | os.X_OK):  # of the file that replaces it
        raise InputError(f"Cannot write to the folder {out.parent}.", "Choose a path elsewhere.")


@dataclass(frozen=True, kw_only=True)
class FilePlan(ABC):
    """A file before it is written."""

    room_hint: ClassVar[str] = "Free some space, or choose a path elsewhere."

    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)  # of the source: gguf.ReaderField by key
    changed: dict[str, Any]  # metadata that differs from the source's
    tensors: tuple[Any, ...]  # with name, shape (the slowest dimension first), type and n_bytes (without padding)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors with the padding between them, without the header."""
        sizes = (tensor.n_bytes for tensor in self.tensors)
        return sum(int(gguf.GGUFWriter.ggml_pad(size, gguf.GGUF_DEFAULT_ALIGNMENT)) for size in sizes)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the routed experts' matrices."""
        return sum(tensor.n_bytes for tensor in self.tensors if "_exps.weight" in tensor.name)

    @abstractmethod
    def room_bytes(self, sparse: bool) -> int:
        """Upper bound of what the file takes on the disk."""

    @abstractmethod
    def data(self) -> Generator[Iterable[Bytes]]:
        """Yields the bytes of each tensor in groups: uint8 [rows, bytes of a row], or one-dimensional."""

    def add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        """Adds the keys of a tokenizer that is not among the source's fields."""
        return

    def check_space(self, out: Path, *, sparse: bool = False) -> None:
        """Raises DiskSpaceError if the file does not fit on the disk."""
        n_bytes, free = self.room_bytes(sparse), shutil.disk_usage(out.parent).free
        if n_bytes > free:
            message = f"{out} needs {format_bytes(n_bytes)}, and {format_bytes(free)} are free there."
            raise DiskSpaceError(message, self.room_hint)

    def write(self, out: Path, *, sparse: bool = False, on_bytes: OnBytes = lambda n: None) -> None:
        """Writes `out`, replacing it; calls on_bytes after each group of bytes. A failure leaves no file.

        sparse: zeros at the end of a group, which is two-dimensional, become a hole.
        """
        try:
            with _part_file(out) as (part, file):
                self.write_header(part)
                file.seek(0, os.SEEK_END)
                file.write(b"\0" * (-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))  # up to the first tensor
                with closing(self.data()) as tensors:
                    for groups in tensors:
                        for data in groups:
                            n_live = 1 + max(np.flatnonzero(data.any(axis=1)), default=-1) if sparse else len(data)
                            file.write(data[:n_live].data)
                            file.seek(data[n_live:].nbytes, os.SEEK_CUR)  # a hole
                            on_bytes(data.nbytes)
                        file.write(b"\0" * (-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
                file.truncate()  # to where the last hole ends
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in DISK_FULL_ERRORS:
                raise DiskSpaceError(
                    f"Cannot write {out}: {(error.strerror or 'no room').lower()}.", "Free some space and try again."
                ) from None
            raise

    def write_header(self, path: Path) -> None:
        """Writes metadata and the list of tensors."""
        writer = gguf.GGUFWriter(path, self.architecture)
        add_metadata(writer, self.fields, self.changed)
        self.add_tokenizer(writer)
        for tensor in self.tensors:
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=tensor.type
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()


@contextmanager
def _part_file(out: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Yields the growing file, which becomes `out` if the body succeeds and is deleted otherwise."""
    part = out.with_name(f"{out.name}.part")
    with part.open("ab") as lock:  # overwrites what a killed run left
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{part} is being written by another process.", "Choose another path.") from None
        try:
            with part.open("r+b") as file:
                yield part, file
            os.replace(part, out)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def add_metadata(writer: gguf.GGUFWriter, fields: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Adds the source's fields, gguf.ReaderField by key, with changed values, and the values of further keys."""
    left = dict(changed)
    dropped = {"general.architecture", "general.alignment", "general.size_label", "general.parameter_count"}
    for name, each in fields.items():
        if name not in dropped:
            sub_type = each.types[-1] if each.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, left.pop(name, each.contents()), each.types[0], sub_type=sub_type)
    for name, value in left.items():
        writer.add_key_value(name, value, _VALUE_TYPES[type(value)])
