"""The hub's cache on this machine, as huggingface_hub and other programs fill it; nothing here asks the network.

<cache>/models--owner--name/blobs/<sha256>                  the bytes
                           /blobs/<sha256>.incomplete       those that have arrived so far
                           /snapshots/<commit>/<file>       links to blobs
                           /refs/main                       the commit that a branch was at

Which file on this machine a name stands for: what -m and -md may say beside a path.

What `moeedge rm` takes out of the hub's cache: a model's files there, and nothing that another file still needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moeedge.errors import InputError, ModelNameError
from moeedge.hub.catalog import BUNDLED, Catalog, Choice, HubFile, Variant, load_catalog
from moeedge.hub.names import HubReference, all_parts, find, has_quant, is_first_part
from moeedge.units import format_bytes

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


@dataclass(frozen=True)
class LocalModel:
    """A model file that is here."""

    path: Path
    choice: Choice | None = None  # the catalog's entry, where the name was one
    name: str = ""  # what the user wrote; empty for a path


def locate(text: str, catalog: Catalog | None = None) -> LocalModel:
    """The model file that `text` means: a path that exists, else a name of the catalog, else a place on the hub.

    What looks like a path stays one, whether it exists or not. Raises ModelNameError for an unknown name and for a
    model that is not on this machine.
    """
    path = Path(text)
    if path.exists() or _looks_like_path(text):
        return LocalModel(path)
    catalog = catalog or load_catalog()
    choice = find(catalog, text)
    if isinstance(choice, Choice):
        found = find_variant(choice.variant)
        if found is None:
            raise _absent(choice)
        return LocalModel(found, choice, choice.name)
    models = find_reference(choice)
    if not models:
        raise ModelNameError(f"{choice} is not on this machine.", f"moeedge pull {choice} downloads it.")
    if len(models) > 1:
        raise InputError(
            f"{choice} may be several files on this machine.",
            f"Name one of {', '.join(f'hf:{one.repo}:{one.files[0]}' for one in models)}.",
        )
    return LocalModel(models[0].path, name=str(choice))


def local_draft(catalog: Catalog, choice: Choice) -> LocalModel | None:
    """The best draft of the catalog's entry that is here."""
    for draft in catalog.drafts(choice.entry):
        path = find_variant(draft.variant)
        if path is not None and draft.variant != choice.variant:
            return LocalModel(path, draft, draft.name)
    return None


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or (text.lower().endswith(".gguf") and ":" not in text)


def _absent(choice: Choice) -> ModelNameError:
    variant = choice.variant
    if variant.local is not None:
        return ModelNameError(f"{choice.name} should be {variant.local}, which is not there.", "Correct your catalog.")
    size, here = variant.size_bytes or variant.about_bytes, partial_bytes(variant)
    if here:
        of = f" of {format_bytes(size)}" if size else ""
        return ModelNameError(
            f"{choice.name} is here in part, {format_bytes(here)}{of}.", f"moeedge pull {choice.name} fetches the rest."
        )
    about = f" ({format_bytes(size)})" if size else ""
    return ModelNameError(
        f"{choice.name}{about} is not on this machine.", f"moeedge pull {choice.name} downloads it and its draft."
    )


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
        unfinished = [partial_file(repo, file.sha256) for file in choice.variant.files if file.sha256]
    else:
        repo, label = choice.repo, str(choice)
        wanted = [file for model in find_reference(choice) for file in model.files]
        whole = not choice.file and not choice.quant  # a repository alone: its unfinished downloads, too
        unfinished = [blob for owner, blob in stray_partials() if whole and owner == repo]
    links = [link for folder in snapshots(repo) for file in wanted if (link := folder / file).exists()]
    blobs = {link.resolve() for link in links} | {blob for blob in unfinished if blob.is_file()}
    free = [blob for blob in blobs if not _needed(blob, links, repo)]
    if not links and not free:
        raise ModelNameError(f"{label} is not on this machine.", "moeedge list shows what is.")
    return Removal(label, tuple(links), tuple(free), sum(size_of(blob) for blob in free))


def remove(removal: Removal) -> None:
    """Links first, then bytes; folders that are left empty go, too."""
    for path in (*removal.links, *removal.blobs):
        path.unlink(missing_ok=True)
    for folder in dict.fromkeys(link.parent for link in removal.links):
        with suppress(OSError):  # others are in it
            folder.rmdir()


def _needed(blob: Path, links: Sequence[Path], repo: str) -> bool:
    """Whether another link than those that go points to the bytes."""
    others = (path for folder in snapshots(repo) for path in folder.rglob("*") if path not in links)
    return any(path.is_symlink() and path.resolve() == blob for path in others)
