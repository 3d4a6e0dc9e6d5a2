"""Headers of models that are not on this machine, read from the hub without the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from moeedge.errors import DownloadError, ModelFileError, ModelNameError
from moeedge.hub.catalog import Choice, load_catalog
from moeedge.hub.download import fetch_range
from moeedge.hub.local import locate
from moeedge.hub.names import find
from moeedge.hub.pull import want
from moeedge.hub.remote import RemoteFile, ask_file, hub_endpoint
from moeedge.llama import gguf_file

_FIRST_BYTES = 2**22  # enough for most vocabularies
_MAX_BYTES = 2**28


@dataclass(frozen=True)
class PlanFile:
    """A file to plan with: the model, or only its header."""

    path: Path
    remote_name: str = ""  # for moeedge pull; empty for a model on this machine


def locate_or_fetch(text: str, folder: Path, notify: Callable[[str], None]) -> PlanFile:
    """Returns the model that `text` means: on this machine, or only its header, fetched from the hub into `folder`.

    Raises ModelNameError for an unknown name, DownloadError if the hub does not answer.
    """
    try:
        return PlanFile(locate(text).path)
    except ModelNameError:
        find(load_catalog(), text)  # raises for an unknown name
    wanted = want(load_catalog(), text, "target")
    if wanted.local is not None:
        return PlanFile(wanted.local)
    notify(f"{wanted.name} is not on this machine: its header is read from {hub_endpoint()}.")
    paths = [_fetch_header(ask_file(wanted.repo, file.path, wanted.revision), folder) for file in wanted.files]
    return PlanFile(paths[0], wanted.name)


def catalog_draft(text: str) -> str | None:
    """Returns the best draft that the catalog lists for the model `text`, or None."""
    choice = find(load_catalog(), text)
    return choice.entry.drafts[0] if isinstance(choice, Choice) and choice.entry.drafts else None


def _fetch_header(file: RemoteFile, folder: Path) -> Path:
    """Fetches the start of `file` into `folder`, growing until its header is complete."""
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
            if not is_gguf or n_bytes >= min(file.size_bytes, _MAX_BYTES):
                raise DownloadError(f"{file.path} of {file.repo} has no GGUF header.", "Name another file.") from error
        n_bytes *= 4


class _EnoughError(DownloadError):
    """The sink is full. A DownloadError, because those pass through huggingface_hub unchanged."""


class _LimitedSink:
    """A file for http_get that ends the transfer at `n_max` bytes."""

    def __init__(self, file: BinaryIO, n_max: int) -> None:
        self._file, self._n_max = file, n_max

    def write(self, data: bytes) -> int:
        self._file.write(data[: max(0, self._n_max - self._file.tell())])
        if self._file.tell() >= self._n_max:
            raise _EnoughError("as many bytes as requested")
        return len(data)

    def tell(self) -> int:
        return self._file.tell()


def _fetch(file: RemoteFile, target: Path, n_bytes: int) -> None:
    """Appends bytes of `file` to `target` until it has `n_bytes`."""
    with target.open("ab") as kept, suppress(_EnoughError):
        fetch_range(file, cast(BinaryIO, _LimitedSink(kept, n_bytes)), kept.tell())
