"""Models of which only the header is there: a plan needs no more.

llama.cpp refuses a file that is shorter than its header says. It gets a stand-in then: a copy of the header in a
temporary folder, as long as the whole file but with a hole where the weights would be, which takes no room on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from moeedge.engine import gguf_file
from moeedge.errors import EngineError, ModelFileError

_ALIGNMENT = 32  # bytes; the data section begins at a multiple of it, and nothing may be missing up to there
_HEADER_MAX_BYTES = 2**28


@dataclass(frozen=True)
class Loadable:
    """A path that llama.cpp takes for the model, and what the file there lacks."""

    path: Path
    original: Path
    missing_bytes: int = 0  # of all parts


@contextmanager
def loadable(path: Path) -> Iterator[Loadable]:
    """The model at `path`, or stand-ins for its files where one ends before its header says.

    Raises ModelFileError for what has no whole header, EngineError where no temporary file can be had.
    """
    with ExitStack() as stack:
        try:
            found = _prepare(path, lambda: Path(stack.enter_context(TemporaryDirectory(prefix="moeedge-plan-"))))
        except OSError as error:
            raise EngineError(
                f"The header of {path} cannot be copied to a temporary file: {error.strerror or error}.",
                "Set TMPDIR to a folder that has room and takes files with holes.",
            ) from error
        yield found


def _prepare(path: Path, make_folder: Callable[[], Path]) -> Loadable:
    files = gguf_file.parts(path)
    folder: Path | None = None
    read, missing = [], 0
    for file in files:
        try:
            tensors = gguf_file.read_tensors(file)
        except ModelFileError:
            if not file.is_file() or not 0 < file.stat().st_size <= _HEADER_MAX_BYTES:
                raise
            folder = folder or make_folder()
            tensors = _read_padded(file, folder / file.name)
        promised = gguf_file.promised_bytes(tensors)
        read.append((min((tensor.offset for tensor in tensors), default=promised), promised))
        missing += max(0, promised - file.stat().st_size)
    if not missing:
        return Loadable(path, path)
    folder = folder or make_folder()
    for file, (data_offset, promised) in zip(files, read, strict=True):
        copy = folder / file.name
        if file.stat().st_size >= promised:
            copy.symlink_to(file.resolve())
            continue
        with file.open("rb") as source, copy.open("wb") as target:
            target.write(source.read(data_offset))
            target.truncate(promised)  # a hole: it takes no room on the disk
    return Loadable(folder / files[0].name, path, missing)


def _read_padded(file: Path, copy: Path) -> list[gguf_file.GgufTensor]:
    """The tensors of a header that ends where its last entry does, without the padding before the data."""
    shutil.copyfile(file, copy)
    os.truncate(copy, -(-file.stat().st_size // _ALIGNMENT) * _ALIGNMENT)
    try:
        return gguf_file.read_tensors(copy)
    except ModelFileError:
        gguf_file.read_tensors(file)  # speaks of the file itself
        raise
