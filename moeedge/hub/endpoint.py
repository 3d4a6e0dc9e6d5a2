"""One file from the hub into a folder of ours, through huggingface_hub; $HF_ENDPOINT names another server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moeedge.errors import DownloadError


@dataclass(frozen=True)
class HubFile:
    """One file of a dataset repository on the hub."""

    repo: str
    file: str
    revision: str
    variant: str  # one line: what this file holds of the set


DEFAULT_ENDPOINT = "https://huggingface.co"
# a server that does not say within this time what it has counts as absent; the download itself has the library's limits
PROBE_TIMEOUT_S = 5.0


def hub_endpoint() -> str:
    """The server that is asked: $HF_ENDPOINT, else the public hub. Read at call time, not at import."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """Whether the user forbade to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


@contextmanager
def no_bars() -> Iterator[None]:
    """Without the bars that huggingface_hub draws by itself."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    had_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if had_bars:
            enable_progress_bars()


def fetch(source: HubFile, folder: Path) -> Path:
    """Download `source` below `folder` and return its path.

    Raises DownloadError when the server cannot be reached, has no such file, or breaks off.
    """
    # imported here: it costs a third of a second, which a run on local data need not pay
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    endpoint = hub_endpoint()
    what = f"{source.file} of {source.repo}"
    if is_offline():
        raise DownloadError(f"{what} was not asked for, because HF_HUB_OFFLINE is set.")
    try:
        with no_bars():
            # the download retries an unreachable server for most of a minute; this one question does not
            url = hf_hub_url(source.repo, source.file, repo_type="dataset", revision=source.revision, endpoint=endpoint)
            get_hf_file_metadata(url, timeout=PROBE_TIMEOUT_S)
            path = hf_hub_download(
                source.repo,
                source.file,
                repo_type="dataset",
                revision=source.revision,
                local_dir=folder,
                endpoint=endpoint,
            )
    except Exception as error:  # the HTTP library below huggingface_hub differs by its version, and so do its errors
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            raise DownloadError(f"{endpoint} does not give {what} (HTTP status {status}).") from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DownloadError(f"{endpoint} could not be asked for {what} ({reason}).") from None
    return Path(path)
