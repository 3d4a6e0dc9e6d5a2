"""A model whose experts stay in its file: the other weights are read ahead and kept in memory.

llama.cpp maps such a file lazily (`moeedge.native.mapping`). Its weights are in the page cache, and the kernel may drop
them in favour of other files. So they are locked as far as the limit of locked memory allows.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moeedge.errors import ModelFileError
from moeedge.llama import gguf_file
from moeedge.native.mapping import advise_normal, lock_in_memory

_N_READERS = 4
_PIECE_BYTES = 1 << 20
_PADDING_BYTES = 4096  # tensors are aligned by less
_LAYER = re.compile(r"^blk\.(\d+)\.")


@dataclass(frozen=True)
class DenseWeights:
    """The dense weights of a model whose experts stay in its file."""

    n_bytes: int
    read_s: float
    locked_bytes: int  # of those in host memory, in pages; 0: the limit of locked memory does not allow any


@dataclass(frozen=True)
class FileTensor:
    """Where a tensor is."""

    file: Path
    offset: int
    size_bytes: int
    name: str

    def is_on_host(self, n_layers: int | None) -> bool:
        """Whether it is in host memory, where the first `n_layers` layers and the token embeddings are; None: all."""
        layer = _LAYER.match(self.name)
        return n_layers is None or (int(layer[1]) < n_layers if layer else self.name.startswith("token_embd."))


@dataclass(frozen=True)
class SplitWeights:
    """The tensors of a model's files: dense ones, and experts, which routers choose."""

    dense: tuple[FileTensor, ...]
    experts: tuple[FileTensor, ...]

    @classmethod
    def read(cls, path: Path) -> SplitWeights:
        """Reads the headers of all parts. Raises ModelFileError."""
        experts, files = gguf_file.expert_tensors(path)
        names = {tensor.name for tensor in experts}
        tensors = [
            FileTensor(file, tensor.offset, tensor.size_bytes, tensor.name)
            for file in files
            for tensor in gguf_file.read_tensors(file)
        ]
        return cls(
            dense=tuple(tensor for tensor in tensors if tensor.name not in names),
            experts=tuple(tensor for tensor in tensors if tensor.name in names),
        )

    def read_ahead(self) -> float:
        """Reads the dense tensors into the page cache in large requests; returns seconds. Raises ModelFileError."""
        start_s = time.perf_counter()
        for path, ranges in ranges_by_file(self.dense).items():
            pieces = [piece for offset, n_bytes in ranges for piece in _pieces(offset, n_bytes)]
            try:
                _read_pieces(path, pieces)
            except OSError as error:
                raise ModelFileError(f"Cannot read {path}: {error.strerror}.", "Check the disk.") from error
        return time.perf_counter() - start_s

    def keep_dense(self, read_s: float, *, n_host_layers: int | None) -> DenseWeights:
        """Locks the dense tensors that are in host memory, and drops pages of experts that came with the headers.

        To be called once llama.cpp has mapped the files. read_s: of `read_ahead`. n_host_layers: of `is_on_host`.
        """
        locked_bytes = 0
        for path, ranges in ranges_by_file([t for t in self.dense if t.is_on_host(n_host_layers)]).items():
            advise_normal(path, ranges)
            locked_bytes += lock_in_memory(path, ranges)
        if hasattr(os, "posix_fadvise"):
            for path, ranges in ranges_by_file(self.experts).items():
                with path.open("rb", buffering=0) as file:
                    for offset, n_bytes in ranges:
                        os.posix_fadvise(file.fileno(), offset, n_bytes, os.POSIX_FADV_DONTNEED)
        return DenseWeights(sum(tensor.size_bytes for tensor in self.dense), read_s, locked_bytes)


def let_experts_read_ahead(path: Path) -> None:
    """Lets faults in the experts' ranges read ahead again, for a model that is computed from the mapped file."""
    for file, ranges in ranges_by_file(SplitWeights.read(path).experts).items():
        advise_normal(file, ranges)


def _read_pieces(path: Path, pieces: Sequence[tuple[int, int]]) -> None:
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_N_READERS) as pool:
        descriptor = file.fileno()
        if hasattr(os, "posix_fadvise"):  # the kernel reads no more than what is asked for
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for _n_bytes in pool.map(lambda piece: len(os.pread(descriptor, piece[1], piece[0])), pieces):
            pass


def ranges_by_file(tensors: Sequence[FileTensor]) -> dict[Path, list[tuple[int, int]]]:
    """Offset and bytes of the tensors, adjacent ones together; what is between these is padding."""
    found: dict[Path, list[tuple[int, int]]] = {}
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        ranges = found.setdefault(tensor.file, [])
        if ranges and tensor.offset - sum(ranges[-1]) < _PADDING_BYTES:
            ranges[-1] = (ranges[-1][0], tensor.offset + tensor.size_bytes - ranges[-1][0])
        else:
            ranges.append((tensor.offset, tensor.size_bytes))
    return found


def _pieces(offset: int, n_bytes: int) -> list[tuple[int, int]]:
    end = offset + n_bytes
    return [(at, min(_PIECE_BYTES, end - at)) for at in range(offset, end, _PIECE_BYTES)]
