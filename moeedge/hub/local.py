"""Which file on this machine a name stands for: what -m and -md may say beside a path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeedge.errors import InputError, ModelNameError
from moeedge.hardware.size import format_bytes
from moeedge.hub import cache
from moeedge.hub.catalog import Catalog, Choice, load_catalog
from moeedge.hub.naming import find


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
        found = cache.find_variant(choice.variant)
        if found is None:
            raise _absent(choice)
        return LocalModel(found, choice, choice.name)
    models = cache.find_reference(choice)
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
        path = cache.find_variant(draft.variant)
        if path is not None and draft.variant != choice.variant:
            return LocalModel(path, draft, draft.name)
    return None


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or (text.lower().endswith(".gguf") and ":" not in text)


def _absent(choice: Choice) -> ModelNameError:
    variant = choice.variant
    if variant.local is not None:
        return ModelNameError(f"{choice.name} should be {variant.local}, which is not there.", "Correct your catalog.")
    size, here = variant.size_bytes or variant.about_bytes, cache.partial_bytes(variant)
    if here:
        of = f" of {format_bytes(size)}" if size else ""
        return ModelNameError(
            f"{choice.name} is here in part, {format_bytes(here)}{of}.", f"moeedge pull {choice.name} fetches the rest."
        )
    about = f" ({format_bytes(size)})" if size else ""
    return ModelNameError(
        f"{choice.name}{about} is not on this machine.", f"moeedge pull {choice.name} downloads it and its draft."
    )
