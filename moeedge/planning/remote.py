"""Models that are not on this machine: their headers, read from the hub without the weights behind them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from moeedge.errors import DownloadError, ModelFileError, ModelNameError
from moeedge.hub.cache import locate
from moeedge.hub.catalog import Choice, load_catalog
from moeedge.hub.endpoint import hub_endpoint, no_bars
from moeedge.hub.names import find
from moeedge.hub.pull import want
from moeedge.hub.remote import RemoteFile, ask_file, hub_errors
from moeedge.llama import gguf_file

_FIRST_BYTES = 2**22  # the vocabulary of most models fits
_LAST_BYTES = 2**28


@dataclass(frozen=True)
class Located:
    """A file to plan with: the model, or nothing but its header."""

    path: Path
    remote_name: str = ""  # what to pull; empty where it is here


def locate_or_fetch(text: str, folder: Path, tell: Callable[[str], None]) -> Located:
    """The model that `text` means, on this machine or, its header alone, from the hub into `folder`.

    Raises ModelNameError for an unknown name, DownloadError where the hub does not answer.
    """
    try:
        return Located(locate(text).path)
    except ModelNameError:
        find(load_catalog(), text)  # an unknown name stays one
    wanted = want(load_catalog(), text, "target")
    if wanted.local is not None:
        return Located(wanted.local)
    tell(f"{wanted.name} is not on this machine: its header is read from {hub_endpoint()}.")
    paths = [_fetch_header(ask_file(wanted.repo, one.path, wanted.revision), folder) for one in wanted.files]
    return Located(paths[0], wanted.name)


def catalog_draft(text: str) -> str | None:
    """The best draft that the catalog has for the model `text`."""
    choice = find(load_catalog(), text)
    return choice.entry.drafts[0] if isinstance(choice, Choice) and choice.entry.drafts else None


def _fetch_header(file: RemoteFile, folder: Path) -> Path:
    """The beginning of `file`, in `folder` under its own name."""
    target = folder / PurePosixPath(file.path).name
    n_bytes = _FIRST_BYTES
    while True:
        _fetch(file, target, min(n_bytes, file.size_bytes))
        try:
            gguf_file.read_tensors(target)
            return target
        except ModelFileError as error:
            with target.open("rb") as head:
                is_gguf = head.read(4) == b"GGUF"
            if not is_gguf or n_bytes >= min(file.size_bytes, _LAST_BYTES):
                raise DownloadError(f"{file.path} of {file.repo} has no GGUF header.", "Name another file.") from error
        n_bytes *= 4


class _EnoughError(Exception):
    """As many bytes as were wanted."""


class _Sink:
    """What http_get writes to: takes bytes up to a size, and then ends the transfer."""

    def __init__(self, file: BinaryIO, n_max: int) -> None:
        self._file, self._n_max = file, n_max

    def write(self, data: bytes) -> int:
        self._file.write(data[: max(0, self._n_max - self._file.tell())])
        if self._file.tell() >= self._n_max:
            raise _EnoughError
        return len(data)

    def tell(self) -> int:
        return self._file.tell()


def _fetch(file: RemoteFile, target: Path, n_bytes: int) -> None:
    """The bytes of `file` up to `n_bytes`, behind those that `target` has."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    with target.open("ab") as kept, no_bars(), hub_errors(f"{file.path} of {file.repo}", file.repo, file.commit):
        url = hf_hub_url(file.repo, file.path, revision=file.commit, endpoint=hub_endpoint())
        with suppress(_EnoughError):
            http_get(
                url,
                cast(BinaryIO, _Sink(kept, n_bytes)),
                resume_size=kept.tell(),
                headers=build_hf_headers(),
                expected_size=file.size_bytes,
            )
