"""One file from the hub into its cache: resumed where an earlier try stopped, and checked by its hash.

huggingface_hub's own hf_hub_download starts a file anew after every interruption (it deletes the partial file) and
does not look at the hash; so the bytes come through its http_get into `blobs/<etag>.incomplete`, which stays, and
hf_hub_download links the finished blob into the cache as it would its own.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from moeedge.errors import DownloadError
from moeedge.hub import cache
from moeedge.hub.endpoint import hub_endpoint, no_bars
from moeedge.hub.remote import NoAnswerError, RemoteFile, hub_errors
from moeedge.units import format_bytes

_BLOCK_BYTES = 4 * 2**20
_CHUNK_BYTES = 2**19  # huggingface_hub's 10 MB would be lost by every cut, and shown by a slow line twice a minute
_DISK_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_MAX_HTTP_BYTES = 50 * 1000**3  # the hub serves larger files by its own protocol only


class RoutingReader(Protocol):
    """Is told how a download goes; `phase` is "checking" while bytes that were here are read, else "downloading"."""

    def begin(self, name: str, total_bytes: int) -> None:
        """A file comes next."""

    def at(self, n_bytes: int, *, phase: str) -> None:
        """So many bytes of it are there."""

    def end(self, *, done: bool) -> None:
        """The file is there, or the download stopped."""


def download(file: RemoteFile, watcher: RoutingReader, *, sha256: str | None = None) -> Path:
    """Bring `file` into the cache and return its path there. At most as many bytes as are missing are asked for.

    sha256: another hash that it must have, besides the hub's. Raises DownloadError; the bytes that have arrived stay,
    unless their hash is wrong. KeyboardInterrupt leaves them, too.
    """
    blob = cache.repo_folder(file.repo) / "blobs" / file.etag
    partial = cache.partial_file(file.repo, file.etag)
    with _lock(file), _full_disk(file, partial):
        if not blob.is_file():
            blob.parent.mkdir(parents=True, exist_ok=True)
            watcher.begin(file.path, file.size_bytes)
            done = False
            try:
                digest = _fetch(file, partial, watcher)
                _check(file, partial, digest, sha256)
                os.replace(partial, blob)
                done = True
            finally:
                watcher.end(done=done)
        return _link(file)


def _fetch(file: RemoteFile, partial: Path, watcher: RoutingReader) -> str:
    """The missing bytes of `file` into `partial`; returns the hash of all."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if cache.size_of(partial) > file.size_bytes:  # not ours
        partial.unlink()
    if file.size_bytes > _MAX_HTTP_BYTES:
        raise DownloadError(
            f"{file.path} of {file.repo} is larger than the hub gives by plain HTTP (50 GB).",
            f"Fetch it by hf download {file.repo} {file.path}; moeedge finds it in the same cache.",
        )
    what = f"{file.path} of {file.repo}"
    with _HashedFile(partial, watcher.at) as sink:
        while (have := sink.tell()) < file.size_bytes:
            try:
                with _small_chunks(), hub_errors(what, file.repo, file.commit):
                    http_get(
                        hf_hub_url(file.repo, file.path, revision=file.commit, endpoint=hub_endpoint()),
                        cast(BinaryIO, sink),
                        resume_size=have,
                        headers=build_hf_headers(),
                        expected_size=file.size_bytes,
                    )
            except NoAnswerError:
                if sink.tell() <= have:  # versions of huggingface_hub differ in which cuts they mend themselves
                    raise
        sink.sync()
        return sink.hexdigest()


@contextmanager
def _small_chunks() -> Iterator[None]:
    """Without huggingface_hub's own bar, and in chunks of ours."""
    from huggingface_hub import constants, file_download

    name = "DOWNLOAD_CHUNK_SIZE"
    modules = [module for module in (constants, file_download) if hasattr(module, name)]  # by version, one or both
    before = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, _CHUNK_BYTES)
    try:
        with no_bars():
            yield
    finally:
        for module, value in zip(modules, before, strict=True):
            setattr(module, name, value)


def _check(file: RemoteFile, partial: Path, digest: str, wanted: str | None) -> None:
    """Raises DownloadError, and removes what came, unless size and hash are right."""
    size = cache.size_of(partial)
    if size != file.size_bytes:
        if size > file.size_bytes:
            partial.unlink()
        raise DownloadError(f"Of {file.path} {size:,} bytes came instead of {file.size_bytes:,}.", "Pull again.")
    for right in (file.sha256, wanted):
        if right is not None and digest != right:
            partial.unlink(missing_ok=True)
            raise DownloadError(
                f"{file.path} of {file.repo} arrived damaged: its SHA-256 is {digest[:12]}..., not {right[:12]}...; it "
                "was removed.",
                "Pull again; if that happens twice, the server or a proxy alters it.",
            )


def _link(file: RemoteFile) -> Path:
    """Put the finished blob where the cache's readers look. One more question to the hub, no download."""
    from huggingface_hub import hf_hub_download

    with hub_errors(f"{file.path} of {file.repo}", file.repo, file.commit):
        path = hf_hub_download(
            file.repo, file.path, revision=file.commit, cache_dir=cache.hub_cache(), endpoint=hub_endpoint()
        )
    if file.revision != file.commit:  # a branch: readers look there for the newest
        reference = cache.repo_folder(file.repo) / "refs" / file.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(file.commit, encoding="utf-8")
    return Path(path)


@contextmanager
def _lock(file: RemoteFile) -> Iterator[None]:
    """Two processes must not append to one partial file."""
    from filelock import FileLock, Timeout

    folder = cache.hub_cache() / ".locks" / cache.repo_folder(file.repo).name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f"{file.etag}{cache.INCOMPLETE}.lock", timeout=0):
            yield
    except Timeout:
        raise DownloadError(f"Another process is downloading {file.path} just now.", "Wait for it.") from None


@contextmanager
def _full_disk(file: RemoteFile, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        have = format_bytes(cache.size_of(partial))
        raise DownloadError(
            f"The disk of {cache.hub_cache()} is full: {have} of {format_bytes(file.size_bytes)} of {file.path} are "
            "there.",
            "Make room and pull again, it goes on from there; or put the cache elsewhere ($HF_HUB_CACHE).",
        ) from None


class _HashedFile:
    """The partial file as http_get writes it: every byte is hashed on its way, those of earlier tries first.

    Unbuffered, so that an error of the disk comes from the write that it belongs to, and a killed process leaves all.
    """

    def __init__(self, path: Path, at: Callable[..., None]) -> None:
        self._raw = io.FileIO(path, "r+" if path.exists() else "w+")
        self._at = at
        self._digest = hashlib.sha256()

    def __enter__(self) -> _HashedFile:
        try:
            self._read_again()
        except BaseException:
            self._raw.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def _read_again(self) -> None:
        """Hash what is there; the position is its end."""
        self._digest = hashlib.sha256()
        self._raw.seek(0)
        while block := self._raw.read(_BLOCK_BYTES):
            self._digest.update(block)
            self._at(self._raw.tell(), phase="checking")

    def write(self, data: bytes) -> int:
        """All of `data`, or OSError."""
        view = memoryview(data)
        while view:
            n = self._raw.write(view) or 0
            self._digest.update(view[:n])
            view = view[n:]
        self._at(self._raw.tell(), phase="downloading")
        return len(data)

    def tell(self) -> int:
        """Bytes that are there."""
        return self._raw.tell()

    def seek(self, position: int) -> int:
        """Only ever followed by truncate: the server began anew."""
        return self._raw.seek(position)

    def truncate(self) -> int:
        """Forget what is behind the position."""
        size = self._raw.truncate()
        self._read_again()
        return size

    def flush(self) -> None:
        """Nothing is held back."""

    def sync(self) -> None:
        """Until the disk has it: the name of a blob promises its content."""
        os.fsync(self._raw.fileno())

    def hexdigest(self) -> str:
        """SHA-256 of everything that is there."""
        return self._digest.hexdigest()
