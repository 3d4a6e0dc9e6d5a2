"""Questions to the hub through huggingface_hub; its errors become DownloadError. $HF_ENDPOINT names another server.

huggingface_hub is imported inside functions: the import takes a third of a second, which a run on local files saves.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moeedge.errors import DownloadError
from moeedge.hub import cache
from moeedge.hub.catalog import SHA256, HubFile
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
    n_bytes = sum(cache.size_of(path) for owner, path in cache.unfinished_downloads() if owner == repo)
    return f" A partial download is kept: {format_bytes(n_bytes)}." if n_bytes else ""
