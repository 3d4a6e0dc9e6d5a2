"""The hub's cache on this machine, as huggingface_hub and other programs fill it; no network access.

<cache>/models--owner--name/blobs/<sha256>                  complete files
                           /blobs/<sha256>.incomplete       bytes of unfinished downloads
                           /snapshots/<commit>/<file>       links to blobs
                           /refs/main                       the commit that a branch was at

huggingface_hub.scan_cache_dir does not list unfinished downloads, omits a repository in which one link is broken, and
reads every file of every repository; a lookup by name reads one folder here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moeedge.hub.catalog import SHA256, HubFile, Variant
from moeedge.hub.names import HubReference, all_parts, has_quant, is_first_part
from moeedge.paths import children, text_of

INCOMPLETE = ".incomplete"
_FOLDER = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>.+)")


@dataclass(frozen=True)
class CachedModel:
    """A GGUF model in the cache: one file, or all parts of a split one."""

    repo: str
    commit: str
    files: tuple[str, ...]  # paths in the repository
    path: Path  # of the first file
    size_bytes: int


def hub_cache() -> Path:
    """Returns the cache's folder: the environment variables that huggingface_hub reads, in its order, at call time."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.path.expandvars(named or f"{home}/hub")).expanduser()


def repo_folder(repo: str) -> Path:
    """Returns the folder of a model repository."""
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def blob_file(repo: str, etag: str, suffix: str = "") -> Path:
    """Returns the path of a file's bytes, of an unfinished download with the suffix INCOMPLETE."""
    return repo_folder(repo) / "blobs" / f"{etag}{suffix}"


def have_bytes(repo: str, etag: str) -> int:
    """Returns the bytes of a file that are here: all of a complete one, else those of an unfinished download."""
    return size_of(blob_file(repo, etag)) or size_of(blob_file(repo, etag, INCOMPLETE))


def size_of(path: Path) -> int:
    """Returns the bytes of a file, 0 if there is none."""
    with suppress(OSError):
        return path.stat().st_size
    return 0


def find_variant(variant: Variant) -> Path | None:
    """Returns the first file of `variant` if all its parts are in one snapshot and match the catalog."""
    if variant.local is not None:
        return variant.local if variant.local.is_file() else None
    for folder in snapshots(variant.repo, variant.revision):
        if all(_matches(folder / file.path, file) for file in variant.files):
            return folder / variant.files[0].path
    return None


def find_reference(reference: HubReference) -> list[CachedModel]:
    """Returns the cached models that `reference` may mean, those of its revision first."""
    models: dict[str, CachedModel] = {}
    for folder in snapshots(reference.repo, reference.revision):
        for model in _models_in(reference.repo, folder):
            first = model.files[0]
            if first == all_parts(reference.file)[0] if reference.file else has_quant(first, reference.quant):
                models.setdefault(first, model)
    return list(models.values())


def partial_bytes(variant: Variant) -> int:
    """Returns the bytes of `variant` that are cached, complete parts included; 0 without the catalog's hashes."""
    return sum(have_bytes(variant.repo, file.sha256) for file in variant.files if file.sha256 is not None)


def cached_models() -> Iterator[CachedModel]:
    """Yields every GGUF model in the cache, each content once."""
    for repo, _ in _repos():
        models: dict[Path, CachedModel] = {}  # by blob
        for snapshot in snapshots(repo):
            for model in _models_in(repo, snapshot):
                models.setdefault(model.path.resolve(), model)
        yield from models.values()


def unfinished_downloads() -> Iterator[tuple[str, Path]]:
    """Yields the repository and path of every unfinished download."""
    for repo, folder in _repos():
        for blob in sorted(children(folder / "blobs")):
            if blob.name.endswith(INCOMPLETE) and SHA256.fullmatch(blob.name.removesuffix(INCOMPLETE)):
                yield repo, blob


def snapshots(repo: str, revision: str = "main") -> list[Path]:
    """Returns the snapshots of a repository: of `revision`, of main, then the others, newest first."""
    refs, folder = (repo_folder(repo) / name for name in ("refs", "snapshots"))
    commits = {name: re.findall(r"\A[0-9a-f]+\Z", text_of(refs / name)) for name in (revision, "main")}
    ordered = [folder / each for name, commit in commits.items() for each in (name, *commit)]
    ordered += sorted(children(folder), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path for path in dict.fromkeys(ordered) if path.is_dir()]


def _repos() -> Iterator[tuple[str, Path]]:
    for folder in sorted(children(hub_cache())):
        match = _FOLDER.fullmatch(folder.name)
        if match is not None:
            yield f"{match['owner']}/{match['name']}", folder


def _models_in(repo: str, snapshot: Path) -> Iterator[CachedModel]:
    for path in sorted(snapshot.rglob("*.gguf")):
        name = path.relative_to(snapshot).as_posix()
        if not is_first_part(name):
            continue
        files = tuple(all_parts(name))
        if all((snapshot / file).is_file() for file in files):
            yield CachedModel(repo, snapshot.name, files, path, sum(size_of(snapshot / file) for file in files))


def _matches(path: Path, file: HubFile) -> bool:
    """Whether the cached file is the catalog's, by the hash in its blob's name, or by size in a cache without links."""
    if not path.is_file():
        return False
    blob = path.resolve().name
    if SHA256.fullmatch(blob):
        return file.sha256 in (None, blob)
    return file.size_bytes is None or size_of(path) == file.size_bytes
