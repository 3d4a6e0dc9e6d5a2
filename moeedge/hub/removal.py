"""What `moeedge rm` takes out of the hub's cache: a model's files there, and nothing that another file still needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moeedge.errors import InputError, ModelNameError
from moeedge.hub import cache
from moeedge.hub.catalog import BUNDLED, Catalog, Choice
from moeedge.hub.naming import find


@dataclass(frozen=True)
class Removal:
    """What will go."""

    name: str
    links: tuple[Path, ...]  # the files as readers of the cache see them
    blobs: tuple[Path, ...]  # the bytes, whole or unfinished
    size_bytes: int  # that become free


def plan_removal(catalog: Catalog, name: str) -> Removal:
    """What `name` has on this machine. Raises ModelNameError where that is nothing, InputError for what is not ours."""
    if name.lower() == BUNDLED:
        raise InputError("The bundled pair is part of moeedge.", "pip uninstall moeedge removes it.")
    choice = find(catalog, name)
    if isinstance(choice, Choice):
        if choice.variant.local is not None:
            raise InputError(f"{choice.name} is a file of yours, {choice.variant.local}.", "Remove it yourself.")
        repo, label = choice.variant.repo, choice.name
        wanted = [file.path for file in choice.variant.files]
        unfinished = [cache.partial_file(repo, file.sha256) for file in choice.variant.files if file.sha256]
    else:
        repo, label = choice.repo, str(choice)
        wanted = [file for model in cache.find_reference(choice) for file in model.files]
        whole = not choice.file and not choice.quant  # a repository alone: its unfinished downloads, too
        unfinished = [blob for owner, blob in cache.stray_partials() if whole and owner == repo]
    links = [link for folder in cache.snapshots(repo) for file in wanted if (link := folder / file).exists()]
    blobs = {link.resolve() for link in links} | {blob for blob in unfinished if blob.is_file()}
    free = [blob for blob in blobs if not _needed(blob, links, repo)]
    if not links and not free:
        raise ModelNameError(f"{label} is not on this machine.", "moeedge list shows what is.")
    return Removal(label, tuple(links), tuple(free), sum(cache.size_of(blob) for blob in free))


def remove(removal: Removal) -> None:
    """Links first, then bytes; folders that are left empty go, too."""
    for path in (*removal.links, *removal.blobs):
        path.unlink(missing_ok=True)
    for folder in dict.fromkeys(link.parent for link in removal.links):
        with suppress(OSError):  # others are in it
            folder.rmdir()


def _needed(blob: Path, links: Sequence[Path], repo: str) -> bool:
    """Whether another link than those that go points to the bytes."""
    others = (path for folder in cache.snapshots(repo) for path in folder.rglob("*") if path not in links)
    return any(path.is_symlink() and path.resolve() == blob for path in others)
