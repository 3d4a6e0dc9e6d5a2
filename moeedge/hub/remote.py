"""The hub through huggingface_hub: questions, and the downloads of `moeedge pull`, checked by their hashes.

huggingface_hub is imported inside functions: the import takes a third of a second, which a run on local files saves.
Its errors become DownloadError. $HF_ENDPOINT names another server.

Its hf_hub_download deletes the partial file of an interrupted download, so that 20 GB start anew, and does not check
the hash. Therefore the bytes come through its http_get into `blobs/<etag>.incomplete`, which stays, and hf_hub_download
only links the complete blob into the cache.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from moeedge.errors import DownloadError, InputError
from moeedge.hub.catalog import BUNDLED, SHA256, Catalog, Choice, HubFile, Variant, choose_files, find
from moeedge.hub.local import (
    INCOMPLETE,
    absent,
    blob_file,
    find_reference,
    find_variant,
    have_bytes,
    hub_cache,
    repo_folder,
    size_of,
    unfinished_downloads,
)
from moeedge.paths import DISK_FULL_ERRORS, existing
from moeedge.units import format_bytes

DEFAULT_ENDPOINT = "https://huggingface.co"
_DATASET_TIMEOUT_S = 5.0  # shorter than $HF_HUB_ETAG_TIMEOUT: further sources follow
_ETAG = re.compile(r"[\w.-]+")
_ERRNO = re.compile(r"\[Errno -?\d+\] ")


class NoAnswerError(DownloadError):
    """The server was unreachable, broke off or fell silent: a failure of the network, not an answer."""


@dataclass(frozen=True)
class RemoteFile:
    """One file as the hub serves it now."""

    repo: str
    revision: str  # as requested: a branch, a tag or a commit
    commit: str
    path: str
    size_bytes: int
    etag: str  # name of its blob in the cache
    sha256: str | None  # of the content; None for a small file in git itself, whose ETag is another hash
    have_bytes: int = 0  # on this machine, from an earlier attempt


def hub_endpoint() -> str:
    """Returns the server's URL: $HF_ENDPOINT, else the public hub. Read at call time, not at import."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """Whether $HF_HUB_OFFLINE forbids requests. Read at call time, not at import."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def ask_file(repo: str, path: str, revision: str) -> RemoteFile:
    """Returns size, hash and commit of one file. Raises DownloadError."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    endpoint = hub_endpoint()
    with hub_errors(f"{path} of {repo}", repo, revision):
        url = hf_hub_url(repo, path, revision=revision, endpoint=endpoint)
        meta = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    if meta.commit_hash is None or meta.size is None or meta.etag is None or not _ETAG.fullmatch(meta.etag):
        raise DownloadError(
            f"{endpoint} does not answer as a Hugging Face hub: it sent no commit, size or ETag for {path} of {repo}.",
            "Check $HF_ENDPOINT and your proxy.",
        )
    sha256 = meta.etag if SHA256.fullmatch(meta.etag) else None
    return RemoteFile(repo, revision, meta.commit_hash, path, meta.size, meta.etag, sha256)


def list_files(repo: str, revision: str) -> list[HubFile]:
    """Returns all files of a model repository. Raises DownloadError."""
    from huggingface_hub import HfApi, constants

    with hub_errors(repo, repo, revision):
        limit_s = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi(hub_endpoint()).model_info(repo, revision=revision, files_metadata=True, timeout=limit_s)
    siblings = info.siblings or ()
    return [HubFile(each.rfilename, each.size, each.lfs.sha256 if each.lfs else None) for each in siblings]


def fetch_dataset_file(repo: str, file: str, revision: str, folder: Path) -> Path:
    """Downloads one file of a dataset repository to `folder` and returns its path. Raises DownloadError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    endpoint = hub_endpoint()
    try:
        with hub_errors(f"{file} of {repo}", repo, revision):
            # hf_hub_download retries an unreachable server for most of a minute; this request does not
            url = hf_hub_url(repo, file, repo_type="dataset", revision=revision, endpoint=endpoint)
            get_hf_file_metadata(url, timeout=_DATASET_TIMEOUT_S)
            path = hf_hub_download(
                repo, file, repo_type="dataset", revision=revision, local_dir=folder, endpoint=endpoint
            )
    except OSError as error:
        raise DownloadError(f"Cannot write {file} of {repo} to {folder}: {error.strerror or error}.") from None
    return Path(path)


@contextmanager
def hub_errors(what: str, repo: str, revision: str) -> Iterator[None]:
    """Turns errors of huggingface_hub and its HTTP library into a DownloadError about `what`; disk errors pass.

    Raises DownloadError at once when HF_HUB_OFFLINE is set, as --offline does. Shows no bars of huggingface_hub's.
    """
    if is_offline():
        hint = "Leave out --offline, or unset HF_HUB_OFFLINE, and run the command again."
        raise DownloadError(f"{what} was not downloaded: --offline or HF_HUB_OFFLINE=1 forbids it.", hint)
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    had_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its warnings of retries would break the progress bar
    try:
        yield
    except DownloadError:
        raise
    except Exception as error:  # the HTTP library and its errors differ by version of huggingface_hub
        is_network = isinstance(error, ConnectionError | TimeoutError)
        if isinstance(error, OSError) and (error.filename or (error.errno is not None and not is_network)):
            raise  # of the disk
        raise _explain(error, what, repo, revision) from None
    finally:
        logger.setLevel(level)
        if had_bars:
            enable_progress_bars()


def _explain(error: Exception, what: str, repo: str, revision: str) -> DownloadError:
    """Returns the error for the user, by the HTTP status and the code that the hub sent."""
    endpoint = hub_endpoint()
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if response is None or status is None:
        reason = _ERRNO.sub("", " ".join(str(error).split()))[:200] or type(error).__name__
        return NoAnswerError(
            f"Cannot reach {endpoint} for {what} ({reason}).",
            f"Check the network, $HF_ENDPOINT and your proxy.{_arrived(repo)}",
        )
    code = response.headers.get("X-Error-Code", "")
    message, hint = f"{endpoint} does not serve {what}", f"Try again later.{_arrived(repo)}"
    if code == "GatedRepo" or status == 403:
        message = f"{repo} is gated at {endpoint}"
        hint = f"Accept its terms at {endpoint}/{repo} and set HF_TOKEN to a token of that account (or: hf auth login)."
    elif code == "EntryNotFound":
        message = f"There is no {what} at {endpoint}, revision {revision}"
        hint = f"See {endpoint}/{repo}/tree/main for its files."
    elif code == "RevisionNotFound":
        message = f"{repo} has no revision {revision} at {endpoint}"
        hint = f"Its owner may have rewritten it: take the newest with moeedge pull hf:{repo}."
    elif status in (401, 404):
        message = f"There is no repository {repo} at {endpoint}, or it is private"
        hint = "Check the name; for a private one set HF_TOKEN (or: hf auth login)."
    elif status == 429:
        message, hint = f"{endpoint} limits requests", "Try again later, or set HF_TOKEN."
    return DownloadError(f"{message} (HTTP status {status}).", hint)


def _arrived(repo: str) -> str:
    """A sentence for a hint where bytes of an unfinished download of the repository are on the disk; else empty."""
    n_bytes = sum(size_of(path) for owner, path in unfinished_downloads() if owner == repo)
    return f" A partial download is kept: {format_bytes(n_bytes)}." if n_bytes else ""


Role = Literal["target", "draft"]
At = Callable[[int, str], None]  # bytes of a file on the disk; "checking" while cached ones are hashed, "downloading"
ShowFile = Callable[[str, int], AbstractContextManager[At]]  # its name and size
_RESERVE_BYTES = 256 * 2**20  # of the disk stays free
_BLOCK_BYTES = 4 * 2**20
_CHUNK_BYTES = 2**19  # a broken connection loses up to one chunk: huggingface_hub's 10 MB are too many on a slow link
_MAX_HTTP_BYTES = 50 * 1000**3  # the hub serves larger files by its own protocol only


@dataclass(frozen=True)
class WantedModel:
    role: Role
    name: str  # as the user or the catalog calls it
    licence: str
    variant: Variant  # from the catalog or the hub's listing
    local: Path | None  # the first file, if all are on this machine


def want(catalog: Catalog, name: str, role: Role, *, quant: str | None = None) -> WantedModel:
    """Returns the model that `name` means, in the catalog or on the hub. Raises InputError and DownloadError."""
    choice = find(catalog, name, quant=quant)
    if isinstance(choice, Choice):
        local = find_variant(choice.variant)
        if choice.variant.local is not None and local is None:
            raise absent(choice)
        return WantedModel(role, choice.name, choice.entry.licence, choice.variant, local)
    models = find_reference(choice)
    if (choice.file or choice.quant) and len(models) == 1:  # no need to ask the hub
        variant = Variant("", choice.repo, models[0].commit, tuple(HubFile(path) for path in models[0].files))
        return WantedModel(role, str(choice), "", variant, models[0].path)
    files = choose_files(choice, list_files(choice.repo, choice.revision))
    variant = Variant("", choice.repo, choice.revision, files)
    return WantedModel(role, str(choice), "", variant, find_variant(variant))


def want_pair(
    catalog: Catalog, name: str, *, quant: str | None = None, draft: str | None = None, no_draft: bool = False
) -> list[WantedModel]:
    """Returns the model `name` and its draft: `draft`, or the first that the catalog lists for it."""
    if name.lower() == BUNDLED:
        raise InputError("The bundled pair comes with moeedge.", "Run moeedge chat without -m.")
    target, choice = want(catalog, name, "target", quant=quant), find(catalog, name, quant=quant)
    if draft is None and isinstance(choice, Choice):
        draft = next((best.name for best in catalog.drafts(choice)), None)
    return [target] if draft is None or no_draft else [target, want(catalog, draft, "draft")]


def refresh(wanted: Sequence[WantedModel]) -> list[WantedModel]:
    """Returns `wanted` with the paths of files that have arrived since."""
    return [replace(model, local=model.local or find_variant(model.variant)) for model in wanted]


def missing_files(wanted: Sequence[WantedModel]) -> list[RemoteFile]:
    """Returns the files to download, with sizes and hashes as the hub serves them now. Raises DownloadError."""
    files: dict[tuple[str, str], RemoteFile] = {}
    for variant in (model.variant for model in wanted if model.local is None):
        for file in variant.files:
            remote = ask_file(variant.repo, file.path, variant.revision)
            if file.sha256 is not None and remote.sha256 not in (None, file.sha256):
                raise DownloadError(
                    f"The hub serves another {file.path} than the catalog lists: its SHA-256 is "
                    f"{(remote.sha256 or '')[:12]}..., not {file.sha256[:12]}....",
                    f"If you trust {variant.repo}: moeedge pull hf:{variant.repo}:{file.path}",
                )
            have = min(have_bytes(variant.repo, remote.etag), remote.size_bytes)
            files[variant.repo, remote.etag] = replace(remote, sha256=remote.sha256 or file.sha256, have_bytes=have)
    return list(files.values())


def check_room(missing: Sequence[RemoteFile]) -> None:
    """Raises DownloadError if the disk cannot hold the missing bytes."""
    needed = sum(file.size_bytes - file.have_bytes for file in missing)
    folder = hub_cache()
    free = shutil.disk_usage(existing(folder)).free
    if needed and needed + _RESERVE_BYTES > free:
        hint = "Free some space, choose a smaller --quant, or download to another disk ($HF_HUB_CACHE)."
        raise DownloadError(
            f"The download needs {format_bytes(needed)}, and {folder} has {format_bytes(free)} free.", hint
        )


def fetch_file(file: RemoteFile, show: ShowFile) -> None:
    """Downloads the missing bytes of `file` into the cache; one process at a time appends to a partial file.

    Raises DownloadError; bytes that have arrived stay on any exception, unless their hash is wrong.
    """
    from filelock import FileLock, Timeout

    blob, partial = (blob_file(file.repo, file.etag, suffix) for suffix in ("", INCOMPLETE))
    locks = hub_cache() / ".locks" / repo_folder(file.repo).name
    try:
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{partial.name}.lock", timeout=0):
            if not blob.is_file():
                blob.parent.mkdir(parents=True, exist_ok=True)
                with show(file.path, file.size_bytes) as at:
                    _check(file, partial, _fetch(file, partial, at))
                    os.replace(partial, blob)
            _link(file)
    except Timeout:
        hint = "Wait until it ends, then run the command again."
        raise DownloadError(f"Another process is downloading {file.path}.", hint) from None
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        have, size = format_bytes(size_of(partial)), format_bytes(file.size_bytes)
        message = f"The disk of {hub_cache()} is full: {have} of {size} of {file.path} have arrived."
        hint = "Free some space and run the same command again, or download to another disk ($HF_HUB_CACHE)."
        raise DownloadError(message, hint) from None


class _EnoughError(DownloadError):
    """As many bytes as wanted; a DownloadError, because those pass through huggingface_hub unchanged."""


def fetch_start(file: RemoteFile, target: Path, n_bytes: int) -> None:
    """Appends bytes of `file` to `target` until it has `n_bytes`. Raises DownloadError."""

    def stop(have_bytes: int, _phase: str) -> None:
        if have_bytes >= n_bytes:
            raise _EnoughError("as many bytes as requested")

    with _HashedFile(target, stop) as sink, suppress(_EnoughError):
        _fetch_range(file, sink, sink.seek(0, os.SEEK_END))
    os.truncate(target, n_bytes)  # a chunk may have more


def _fetch_range(file: RemoteFile, sink: _HashedFile, start: int) -> None:
    """Writes the bytes of `file` from `start` on to `sink`. Raises DownloadError."""
    from huggingface_hub import constants, file_download, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    for module in (constants, file_download):  # which of them http_get reads differs by version
        vars(module).update(DOWNLOAD_CHUNK_SIZE=_CHUNK_BYTES)
    with hub_errors(f"{file.path} of {file.repo}", file.repo, file.commit):
        file_download.http_get(
            hf_hub_url(file.repo, file.path, revision=file.commit, endpoint=hub_endpoint()),
            cast(BinaryIO, sink),
            resume_size=start,
            headers=build_hf_headers(),
            expected_size=file.size_bytes,
        )


def _fetch(file: RemoteFile, partial: Path, at: At) -> str:
    """Appends the missing bytes of `file` to `partial`; returns the SHA-256 of all."""
    if size_of(partial) > file.size_bytes:  # of another program
        partial.unlink()
    if file.size_bytes > _MAX_HTTP_BYTES:
        hint = f"Fetch it with hf download {file.repo} {file.path}; moeedge finds it in the same cache."
        raise DownloadError(f"{file.path} of {file.repo} is larger than the hub serves by plain HTTP (50 GB).", hint)
    with _HashedFile(partial, at) as sink:
        sink.hash_existing()
        while (have := sink.tell()) < file.size_bytes:
            try:
                _fetch_range(file, sink, have)
            except NoAnswerError:
                if sink.tell() <= have:  # which broken connections http_get itself resumes differs by version
                    raise
        return sink.hexdigest()


def _check(file: RemoteFile, partial: Path, digest: str) -> None:
    """Raises DownloadError for a wrong size or hash, and deletes damaged bytes."""
    size = size_of(partial)
    if size != file.size_bytes:
        if size > file.size_bytes:
            partial.unlink()
        message = f"The download of {file.path} stopped after {size:,} of {file.size_bytes:,} bytes."
        raise DownloadError(message, "Run the same command again: it continues there.")
    if file.sha256 not in (None, digest):
        partial.unlink(missing_ok=True)
        raise DownloadError(
            f"{file.path} of {file.repo} arrived damaged and was deleted: its SHA-256 is {digest[:12]}..., not "
            f"{(file.sha256 or '')[:12]}....",
            "Download it again; if that happens twice, the server or a proxy alters it.",
        )


def _link(file: RemoteFile) -> None:
    """Links the complete blob into its snapshot: one more request to the hub, no download."""
    from huggingface_hub import hf_hub_download

    with hub_errors(f"{file.path} of {file.repo}", file.repo, file.commit):
        folder, endpoint = hub_cache(), hub_endpoint()
        hf_hub_download(file.repo, file.path, revision=file.commit, cache_dir=folder, endpoint=endpoint)
    if file.revision != file.commit:  # a branch: readers of the cache look up its commit there
        reference = repo_folder(file.repo) / "refs" / file.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(file.commit, encoding="utf-8")


class _HashedFile(io.FileIO):
    """A file that http_get writes to, hashed; unbuffered, so that its write raises errors and a crash loses no byte."""

    def __init__(self, path: Path, at: At) -> None:
        super().__init__(path, "r+" if path.exists() else "w+")
        self._at = at
        self._digest = hashlib.sha256()

    def hash_existing(self) -> None:
        """Hashes the file's content and leaves the position at its end."""
        self._digest = hashlib.sha256()
        self.seek(0)
        while block := self.read(_BLOCK_BYTES):
            self._digest.update(block)
            self._at(self.tell(), "checking")

    def write(self, data: Any) -> int:
        """Writes all of `data`, or raises OSError."""
        view = memoryview(data)
        while view:
            n = super().write(view) or 0
            self._digest.update(view[:n])
            view = view[n:]
        self._at(self.tell(), "downloading")
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """Drops the bytes after the position, when the server starts from the beginning."""
        size = super().truncate(size)
        self.hash_existing()
        return size

    def hexdigest(self) -> str:
        """The SHA-256 of the content, which is then on the disk: a blob's name promises its content."""
        os.fsync(self.fileno())
        return self._digest.hexdigest()
