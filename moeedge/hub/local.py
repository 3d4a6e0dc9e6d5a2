"""Models on this machine: the hub's cache, the file that a name means, the rows of `moeedge list`, `moeedge rm`.

huggingface_hub and other programs fill the cache, too; nothing here asks the network.

<cache>/models--owner--name/blobs/<sha256>                  complete files
                           /blobs/<sha256>.incomplete       bytes of unfinished downloads
                           /snapshots/<commit>/<file>       links to blobs
                           /refs/main                       the commit that a branch was at

huggingface_hub.scan_cache_dir does not list unfinished downloads, omits a repository in which one link is broken, and
reads every file of every repository; a lookup by name reads one folder here. `moeedge rm` deletes one quantization;
huggingface_hub's delete_revisions deletes entire snapshots and keeps unfinished downloads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeedge import paths
from moeedge.errors import InputError, ModelFileError, ModelNameError
from moeedge.hub.catalog import (
    BUNDLED,
    SHA256,
    Catalog,
    Choice,
    HubFile,
    HubReference,
    Variant,
    all_parts,
    find,
    has_quant,
    is_first_part,
    load_catalog,
)
from moeedge.paths import children, text_of, user_path
from moeedge.records import filled
from moeedge.units import format_bytes

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
    return user_path(os.path.expandvars(named or f"{home}/hub"))


def repo_folder(repo: str) -> Path:
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
    """Returns the cached models that `reference` may mean: of its revision alone, where it names another than main."""
    models: dict[str, CachedModel] = {}
    for folder in _folders_of(reference):
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


def snapshots(repo: str, revision: str = "main", *, only: bool = False) -> list[Path]:
    """Returns the snapshots of a repository: of `revision`, and unless `only`, of main, then others, newest first."""
    refs, folder = (repo_folder(repo) / name for name in ("refs", "snapshots"))
    names = (revision,) if only else (revision, "main")
    commits = {name: re.findall(r"\A[0-9a-f]+\Z", text_of(refs / name)) for name in names}
    ordered = [folder / each for name, commit in commits.items() for each in (name, *commit)]
    others = [] if only else [path for path in children(folder) if path.is_dir()]
    ordered += sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)
    return [path for path in dict.fromkeys(ordered) if path.is_dir()]


def _folders_of(reference: HubReference) -> list[Path]:
    return snapshots(reference.repo, reference.revision, only=reference.revision != "main")


def _repos() -> Iterator[tuple[str, Path]]:
    for folder in sorted(children(hub_cache())):
        match = _FOLDER.fullmatch(folder.name)
        if match is not None:
            yield f"{match['owner']}/{match['name']}", folder


def _models_in(repo: str, snapshot: Path) -> Iterator[CachedModel]:
    for path in sorted(path for path in snapshot.rglob("*") if path.suffix.lower() == ".gguf"):
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


State = Literal["complete", "partial", "absent"]


@dataclass(frozen=True)
class LocalModel:
    path: Path
    choice: Choice | None = None  # the catalog's entry, if the name was one
    name: str = ""  # as the user wrote it; empty for a path


@dataclass(frozen=True)
class ListedModel:
    """One model, named as -m, -md and pull take it."""

    name: str
    about: str
    state: State
    size_bytes: int | None  # complete; None: not known exactly
    have_bytes: int  # on this machine
    path: str | None  # the first file, if complete
    about_bytes: int | None = None  # approximate, if not known exactly
    licence: str = ""
    drafts: tuple[str, ...] = ()
    draft_of: tuple[str, ...] = ()
    draft_max: int | None = None
    repo: str = ""
    revision: str = ""
    verified: bool = True  # False: the catalog could not confirm its facts
    note: str = ""
    source: str = ""


@dataclass(frozen=True)
class Removal:
    """Files that `remove` deletes."""

    name: str
    links: tuple[Path, ...]  # files in snapshots
    blobs: tuple[Path, ...]  # complete or unfinished
    size_bytes: int  # freed


def locate(text: str) -> LocalModel:
    """Returns the model file that `text` means: a path that exists, else a name of the catalog, else a file of the hub.

    Text that looks like a path is one, whether it exists or not. Raises ModelNameError for an unknown name and for a
    model that is not on this machine, InputError for an ambiguous name.
    """
    path = Path(text)
    looks_like_path = text.startswith(("/", "./", "../", "~")) or (text.lower().endswith(".gguf") and ":" not in text)
    if path.exists() or looks_like_path:
        return LocalModel(path)
    choice = find(load_catalog(), text)
    if isinstance(choice, Choice):
        file = find_variant(choice.variant)
        if file is None:
            raise absent(choice)
        return LocalModel(file, choice, choice.name)
    models = find_reference(choice)
    if not models:
        raise ModelNameError(f"{choice} is not on this machine.", f"Download it with moeedge pull {choice}.")
    if len(models) > 1:
        names = ", ".join(f"hf:{model.repo}:{model.files[0]}" for model in models)
        raise InputError(f"{choice} matches several files on this machine.", f"Choose from: {names}.")
    return LocalModel(models[0].path, name=str(choice))


def chat_draft(catalog: Catalog, choice: Choice) -> Choice | None:
    """Returns the draft of a chat without -md: the best on this machine, or the one that comes with the download."""
    is_here = find_variant(choice.variant) is not None
    drafts = (draft for draft in catalog.drafts(choice) if not is_here or find_variant(draft.variant))
    return next(drafts, None)


def absent(choice: Choice) -> ModelNameError:
    """Returns the error for an entry of the catalog whose files are not here."""
    variant = choice.variant
    if variant.local is not None:
        why = f"Your catalog says that {choice.name} is {variant.local}, which does not exist."
        return ModelNameError(why, "Correct its path in your catalog.")
    n_bytes, n_here = variant.size_bytes or variant.about_bytes, partial_bytes(variant)
    size = format_bytes(n_bytes) if n_bytes else ""
    if n_here:
        have = f"{format_bytes(n_here)} of {size}" if size else format_bytes(n_here)
        why, fetch = f"{choice.name} is incomplete on this machine: {have}.", "Fetch the rest"
    else:
        why = f"{choice.name}{f' ({size})' if size else ''} is not on this machine."
        fetch = f"Download it{' and its draft' if choice.entry.drafts else ''}"
    return ModelNameError(why, f"{fetch} with moeedge pull {choice.name}.")


def list_models(catalog: Catalog, *, everything: bool) -> list[ListedModel]:
    """Returns the bundled pair, the catalog's models that are cached at least in part, and other cached GGUF models.

    everything: also the catalog's models that are not on this machine.
    """
    choices = [Choice(entry, variant) for entry in catalog.entries.values() for variant in entry.variants]
    of_catalog = [_catalog_row(catalog, choice) for choice in choices]
    rows = [*_bundled(), *(row for row in of_catalog if everything or row.state != "absent")]
    files = {Path(row.path).resolve() for row in of_catalog if row.path is not None}
    for model in cached_models():
        if model.path.resolve() not in files:
            name, size = str(HubReference(model.repo, file=model.files[0])), model.size_bytes
            rows.append(ListedModel(name, "", "complete", size, size, str(model.path), repo=model.repo))
    hashes = {file.sha256 for choice in choices for file in choice.variant.files}
    for repo, blob in unfinished_downloads():
        if blob.name.removesuffix(INCOMPLETE) not in hashes:
            rows.append(ListedModel(f"hf:{repo}", "", "partial", None, size_of(blob), None, repo=repo))
    return rows


def _bundled() -> Iterator[ListedModel]:
    with suppress(ModelFileError):
        target, draft = paths.bundled_target(), paths.bundled_draft()
        size, about = size_of(target) + size_of(draft), "the toy pair that comes with moeedge: target and draft"
        yield ListedModel(BUNDLED, about, "complete", size, size, str(target))


def _catalog_row(catalog: Catalog, choice: Choice) -> ListedModel:
    entry, variant = choice.entry, choice.variant
    path = find_variant(variant)
    size = variant.size_bytes
    if path is not None and size is None:
        size = sum(size_of(path.with_name(Path(file.path).name)) for file in variant.files) or size_of(path)
    n_here = size or 0 if path is not None else partial_bytes(variant)
    return filled(
        ListedModel,
        *(entry, variant),
        name=choice.name,
        state="complete" if path is not None else "partial" if n_here else "absent",
        size_bytes=size,
        have_bytes=n_here,
        path=None if path is None else str(path),
        drafts=tuple(draft for draft in entry.drafts if draft != choice.name),
        draft_of=tuple(each.name for each in catalog.entries.values() if choice.name in each.drafts),
        revision=variant.revision if variant.repo else "",
        source=variant.source or entry.source,
    )


def plan_removal(catalog: Catalog, name: str) -> Removal:
    """Returns the files of `name` that no other file needs.

    Raises ModelNameError if there are none, InputError for the bundled pair and for files outside the cache.
    """
    if name.lower() == BUNDLED:
        why = "The bundled pair is part of moeedge and cannot be removed alone."
        raise InputError(why, "pip uninstall moeedge removes the entire program.")
    choice = find(catalog, name)
    if isinstance(choice, Choice):
        variant, label = choice.variant, choice.name
        if variant.local is not None:
            why = f"{label} is a file of your own catalog, which moeedge does not delete."
            raise InputError(why, f"Delete {variant.local} and its entry in the catalog.")
        repo, files, folders = variant.repo, [file.path for file in variant.files], snapshots(variant.repo)
        unfinished = [blob_file(repo, file.sha256, INCOMPLETE) for file in variant.files if file.sha256]
    else:
        repo, label, folders = choice.repo, str(choice), _folders_of(choice)
        files = [file for model in find_reference(choice) for file in model.files]
        is_entire_repo = not choice.file and not choice.quant and choice.revision == "main"
        unfinished = [blob for owner, blob in unfinished_downloads() if is_entire_repo and owner == repo]
    links = [link for folder in folders for file in files if (link := folder / file).exists()]
    blobs = {link.resolve() for link in links} | {blob for blob in unfinished if blob.is_file()}
    others = {path for folder in snapshots(repo) for path in folder.rglob("*") if path.is_symlink()} - set(links)
    removable = list(blobs - {path.resolve() for path in others})  # no other file is a link to these
    if not links and not removable:
        hint = "moeedge list shows those that are."
        if any(owner == repo for owner, _ in unfinished_downloads()):
            hint = f"moeedge rm hf:{repo} removes all of its repository, unfinished downloads included."
        raise ModelNameError(f"{label} is not on this machine.", hint)
    return Removal(label, tuple(links), tuple(removable), sum(size_of(blob) for blob in removable))


def remove(removal: Removal) -> None:
    """Deletes links first, then blobs, then folders that are left empty."""
    for path in (*removal.links, *removal.blobs):
        path.unlink(missing_ok=True)
    for folder in dict.fromkeys(link.parent for link in removal.links):
        with suppress(OSError):  # not empty
            folder.rmdir()
