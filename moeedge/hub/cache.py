"""The hub's cache on this machine, as huggingface_hub and other programs fill it; nothing here asks the network.

<cache>/models--owner--name/blobs/<sha256>                  the bytes
                           /blobs/<sha256>.incomplete       those that have arrived so far
                           /snapshots/<commit>/<file>       links to blobs
                           /refs/main                       the commit that a branch was at
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moeedge.hub.catalog import HubFile, Variant
from moeedge.hub.reference import HubReference, all_parts, has_quant, is_first_part

INCOMPLETE = ".incomplete"
_FOLDER = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>.+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def hub_cache() -> Path:
    """The cache's folder, by the environment variables that huggingface_hub reads, in its order."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expandvars(os.environ[variable])).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(os.path.expandvars(home)).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface" / "hub"


def repo_folder(repo: str) -> Path:
    """Where the cache keeps a model repository."""
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def partial_file(repo: str, etag: str) -> Path:
    """Where the bytes of an unfinished download lie."""
    return repo_folder(repo) / "blobs" / f"{etag}{INCOMPLETE}"


@dataclass(frozen=True)
class CachedModel:
    """A GGUF model in the cache: one file, or all parts of a split one."""

    repo: str
    commit: str
    files: tuple[str, ...]  # paths in the repository
    path: Path  # of the first
    size_bytes: int


def find_variant(variant: Variant) -> Path | None:
    """The first file of `variant`, if all its parts are on this machine in one place and are the catalog's."""
    if variant.local is not None:
        return variant.local if variant.local.is_file() else None
    for folder in snapshots(variant.repo, variant.revision):
        if all(_is_that(folder / file.path, file) for file in variant.files):
            return folder / variant.files[0].path
    return None


def find_reference(reference: HubReference) -> list[CachedModel]:
    """The models on this machine that `reference` may mean, the one of its revision first."""
    found: dict[str, CachedModel] = {}
    for folder in snapshots(reference.repo, reference.revision):
        for model in _models_in(reference.repo, folder):
            fits = (
                model.files[0] == all_parts(reference.file)[0]
                if reference.file
                else has_quant(model.files[0], reference.quant)
                if reference.quant
                else True
            )
            if fits:
                found.setdefault(model.files[0], model)
    return list(found.values())


def partial_bytes(variant: Variant) -> int:
    """How much of `variant` an unfinished download left here, whole parts included; 0 without the catalog's hash."""
    if variant.local is not None:
        return 0
    here = 0
    for file in variant.files:
        if file.sha256 is None:
            continue
        for blob in (repo_folder(variant.repo) / "blobs" / file.sha256, partial_file(variant.repo, file.sha256)):
            here += size_of(blob)
    return here


def cached_models() -> Iterator[CachedModel]:
    """Every GGUF model in the cache, one commit of each file."""
    for folder in sorted(_children(hub_cache())):
        match = _FOLDER.fullmatch(folder.name)
        if match is None:
            continue
        repo = f"{match['owner']}/{match['name']}"
        seen: set[Path] = set()
        for snapshot in snapshots(repo, "main"):
            for model in _models_in(repo, snapshot):
                blob = model.path.resolve()
                if blob not in seen:
                    seen.add(blob)
                    yield model


def stray_partials() -> Iterator[tuple[str, Path]]:
    """The repository and path of every unfinished download of a model."""
    for folder in sorted(_children(hub_cache())):
        match = _FOLDER.fullmatch(folder.name)
        if match is None:
            continue
        for blob in sorted(_children(folder / "blobs")):
            if blob.name.endswith(INCOMPLETE) and _SHA256.fullmatch(blob.name[: -len(INCOMPLETE)]):
                yield f"{match['owner']}/{match['name']}", blob


def size_of(path: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def snapshots(repo: str, revision: str = "main") -> list[Path]:
    """The snapshots of a repository: that of `revision`, that of main, then the newest first."""
    folder = repo_folder(repo)
    named = []
    for name in (revision, "main"):
        named.append(folder / "snapshots" / name)
        try:
            commit = (folder / "refs" / name).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
        if re.fullmatch(r"[0-9a-f]+", commit):
            named.append(folder / "snapshots" / commit)
    others = sorted(_children(folder / "snapshots"), key=lambda one: one.stat().st_mtime, reverse=True)
    return [one for one in dict.fromkeys([*named, *others]) if one.is_dir()]


def _models_in(repo: str, snapshot: Path) -> Iterator[CachedModel]:
    for path in sorted(snapshot.rglob("*.gguf")):
        name = path.relative_to(snapshot).as_posix()
        if not is_first_part(name):
            continue
        files = all_parts(name)
        if all((snapshot / file).is_file() for file in files):
            size = sum(size_of(snapshot / file) for file in files)
            yield CachedModel(repo, snapshot.name, tuple(files), path, size)


def _is_that(path: Path, file: HubFile) -> bool:
    """Whether the cache's file is the catalog's: the name of its blob is its hash, where the cache has links."""
    if not path.is_file():
        return False
    blob = path.resolve().name
    if _SHA256.fullmatch(blob):
        return file.sha256 in (None, blob)
    return file.size_bytes is None or size_of(path) == file.size_bytes  # a cache without links


def _children(folder: Path) -> Sequence[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
