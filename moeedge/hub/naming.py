"""A name as the user writes it: an entry of the catalog, or a place on the hub."""

from __future__ import annotations

from moeedge.errors import InputError, ModelNameError
from moeedge.hub.catalog import Catalog, Choice
from moeedge.hub.reference import HubReference, parse_reference


def find(catalog: Catalog, name: str, *, quant: str | None = None) -> Choice | HubReference:
    """The catalog's entry, or the place on the hub, that `name` means. Raises ModelNameError with near names."""
    choice = catalog.find(f"{name}:{quant}" if quant and catalog.find(name) else name)
    if choice is not None:
        return choice
    reference = parse_reference(name)
    if reference is None and name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        reference = parse_reference(f"hf:{name}")
    if reference is None:
        raise unknown_name(catalog, name)
    if quant and (reference.file or reference.quant):
        raise InputError(f"{reference} names its file already.", "Leave out --quant.")
    return HubReference(reference.repo, reference.revision, reference.file, quant or reference.quant)


def unknown_name(catalog: Catalog, name: str) -> ModelNameError:
    """For a name that stands for nothing."""
    near = catalog.near(name)
    mend = f"Did you mean {', '.join(near)}? " if near else ""
    return ModelNameError(
        f'There is no model "{name}".',
        f"{mend}moeedge list --all names those of the catalog; hf:owner/repo:QUANT takes one from the hub.",
    )
