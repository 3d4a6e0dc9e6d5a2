"""What the hub says about repositories and files, through huggingface_hub; its errors become DownloadError."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moeedge.errors import DownloadError
from moeedge.hub.catalog import HubFile
from moeedge.hub.endpoint import hub_endpoint, is_offline

_ANSWER_TIMEOUT_S = 10.0  # huggingface_hub's own; $HF_HUB_ETAG_TIMEOUT replaces it
_ETAG = re.compile(r"[\w.-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class NoAnswerError(DownloadError):
    """The server could not be reached, broke off or fell silent: the network's failure, not an answer."""


@dataclass(frozen=True)
class RemoteFile:
    """One file as the hub serves it now."""

    repo: str
    revision: str  # as it was asked for: a branch, a tag or the commit
    commit: str
    path: str
    size_bytes: int
    etag: str  # the name of its blob

    @property
    def sha256(self) -> str | None:
        """Of its content; None for a small file that lies in git itself, whose tag is another hash."""
        return self.etag if _SHA256.fullmatch(self.etag) else None


def _timeout_s() -> float:
    return float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _ANSWER_TIMEOUT_S)


def ask_file(repo: str, path: str, revision: str) -> RemoteFile:
    """Size, hash and commit of one file. Raises DownloadError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    endpoint = hub_endpoint()
    with hub_errors(f"{path} of {repo}", repo, revision):
        url = hf_hub_url(repo, path, revision=revision, endpoint=endpoint)
        meta = get_hf_file_metadata(url, timeout=_timeout_s())
    if meta.commit_hash is None or meta.size is None or meta.etag is None or not _ETAG.fullmatch(meta.etag):
        raise DownloadError(
            f"{endpoint} does not answer as a Hugging Face hub does: no commit, size or tag for {path} of {repo}.",
            "Check $HF_ENDPOINT and your proxy.",
        )
    return RemoteFile(repo, revision, meta.commit_hash, path, meta.size, meta.etag)


def list_files(repo: str, revision: str) -> list[HubFile]:
    """All files of a repository. Raises DownloadError."""
    from huggingface_hub import HfApi

    with hub_errors(repo, repo, revision):
        api = HfApi(endpoint=hub_endpoint())
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=_timeout_s())
    files = []
    for sibling in info.siblings or ():
        # a dict in some versions of huggingface_hub, an object in others
        lfs = sibling.lfs
        digest = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
        files.append(HubFile(sibling.rfilename, sibling.size, digest))
    return files


@contextmanager
def hub_errors(what: str, repo: str, revision: str) -> Iterator[None]:
    """Turns whatever huggingface_hub and the HTTP library below it raise into a DownloadError about `what`."""
    if is_offline():
        raise DownloadError(f"{what} was not asked for, because HF_HUB_OFFLINE is set.", "Unset it to download.")
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its warnings of retries would tear the progress bar
    try:
        yield
    except DownloadError:
        raise
    except OSError as error:
        if error.filename is not None or (error.errno is not None and not _is_network(error)):
            raise  # the disk's, not the network's
        raise explain(error, what, repo, revision) from None
    except Exception as error:  # the HTTP library differs by version, and so do its errors
        raise explain(error, what, repo, revision) from None
    finally:
        logger.setLevel(level)


def _is_network(error: OSError) -> bool:
    return isinstance(error, ConnectionError | TimeoutError)


def explain(error: Exception, what: str, repo: str, revision: str) -> DownloadError:
    """What an error means for a user, by the status and the code that the hub sent."""
    endpoint = hub_endpoint()
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status is None:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return NoAnswerError(
            f"{endpoint} could not be asked for {what} ({reason}).",
            "Check the network, $HF_ENDPOINT and your proxy; what has arrived is kept.",
        )
    code = response.headers.get("X-Error-Code", "") if response is not None else ""
    if code == "GatedRepo" or status == 403:
        return DownloadError(
            f"{repo} is gated: {endpoint} does not give it to you.",
            f"Accept its terms at {endpoint}/{repo} and set HF_TOKEN to a token of that account (or: hf auth login).",
        )
    if code == "EntryNotFound":
        return DownloadError(
            f"There is no {what} at {endpoint}, revision {revision}.",
            f"See {endpoint}/{repo}/tree/main for what it has.",
        )
    if code == "RevisionNotFound":
        return DownloadError(
            f"{repo} has no revision {revision} at {endpoint}.",
            f"Its owner may have rewritten it: take the newest by moeedge pull hf:{repo}.",
        )
    if status in (401, 404):
        return DownloadError(
            f"There is no model repository {repo} at {endpoint}, or it is private.",
            "Check the name; for a private one set HF_TOKEN (or: hf auth login).",
        )
    if status == 429:
        return DownloadError(f"{endpoint} asks to wait (HTTP status 429).", "Try again later, or set HF_TOKEN.")
    return DownloadError(
        f"{endpoint} does not give {what} (HTTP status {status}).", "Try again later; what has arrived is kept."
    )
