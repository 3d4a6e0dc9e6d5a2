"""What `moeedge pull` brings: the files of a target and its draft, which of them are here, and whether they fit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moeedge.errors import DownloadError, InputError, ModelNameError
from moeedge.hub import cache
from moeedge.hub.catalog import BUNDLED, Catalog, Choice, HubFile, Variant
from moeedge.hub.download import RoutingReader, download
from moeedge.hub.names import choose_files, find
from moeedge.hub.remote import RemoteFile, ask_file, list_files
from moeedge.units import format_bytes

Role = Literal["target", "draft"]
_RESERVE_BYTES = 256 * 2**20  # of the disk stays free


@dataclass(frozen=True)
class Wanted:
    """One model that is to be here."""

    role: Role
    name: str  # as the user or the catalog calls it
    licence: str
    repo: str
    revision: str
    files: tuple[HubFile, ...]  # the catalog's or the hub's listing
    local: Path | None  # the first file, where all are here
    verified: bool = True


@dataclass(frozen=True)
class Missing:
    """One file that has to be downloaded."""

    file: RemoteFile
    sha256: str | None  # the catalog's
    have_bytes: int  # of an earlier try


def want(catalog: Catalog, name: str, role: Role, *, quant: str | None = None) -> Wanted:
    """What `name` stands for: in the catalog, or on the hub. Raises InputError and DownloadError."""
    choice = find(catalog, name, quant=quant)
    if isinstance(choice, Choice):
        return _of_variant(choice, role)
    models = cache.find_reference(choice)
    if (choice.file or choice.quant) and len(models) == 1:  # no need to ask
        files = tuple(HubFile(path) for path in models[0].files)
        return Wanted(role, str(choice), "", choice.repo, models[0].commit, files, models[0].path)
    chosen = choose_files(choice, list_files(choice.repo, choice.revision))
    variant = Variant("", choice.repo, choice.revision, chosen)
    return Wanted(role, str(choice), "", choice.repo, choice.revision, chosen, cache.find_variant(variant))


def want_pair(
    catalog: Catalog, name: str, *, quant: str | None = None, draft: str | None = None, no_draft: bool = False
) -> list[Wanted]:
    """The model `name` and its draft: `draft`, or the first that the catalog has for it."""
    if name.lower() == BUNDLED:
        raise InputError("The bundled pair comes with moeedge.", "Run moeedge chat without -m.")
    wanted = [want(catalog, name, "target", quant=quant)]
    choice = catalog.find(name)
    if no_draft:
        return wanted
    if draft is None and choice is not None:
        draft = next((one for one in choice.entry.drafts if one != wanted[0].name), None)
    if draft is not None:
        wanted.append(want(catalog, draft, "draft"))
    return wanted


def settle(wanted: Sequence[Wanted]) -> list[Wanted]:
    """`wanted` with the paths that it has now."""
    return [
        one
        if one.local is not None
        else replace(one, local=cache.find_variant(Variant("", one.repo, one.revision, one.files)))
        for one in wanted
    ]


def _of_variant(choice: Choice, role: Role) -> Wanted:
    entry, variant = choice.entry, choice.variant
    if variant.local is not None and not variant.local.is_file():
        raise ModelNameError(f"{choice.name} should be {variant.local}, which is not there.", "Correct your catalog.")
    return Wanted(
        role,
        choice.name,
        entry.licence,
        variant.repo,
        variant.revision,
        variant.files,
        cache.find_variant(variant),
        variant.verified,
    )


def missing_files(wanted: Sequence[Wanted]) -> list[Missing]:
    """What the hub is to send, with sizes and hashes as it serves them now. Raises DownloadError."""
    found: dict[tuple[str, str], Missing] = {}
    for model in wanted:
        if model.local is not None:
            continue
        for file in model.files:
            remote = ask_file(model.repo, file.path, model.revision)
            if file.sha256 is not None and remote.sha256 not in (None, file.sha256):
                raise DownloadError(
                    f"The hub serves another {file.path} than the catalog knows: its SHA-256 is "
                    f"{(remote.sha256 or '')[:12]}..., not {file.sha256[:12]}....",
                    f"If you trust {model.repo}: moeedge pull hf:{model.repo}:{file.path}",
                )
            blob = cache.repo_folder(model.repo) / "blobs" / remote.etag
            have = cache.size_of(blob) or cache.size_of(cache.partial_file(model.repo, remote.etag))
            found[model.repo, remote.etag] = Missing(remote, file.sha256, min(have, remote.size_bytes))
    return list(found.values())


def check_room(missing: Sequence[Missing]) -> None:
    """Raises DownloadError where the disk cannot hold what is to come."""
    needed = sum(one.file.size_bytes - one.have_bytes for one in missing)
    folder = cache.hub_cache()
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(there).free
    if needed and needed + _RESERVE_BYTES > free:
        raise DownloadError(
            f"{format_bytes(needed)} are to come, and {folder} has {format_bytes(free)} free.",
            "Make room, choose a smaller --quant, or put the cache on another disk ($HF_HUB_CACHE).",
        )


def fetch_all(missing: Sequence[Missing], watcher: RoutingReader) -> None:
    """Downloads everything in turn. Raises DownloadError; what has arrived by then stays."""
    for one in missing:
        download(one.file, watcher, sha256=one.sha256)
