"""Streams a wide file to disk, with one expert or one group of rows in memory at a time.

The file grows next to its final name with the suffix ".part" and is renamed when it is complete; any failure deletes
it. Zeros are written too, so that the file takes the room and disk traffic of a real model. A sparse file, on request,
takes only the room of its content, but reads the same from the page cache.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np

from moeedge.errors import DiskSpaceError, InputError
from moeedge.lab.widen.layout import WidePlan, WideTensor
from moeedge.lab.widen.maps import Bytes, row_bytes
from moeedge.paths import DISK_FULL_ERRORS
from moeedge.ui.console import check_output
from moeedge.units import format_bytes

_GROUP_BYTES = 32 * 2**20  # of rows in memory at once
_HEADER_ROOM = 2 * 2**20  # upper bound of a header's growth

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


def check_space(plan: WidePlan, out: Path, *, sparse: bool) -> None:
    """Raises DiskSpaceError if the file does not fit on the disk."""
    needed = plan.source.stat().st_size + _HEADER_ROOM
    if not sparse:
        needed += plan.data_bytes
    for tensor in plan.tensors if sparse else ():
        n_rows = 1 + int(max(np.flatnonzero(tensor.rows >= 0), default=-1))
        needed += tensor.n_matrices * (n_rows * tensor.mover.n_bytes + 4096)  # rounded up to pages
    check_room(out, needed, "Free some space, choose a path elsewhere, or write no zeros with --sparse.")


def check_room(out: Path, n_bytes: int, hint: str = "Free some space, or choose a path elsewhere.") -> None:
    """Raises DiskSpaceError if a file of that size does not fit on the disk."""
    free = shutil.disk_usage(out.parent).free
    if n_bytes > free:
        raise DiskSpaceError(f"{out} needs {format_bytes(n_bytes)}, and {format_bytes(free)} are free there.", hint)


def write(plan: WidePlan, out: Path, *, sparse: bool = False, on_bytes: OnBytes = lambda n: None) -> None:
    """Writes the plan to `out`, replacing it; calls on_bytes after each group of bytes. A failure leaves no file."""
    with plan.source.open("rb") as source:
        tensors = (_groups(tensor, source) for tensor in plan.tensors)
        stream(out, lambda part: _write_header(plan, part), tensors, sparse=sparse, on_bytes=on_bytes)


def stream(
    out: Path,
    write_header: Callable[[Path], None],
    tensors: Iterable[Iterable[Bytes]],
    *,
    sparse: bool = False,
    on_bytes: OnBytes = lambda n: None,
) -> None:
    """Writes a GGUF file from its header and the bytes of its tensors, each in groups of rows or of bytes.

    The file replaces `out`. sparse: zeros at the end of a group, which is two-dimensional, become a hole.
    """
    try:
        with _part_file(out) as (part, file):
            write_header(part)
            file.seek(0, os.SEEK_END)
            file.write(b"\0" * (-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))  # up to the first tensor
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


def _write_header(plan: WidePlan, path: Path) -> None:
    """Writes the metadata and the list of tensors."""
    writer = gguf.GGUFWriter(path, plan.fields["general.architecture"].contents())
    add_metadata(writer, plan.fields, plan.changed)
    finish_header(writer, [(tensor.name, tensor.shape, tensor.n_bytes, tensor.mover.type) for tensor in plan.tensors])


def add_metadata(writer: gguf.GGUFWriter, fields: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Adds the source's fields, gguf.ReaderField by key, with changed values, and the values of further keys."""
    left = dict(changed)
    dropped = {"general.architecture", "general.alignment", "general.size_label", "general.parameter_count"}
    for name, field in fields.items():
        if name not in dropped:
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, left.pop(name, field.contents()), field.types[0], sub_type=sub_type)
    for name, value in left.items():
        writer.add_key_value(name, value, _VALUE_TYPES[type(value)])


def finish_header(
    writer: gguf.GGUFWriter, tensors: Iterable[tuple[str, tuple[int, ...], int, gguf.GGMLQuantizationType]]
) -> None:
    """Writes the header. tensors: name, shape (the slowest dimension first), bytes and type of each."""
    for name, shape, n_bytes, type_ in tensors:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _groups(tensor: WideTensor, source: IO[bytes]) -> Iterator[Bytes]:
    """Yields the wide tensor in groups of rows: uint8 [rows, bytes of a row]."""
    origin, mover = tensor.source, tensor.mover
    narrow = row_bytes(mover.source_type, int(origin.shape[0]))
    n_rows = int(origin.shape[1]) if len(origin.shape) > 1 else 1
    # dequantised rows are larger than the file's
    group = max(1, _GROUP_BYTES // max(mover.n_bytes, 4 * int(origin.shape[0])))
    for matrix in range(tensor.n_matrices):
        start = int(origin.data_offset) + matrix * n_rows * narrow
        for first in range(0, len(tensor.rows), group):
            rows = tensor.rows[first : first + group]
            out = np.zeros((len(rows), mover.n_bytes), np.uint8)
            live = np.flatnonzero(rows >= 0)
            if len(live):
                needed, places = np.unique(rows[live], return_inverse=True)
                source.seek(start + int(needed[0]) * narrow)
                read = source.read(int(needed[-1] - needed[0] + 1) * narrow)
                found = np.frombuffer(read, np.uint8).reshape(-1, narrow)[needed - needed[0]]
                out[live] = mover.move(found)[places]
            yield out
