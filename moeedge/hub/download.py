"""Downloads one file from the hub into its cache, resumed where an earlier attempt stopped and checked by its hash.

huggingface_hub's hf_hub_download deletes the partial file of an interrupted download, so that 20 GB start anew, and
does not check the hash. Therefore the bytes come through its http_get into `blobs/<etag>.incomplete`, which stays, and
hf_hub_download only links the complete blob into the cache.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from moeedge.errors import DownloadError
from moeedge.hub import cache
from moeedge.hub.remote import NoAnswerError, RemoteFile, hub_endpoint, hub_errors, no_bars
from moeedge.paths import DISK_FULL_ERRORS
from moeedge.units import format_bytes

_BLOCK_BYTES = 4 * 2**20
_CHUNK_BYTES = 2**19  # a broken connection loses up to one chunk: huggingface_hub's 10 MB are too many on a slow link
_MAX_HTTP_BYTES = 50 * 1000**3  # the hub serves larger files by its own protocol only


class ProgressReporter(Protocol):
    """Receives the progress of a download; `phase` is "checking" while cached bytes are hashed, then "downloading"."""

    def begin(self, name: str, total_bytes: int) -> None:
        """The next file starts."""

    def at(self, n_bytes: int, *, phase: str) -> None:
        """`n_bytes` of it are on the disk."""

    def end(self, *, done: bool) -> None:
        """The file is complete, or the download stopped."""


def download(file: RemoteFile, reporter: ProgressReporter, *, sha256: str | None = None) -> Path:
    """Downloads the missing bytes of `file` into the cache and returns its path there.

    sha256: a hash that it must have in addition to the hub's. Raises DownloadError; bytes that have arrived stay on any
    exception (KeyboardInterrupt included), unless their hash is wrong.
    """
    blob = cache.blob_file(file.repo, file.etag)
    partial = cache.partial_file(file.repo, file.etag)
    with _lock(file), _disk_full_errors(file, partial):
        if not blob.is_file():
            blob.parent.mkdir(parents=True, exist_ok=True)
            reporter.begin(file.path, file.size_bytes)
            done = False
            try:
                digest = _fetch(file, partial, reporter)
                _check(file, partial, digest, sha256)
                os.replace(partial, blob)
                done = True
            finally:
                reporter.end(done=done)
        return _link(file)


def fetch_range(file: RemoteFile, sink: BinaryIO, start: int) -> None:
    """Writes the bytes of `file` from `start` on to `sink`. Raises DownloadError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    with no_bars(), hub_errors(f"{file.path} of {file.repo}", file.repo, file.commit):
        http_get(
            hf_hub_url(file.repo, file.path, revision=file.commit, endpoint=hub_endpoint()),
            sink,
            resume_size=start,
            headers=build_hf_headers(),
            expected_size=file.size_bytes,
        )


def _fetch(file: RemoteFile, partial: Path, reporter: ProgressReporter) -> str:
    """Appends the missing bytes of `file` to `partial`; returns the SHA-256 of all."""
    if cache.size_of(partial) > file.size_bytes:  # of another program
        partial.unlink()
    if file.size_bytes > _MAX_HTTP_BYTES:
        raise DownloadError(
            f"{file.path} of {file.repo} is larger than the hub serves by plain HTTP (50 GB).",
            f"Fetch it with hf download {file.repo} {file.path}; moeedge finds it in the same cache.",
        )
    with _HashedFile(partial, reporter.at) as sink, _small_chunks():
        while (have := sink.tell()) < file.size_bytes:
            try:
                fetch_range(file, cast(BinaryIO, sink), have)
            except NoAnswerError:
                if sink.tell() <= have:  # which broken connections http_get itself resumes differs by version
                    raise
        sink.sync()
        return sink.hexdigest()


@contextmanager
def _small_chunks() -> Iterator[None]:
    from huggingface_hub import constants, file_download

    name = "DOWNLOAD_CHUNK_SIZE"
    modules = [module for module in (constants, file_download) if hasattr(module, name)]  # by version, one or both
    before = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, _CHUNK_BYTES)
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            setattr(module, name, value)


def _check(file: RemoteFile, partial: Path, digest: str, sha256: str | None) -> None:
    """Raises DownloadError for a wrong size or hash, and deletes damaged bytes."""
    size = cache.size_of(partial)
    if size != file.size_bytes:
        if size > file.size_bytes:
            partial.unlink()
        raise DownloadError(
            f"The download of {file.path} stopped after {size:,} of {file.size_bytes:,} bytes.",
            "Run the same command again: it continues there.",
        )
    for expected in (file.sha256, sha256):
        if expected is not None and digest != expected:
            partial.unlink(missing_ok=True)
            raise DownloadError(
                f"{file.path} of {file.repo} arrived damaged and was deleted: its SHA-256 is {digest[:12]}..., not "
                f"{expected[:12]}....",
                "Download it again; if that happens twice, the server or a proxy alters it.",
            )


def _link(file: RemoteFile) -> Path:
    """Links the complete blob into its snapshot: one more request to the hub, no download."""
    from huggingface_hub import hf_hub_download

    with hub_errors(f"{file.path} of {file.repo}", file.repo, file.commit):
        path = hf_hub_download(
            file.repo, file.path, revision=file.commit, cache_dir=cache.hub_cache(), endpoint=hub_endpoint()
        )
    if file.revision != file.commit:  # a branch: readers of the cache look up its commit there
        reference = cache.repo_folder(file.repo) / "refs" / file.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(file.commit, encoding="utf-8")
    return Path(path)


@contextmanager
def _lock(file: RemoteFile) -> Iterator[None]:
    """Keeps two processes from appending to one partial file."""
    from filelock import FileLock, Timeout

    folder = cache.hub_cache() / ".locks" / cache.repo_folder(file.repo).name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f"{file.etag}{cache.INCOMPLETE}.lock", timeout=0):
            yield
    except Timeout:
        raise DownloadError(
            f"Another process is downloading {file.path}.", "Wait until it ends, then run the command again."
        ) from None


@contextmanager
def _disk_full_errors(file: RemoteFile, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        have = format_bytes(cache.size_of(partial))
        raise DownloadError(
            f"The disk of {cache.hub_cache()} is full: {have} of {format_bytes(file.size_bytes)} of {file.path} have "
            "arrived.",
            "Free some space and run the same command again, or download to another disk ($HF_HUB_CACHE).",
        ) from None


class _HashedFile:
    """The partial file that http_get writes to: hashes the bytes of earlier attempts, then every byte written.

    Unbuffered, so that a disk error is raised by its own write and a killed process keeps every byte.
    """

    def __init__(self, path: Path, at: Callable[..., None]) -> None:
        self._raw = io.FileIO(path, "r+" if path.exists() else "w+")
        self._at = at
        self._digest = hashlib.sha256()

    def __enter__(self) -> _HashedFile:
        try:
            self._hash_existing()
        except BaseException:
            self._raw.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def _hash_existing(self) -> None:
        """Hashes the file's content and leaves the position at its end."""
        self._digest = hashlib.sha256()
        self._raw.seek(0)
        while block := self._raw.read(_BLOCK_BYTES):
            self._digest.update(block)
            self._at(self._raw.tell(), phase="checking")

    def write(self, data: bytes) -> int:
        """Writes all of `data`, or raises OSError."""
        view = memoryview(data)
        while view:
            n = self._raw.write(view) or 0
            self._digest.update(view[:n])
            view = view[n:]
        self._at(self._raw.tell(), phase="downloading")
        return len(data)

    def tell(self) -> int:
        """Returns the number of bytes in the file."""
        return self._raw.tell()

    def seek(self, position: int) -> int:
        """Called only before truncate, when the server starts from the beginning."""
        return self._raw.seek(position)

    def truncate(self) -> int:
        """Drops the bytes after the position."""
        size = self._raw.truncate()
        self._hash_existing()
        return size

    def flush(self) -> None:
        """Does nothing: writes are unbuffered."""

    def sync(self) -> None:
        """Waits until the bytes are on the disk, because a blob's name promises its content."""
        os.fsync(self._raw.fileno())

    def hexdigest(self) -> str:
        """Returns the SHA-256 of the file's content."""
        return self._digest.hexdigest()
