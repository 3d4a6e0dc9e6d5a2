"""A model whose experts stay in its file: the other weights are read and kept in memory.

llama.cpp maps such a file lazily (`moeedge.native.mapping`). The pages of its dense weights get memory of their own,
which the kernel does not drop and changes of the file do not reach, where that is possible; else they are in the page
cache. Either way they are locked as far as the limit of locked memory allows.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moeedge.errors import ModelFileError
from moeedge.hardware.host import fits
from moeedge.llama import gguf_file
from moeedge.llama.gguf_file import LAYER, GgufTensor
from moeedge.native import mapping
from moeedge.native.mapping import N_READERS, PIECE_BYTES, FileVersion, Mapped, mapped, pages_of

_PADDING_BYTES = 4096  # tensors are aligned by less


@dataclass(frozen=True)
class DenseWeights:
    n_bytes: int
    host_bytes: int  # of those in host memory, in pages
    own_bytes: int  # of these, in memory of their own; the rest is in the page cache
    locked_bytes: int  # of host_bytes; less than all: the limit of locked memory allows no more
    files: Mapping[Path, FileVersion]  # when the headers were read

    def check_files(self) -> None:
        """Raises ModelFileError if a file is not the one whose header was read."""
        for file, version in self.files.items():
            if _version(file) != version:
                raise _cannot_read(file, OSError(errno.ESTALE, "it was changed while it was being loaded"))


@dataclass(frozen=True)
class SplitWeights:
    """The tensors of a model's files: dense ones, and experts, which routers choose."""

    dense: tuple[GgufTensor, ...]
    experts: tuple[GgufTensor, ...]
    files: Mapping[Path, FileVersion]

    @classmethod
    def read(cls, path: Path, *, n_layers: int | None = None) -> SplitWeights:
        """Reads all headers; experts of blocks after `n_layers` layers (MTP) are dense. Raises ModelFileError."""
        versions = {file: _version(file) for file in gguf_file.parts(path)}
        experts, _ = gguf_file.expert_tensors(path, n_layers=n_layers)
        names, tensors = {tensor.name for tensor in experts}, gguf_file.read_all_tensors(path)
        dense = tuple(tensor for tensor in tensors if tensor.name not in names)
        return cls(dense, tuple(tensor for tensor in tensors if tensor.name in names), versions)

    @property
    def n_layers(self) -> int:
        """Layers of the files, those included that predict further tokens."""
        layers = (LAYER.match(tensor.name) for tensor in (*self.dense, *self.experts))
        return max((1 + int(layer[1]) for layer in layers if layer), default=0)

    def read_ahead(self, n_host_experts: int | None = None) -> None:
        """Reads dense tensors and experts after `n_host_experts` layers, into the page cache. Raises ModelFileError."""
        on_gpu = [] if n_host_experts is None else [t for t in self.experts if not t.is_on_host(n_host_experts)]
        for path, ranges in ranges_by_file([*self.dense, *on_gpu]).items():
            _read_ahead(path, ranges)

    def mapped(self) -> frozenset[Mapped]:
        return frozenset(each for file in self.files for each in mapped(file))

    def keep_dense(self, before: frozenset[Mapped], *, n_host_layers: int | None) -> DenseWeights:
        """Reads the dense tensors that are in host memory into memory of their own, and locks them.

        To be called once llama.cpp has mapped the files. before: `mapped` before that. n_host_layers: of `is_on_host`.
        Raises ModelFileError if a file cannot be read or has changed.
        """
        on_host = ranges_by_file([tensor for tensor in self.dense if tensor.is_on_host(n_host_layers)])
        pages = {file: pages_of([m for m in mapped(file) if m not in before], on_host[file]) for file in on_host}
        n_pages_bytes = sum(each.n_bytes for of_file in pages.values() for each in of_file)
        own_bytes = 0
        if fits(n_pages_bytes):
            for file, of_file in pages.items():
                try:
                    own_bytes += mapping.give_own_memory(file, self.files[file], of_file)
                except OSError as error:
                    raise _cannot_read(file, error) from error
        if own_bytes < n_pages_bytes or not n_pages_bytes:
            for file, of_file in pages.items():
                mapping.advise_normal(of_file)
                _read_ahead(file, on_host[file])
        locked_bytes = sum(map(mapping.lock_in_memory, pages.values()))
        if hasattr(os, "posix_fadvise"):  # pages of experts that came with the headers leave the page cache
            for path, ranges in ranges_by_file(self.experts).items():
                with path.open("rb", buffering=0) as opened:
                    for offset, n_bytes in ranges:
                        os.posix_fadvise(opened.fileno(), offset, n_bytes, os.POSIX_FADV_DONTNEED)
        return DenseWeights(
            n_bytes=sum(tensor.size_bytes for tensor in self.dense),
            host_bytes=n_pages_bytes or sum(size for ranges in on_host.values() for _offset, size in ranges),
            own_bytes=own_bytes,
            locked_bytes=locked_bytes,
            files=self.files,
        )


def let_experts_read_ahead(path: Path) -> None:
    """Lets faults in the experts' ranges read ahead again, for a model that is computed from the mapped file."""
    for file, ranges in ranges_by_file(SplitWeights.read(path).experts).items():
        mapping.advise_normal(pages_of(mapped(file), ranges))


def _version(file: Path) -> FileVersion:
    try:
        return FileVersion.of(file)
    except FileNotFoundError as error:
        raise ModelFileError(f"There is no model file {file}.", "Check the path.") from error
    except OSError as error:
        raise _cannot_read(file, error) from error


def _cannot_read(file: Path, error: OSError) -> ModelFileError:
    hint = "Start again when it is complete." if error.errno == errno.ESTALE else "Check the disk."
    return ModelFileError(f"Cannot read {file}: {error.strerror}.", hint)


def _read_ahead(path: Path, ranges: Sequence[tuple[int, int]]) -> None:
    """Reads ranges into the page cache in large requests."""
    ends = [(offset, offset + n_bytes) for offset, n_bytes in ranges]
    pieces = [(at, min(PIECE_BYTES, end - at)) for start, end in ends for at in range(start, end, PIECE_BYTES)]
    try:
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(N_READERS) as pool:
            descriptor = file.fileno()
            if hasattr(os, "posix_fadvise"):  # the kernel reads no more than what is asked for
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            list(pool.map(lambda piece: len(os.pread(descriptor, piece[1], piece[0])), pieces))
    except OSError as error:
        raise _cannot_read(path, error) from error


def ranges_by_file(tensors: Sequence[GgufTensor]) -> dict[Path, list[tuple[int, int]]]:
    """Offset and bytes of the tensors, adjacent ones together; what is between these is padding."""
    by_file: dict[Path, list[tuple[int, int]]] = {}
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        ranges = by_file.setdefault(tensor.file, [])
        if ranges and tensor.offset - sum(ranges[-1]) < _PADDING_BYTES:
            ranges[-1] = (ranges[-1][0], tensor.offset + tensor.size_bytes - ranges[-1][0])
        else:
            ranges.append((tensor.offset, tensor.size_bytes))
    return by_file
