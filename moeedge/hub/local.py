"""Models on this machine: the file that a name means, the rows of `moeedge list`, and what `moeedge rm` deletes.

`moeedge rm` deletes one quantization; huggingface_hub's delete_revisions deletes entire snapshots and keeps unfinished
downloads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeedge import paths
from moeedge.errors import InputError, ModelFileError, ModelNameError
from moeedge.hub import cache
from moeedge.hub.cache import find_reference, find_variant, size_of, snapshots
from moeedge.hub.catalog import BUNDLED, Catalog, Choice, load_catalog
from moeedge.hub.names import HubReference, find
from moeedge.units import format_bytes

State = Literal["complete", "partial", "absent"]


@dataclass(frozen=True)
class LocalModel:
    """A model file on this machine."""

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
    """What `remove` deletes."""

    name: str
    links: tuple[Path, ...]  # files in snapshots
    blobs: tuple[Path, ...]  # complete or unfinished
    size_bytes: int  # freed


def locate(text: str, catalog: Catalog | None = None) -> LocalModel:
    """Returns the model file that `text` means: a path that exists, else a name of the catalog, else a file of the hub.

    Text that looks like a path is one, whether it exists or not. Raises ModelNameError for an unknown name and for a
    model that is not on this machine, InputError for an ambiguous name.
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
        raise ModelNameError(f"{choice} is not on this machine.", f"Download it with moeedge pull {choice}.")
    if len(models) > 1:
        raise InputError(
            f"{choice} matches several files on this machine.",
            f"Choose from: {', '.join(f'hf:{model.repo}:{model.files[0]}' for model in models)}.",
        )
    return LocalModel(models[0].path, name=str(choice))


def local_draft(catalog: Catalog, choice: Choice) -> LocalModel | None:
    """Returns the best draft of the catalog's entry that is on this machine."""
    for draft in catalog.drafts(choice.entry):
        path = find_variant(draft.variant)
        if path is not None and draft.variant != choice.variant:
            return LocalModel(path, draft, draft.name)
    return None


def chat_draft(catalog: Catalog, choice: Choice) -> Choice | None:
    """Returns the draft that a chat with `choice` takes without -md.

    Of a model on this machine the best that is here, too; of another the one that is downloaded with it.
    """
    if find_variant(choice.variant) is None:
        return catalog.best_draft(choice)
    found = local_draft(catalog, choice)
    return None if found is None else found.choice


def missing_local_file(choice: Choice) -> ModelNameError:
    """Returns the error for an entry of the user's catalog whose file does not exist."""
    return ModelNameError(
        f"Your catalog says that {choice.name} is {choice.variant.local}, which does not exist.",
        "Correct its path in your catalog.",
    )


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or (text.lower().endswith(".gguf") and ":" not in text)


def _absent(choice: Choice) -> ModelNameError:
    variant = choice.variant
    if variant.local is not None:
        return missing_local_file(choice)
    n_bytes, n_here = variant.size_bytes or variant.about_bytes, cache.partial_bytes(variant)
    if n_here:
        of = f" of {format_bytes(n_bytes)}" if n_bytes else ""
        return ModelNameError(
            f"{choice.name} is incomplete on this machine: {format_bytes(n_here)}{of}.",
            f"Fetch the rest with moeedge pull {choice.name}.",
        )
    about = f" ({format_bytes(n_bytes)})" if n_bytes else ""
    return ModelNameError(
        f"{choice.name}{about} is not on this machine.",
        f"Download it{' and its draft' if choice.entry.drafts else ''} with moeedge pull {choice.name}.",
    )


def list_models(catalog: Catalog, *, everything: bool) -> list[ListedModel]:
    """Returns the bundled pair, the catalog's models that are cached at least in part, and other cached GGUF models.

    everything: also the catalog's models that are not on this machine.
    """
    rows = list(_bundled())
    known: set[Path] = set()
    for entry in catalog.entries.values():
        for variant in entry.variants:
            row = _catalog_row(catalog, Choice(entry, variant))
            if row.path is not None:
                known.add(Path(row.path).resolve())
            if everything or row.state != "absent":
                rows.append(row)
    for model in cache.cached_models():
        if model.path.resolve() not in known:
            name = str(HubReference(model.repo, file=model.files[0]))
            size = model.size_bytes
            rows.append(ListedModel(name, "", "complete", size, size, str(model.path), repo=model.repo))
    variants = (variant for entry in catalog.entries.values() for variant in entry.variants)
    hashes = {file.sha256 for variant in variants for file in variant.files}
    for repo, blob in cache.unfinished_downloads():
        if blob.name.removesuffix(cache.INCOMPLETE) not in hashes:
            rows.append(ListedModel(f"hf:{repo}", "", "partial", None, size_of(blob), None, repo=repo))
    return rows


def _bundled() -> Iterator[ListedModel]:
    try:
        files = paths.bundled_target(), paths.bundled_draft()
    except ModelFileError:
        return
    size = sum(size_of(file) for file in files)
    about = "the toy pair that comes with moeedge: target and draft"
    yield ListedModel(BUNDLED, about, "complete", size, size, str(files[0]))


def _catalog_row(catalog: Catalog, choice: Choice) -> ListedModel:
    entry, variant = choice.entry, choice.variant
    path = find_variant(variant)
    size = variant.size_bytes
    if path is not None and size is None:
        size = sum(size_of(path.with_name(Path(file.path).name)) for file in variant.files) or size_of(path)
    n_here = size or 0 if path is not None else cache.partial_bytes(variant)
    return ListedModel(
        name=choice.name,
        about=entry.about,
        state="complete" if path is not None else "partial" if n_here else "absent",
        size_bytes=size,
        have_bytes=n_here,
        path=None if path is None else str(path),
        about_bytes=variant.about_bytes,
        licence=entry.licence,
        drafts=tuple(draft for draft in entry.drafts if draft != choice.name),
        draft_of=tuple(catalog.targets_of(choice.name)),
        draft_max=entry.draft_max,
        repo=variant.repo,
        revision=variant.revision if variant.repo else "",
        verified=variant.verified,
        note=entry.note,
        source=variant.source or entry.source,
    )


def plan_removal(catalog: Catalog, name: str) -> Removal:
    """Returns the files of `name` that no other file needs.

    Raises ModelNameError if there are none, InputError for the bundled pair and for files outside the cache.
    """
    if name.lower() == BUNDLED:
        raise InputError(
            "The bundled pair is part of moeedge and cannot be removed alone.",
            "pip uninstall moeedge removes the entire program.",
        )
    choice = find(catalog, name)
    if isinstance(choice, Choice):
        if choice.variant.local is not None:
            raise InputError(
                f"{choice.name} is a file of your own catalog, which moeedge does not delete.",
                f"Delete {choice.variant.local} and its entry in the catalog.",
            )
        repo, label = choice.variant.repo, choice.name
        files = [file.path for file in choice.variant.files]
        unfinished = [cache.partial_file(repo, file.sha256) for file in choice.variant.files if file.sha256]
    else:
        repo, label = choice.repo, str(choice)
        files = [file for model in find_reference(choice) for file in model.files]
        is_entire_repo = not choice.file and not choice.quant
        unfinished = [blob for owner, blob in cache.unfinished_downloads() if is_entire_repo and owner == repo]
    links = [link for folder in snapshots(repo) for file in files if (link := folder / file).exists()]
    blobs = {link.resolve() for link in links} | {blob for blob in unfinished if blob.is_file()}
    removable = [blob for blob in blobs if not _is_shared(blob, links, repo)]
    if not links and not removable:
        raise ModelNameError(f"{label} is not on this machine.", "moeedge list shows those that are.")
    return Removal(label, tuple(links), tuple(removable), sum(size_of(blob) for blob in removable))


def _is_shared(blob: Path, links: Sequence[Path], repo: str) -> bool:
    """Whether a link other than `links` points to the blob."""
    others = (path for folder in snapshots(repo) for path in folder.rglob("*") if path not in links)
    return any(path.is_symlink() and path.resolve() == blob for path in others)


def remove(removal: Removal) -> None:
    """Deletes links first, then blobs, then folders that are left empty."""
    for path in (*removal.links, *removal.blobs):
        path.unlink(missing_ok=True)
    for folder in dict.fromkeys(link.parent for link in removal.links):
        with suppress(OSError):  # not empty
            folder.rmdir()
