"""What `moeedge list` shows: the models on this machine, and what the catalog offers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeedge import paths
from moeedge.errors import ModelFileError
from moeedge.hub import cache
from moeedge.hub.catalog import BUNDLED, Catalog, Choice
from moeedge.hub.names import HubReference

State = Literal["complete", "partial", "absent"]


@dataclass(frozen=True)
class Listed:
    """One model, as it may be given to -m or -md or to pull."""

    name: str
    about: str
    state: State
    size_bytes: int | None  # of the whole; None: not known exactly
    have_bytes: int  # on this machine
    path: str | None  # the first file, where all is here
    about_bytes: int | None = None  # roughly, where it is not known exactly
    licence: str = ""
    drafts: tuple[str, ...] = ()
    draft_of: tuple[str, ...] = ()
    draft_max: int | None = None
    repo: str = ""
    revision: str = ""
    verified: bool = True  # False: the catalog could not confirm its facts
    note: str = ""
    source: str = ""


def list_models(catalog: Catalog, *, everything: bool) -> list[Listed]:
    """The bundled pair, the catalog's models that are here in whole or in part, and other GGUF models of the cache.

    everything: also what the catalog offers and is not here.
    """
    rows = list(_bundled())
    known: set[Path] = set()
    for entry in catalog.entries.values():
        for variant in entry.variants:
            row = _of_choice(catalog, Choice(entry, variant))
            if row.path is not None:
                known.add(Path(row.path).resolve())
            if everything or row.state != "absent":
                rows.append(row)
    for model in cache.cached_models():
        if model.path.resolve() not in known:
            name = str(HubReference(model.repo, file=model.files[0]))
            rows.append(
                Listed(name, "", "complete", model.size_bytes, model.size_bytes, str(model.path), repo=model.repo)
            )
    hashes = {file.sha256 for entry in catalog.entries.values() for one in entry.variants for file in one.files}
    for repo, blob in cache.stray_partials():
        if blob.name[: -len(cache.INCOMPLETE)] not in hashes:
            rows.append(Listed(f"hf:{repo}", "", "partial", None, cache.size_of(blob), None, repo=repo))
    return rows


def _bundled() -> Iterator[Listed]:
    try:
        files = paths.bundled_target(), paths.bundled_draft()
    except ModelFileError:
        return
    size = sum(cache.size_of(file) for file in files)
    about = "the toy pair that comes with moeedge: target and draft"
    yield Listed(BUNDLED, about, "complete", size, size, str(files[0]))


def _of_choice(catalog: Catalog, choice: Choice) -> Listed:
    entry, variant = choice.entry, choice.variant
    path = cache.find_variant(variant)
    size = variant.size_bytes
    if path is not None and size is None:
        size = sum(cache.size_of(path.with_name(Path(file.path).name)) for file in variant.files) or cache.size_of(path)
    here = size or 0 if path is not None else cache.partial_bytes(variant)
    return Listed(
        name=choice.name,
        about=entry.about,
        state="complete" if path is not None else "partial" if here else "absent",
        size_bytes=size,
        have_bytes=here,
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
