"""What `moeedge pull` downloads: the files of a target and its draft, those that are missing, and the room for them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moeedge.errors import DownloadError, InputError
from moeedge.hub import cache
from moeedge.hub.catalog import BUNDLED, Catalog, Choice, HubFile, Variant
from moeedge.hub.download import ProgressReporter, download
from moeedge.hub.local import missing_local_file
from moeedge.hub.names import choose_files, find
from moeedge.hub.remote import RemoteFile, ask_file, list_files
from moeedge.units import format_bytes

Role = Literal["target", "draft"]
_RESERVE_BYTES = 256 * 2**20  # of the disk stays free


@dataclass(frozen=True)
class WantedModel:
    """One model to have on this machine."""

    role: Role
    name: str  # as the user or the catalog calls it
    licence: str
    repo: str
    revision: str
    files: tuple[HubFile, ...]  # from the catalog or the hub's listing
    local: Path | None  # the first file, if all are on this machine
    verified: bool = True


@dataclass(frozen=True)
class MissingFile:
    """One file to download."""

    file: RemoteFile
    sha256: str | None  # the catalog's
    have_bytes: int  # from an earlier attempt


def want(catalog: Catalog, name: str, role: Role, *, quant: str | None = None) -> WantedModel:
    """Returns the model that `name` means, in the catalog or on the hub. Raises InputError and DownloadError."""
    choice = find(catalog, name, quant=quant)
    if isinstance(choice, Choice):
        entry, variant = choice.entry, choice.variant
        local = cache.find_variant(variant)
        if variant.local is not None and local is None:
            raise missing_local_file(choice)
        return WantedModel(
            role, choice.name, entry.licence, variant.repo, variant.revision, variant.files, local, variant.verified
        )
    models = cache.find_reference(choice)
    if (choice.file or choice.quant) and len(models) == 1:  # no need to ask the hub
        files = tuple(HubFile(path) for path in models[0].files)
        return WantedModel(role, str(choice), "", choice.repo, models[0].commit, files, models[0].path)
    files = choose_files(choice, list_files(choice.repo, choice.revision))
    return _with_path(WantedModel(role, str(choice), "", choice.repo, choice.revision, files, None))


def want_pair(
    catalog: Catalog, name: str, *, quant: str | None = None, draft: str | None = None, no_draft: bool = False
) -> list[WantedModel]:
    """Returns the model `name` and its draft: `draft`, or the first that the catalog lists for it."""
    if name.lower() == BUNDLED:
        raise InputError("The bundled pair comes with moeedge.", "Run moeedge chat without -m.")
    wanted = [want(catalog, name, "target", quant=quant)]
    if no_draft:
        return wanted
    choice = find(catalog, name, quant=quant)
    if draft is None and isinstance(choice, Choice):
        best = catalog.best_draft(choice)
        draft = None if best is None else best.name
    if draft is not None:
        wanted.append(want(catalog, draft, "draft"))
    return wanted


def refresh(wanted: Sequence[WantedModel]) -> list[WantedModel]:
    """Returns `wanted` with the paths of files that have arrived since."""
    return [_with_path(model) if model.local is None else model for model in wanted]


def _with_path(model: WantedModel) -> WantedModel:
    return replace(model, local=cache.find_variant(Variant("", model.repo, model.revision, model.files)))


def missing_files(wanted: Sequence[WantedModel]) -> list[MissingFile]:
    """Returns the files to download, with sizes and hashes as the hub serves them now. Raises DownloadError."""
    found: dict[tuple[str, str], MissingFile] = {}
    for model in wanted:
        for file in model.files if model.local is None else ():
            remote = ask_file(model.repo, file.path, model.revision)
            if file.sha256 is not None and remote.sha256 not in (None, file.sha256):
                raise DownloadError(
                    f"The hub serves another {file.path} than the catalog lists: its SHA-256 is "
                    f"{(remote.sha256 or '')[:12]}..., not {file.sha256[:12]}....",
                    f"If you trust {model.repo}: moeedge pull hf:{model.repo}:{file.path}",
                )
            have = cache.size_of(cache.blob_file(model.repo, remote.etag)) or cache.size_of(
                cache.partial_file(model.repo, remote.etag)
            )
            found[model.repo, remote.etag] = MissingFile(remote, file.sha256, min(have, remote.size_bytes))
    return list(found.values())


def check_room(missing: Sequence[MissingFile]) -> None:
    """Raises DownloadError if the disk cannot hold the missing bytes."""
    needed = sum(file.file.size_bytes - file.have_bytes for file in missing)
    folder = cache.hub_cache()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed and needed + _RESERVE_BYTES > free:
        raise DownloadError(
            f"The download needs {format_bytes(needed)}, and {folder} has {format_bytes(free)} free.",
            "Free some space, choose a smaller --quant, or download to another disk ($HF_HUB_CACHE).",
        )


def fetch_all(missing: Sequence[MissingFile], reporter: ProgressReporter) -> None:
    """Downloads the files one by one. Raises DownloadError; bytes that have arrived by then stay."""
    for file in missing:
        download(file.file, reporter, sha256=file.sha256)
