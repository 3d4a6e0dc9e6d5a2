"""Models on this machine: the file that a name means, the rows of `moeedge list`, and what `moeedge rm` deletes.

`moeedge rm` deletes one quantization; huggingface_hub's delete_revisions deletes entire snapshots and keeps unfinished
downloads.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from moeedge.records import filled
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
    n_bytes, n_here = variant.size_bytes or variant.about_bytes, cache.partial_bytes(variant)
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
    for model in cache.cached_models():
        if model.path.resolve() not in files:
            name, size = str(HubReference(model.repo, file=model.files[0])), model.size_bytes
            rows.append(ListedModel(name, "", "complete", size, size, str(model.path), repo=model.repo))
    hashes = {file.sha256 for choice in choices for file in choice.variant.files}
    for repo, blob in cache.unfinished_downloads():
        if blob.name.removesuffix(cache.INCOMPLETE) not in hashes:
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
    n_here = size or 0 if path is not None else cache.partial_bytes(variant)
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
        repo, files = variant.repo, [file.path for file in variant.files]
        unfinished = [cache.blob_file(repo, file.sha256, cache.INCOMPLETE) for file in variant.files if file.sha256]
    else:
        repo, label = choice.repo, str(choice)
        files = [file for model in find_reference(choice) for file in model.files]
        is_entire_repo = not choice.file and not choice.quant
        unfinished = [blob for owner, blob in cache.unfinished_downloads() if is_entire_repo and owner == repo]
    links = [link for folder in snapshots(repo) for file in files if (link := folder / file).exists()]
    blobs = {link.resolve() for link in links} | {blob for blob in unfinished if blob.is_file()}
    others = {path for folder in snapshots(repo) for path in folder.rglob("*") if path.is_symlink()} - set(links)
    removable = list(blobs - {path.resolve() for path in others})  # no other file is a link to these
    if not links and not removable:
        raise ModelNameError(f"{label} is not on this machine.", "moeedge list shows those that are.")
    return Removal(label, tuple(links), tuple(removable), sum(size_of(blob) for blob in removable))


def remove(removal: Removal) -> None:
    """Deletes links first, then blobs, then folders that are left empty."""
    for path in (*removal.links, *removal.blobs):
        path.unlink(missing_ok=True)
    for folder in dict.fromkeys(link.parent for link in removal.links):
        with suppress(OSError):  # not empty
            folder.rmdir()
