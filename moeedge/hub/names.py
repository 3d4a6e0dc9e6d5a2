"""What a user writes for a file on the hub: hf:owner/repo, hf:owner/repo:QUANT, hf:owner/repo:file.gguf.

A name as the user writes it: an entry of the catalog, or a place on the hub.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moeedge.errors import InputError, ModelNameError
from moeedge.hub.catalog import Catalog, Choice, HubFile

PREFIX = "hf:"
_PREFIXES = (PREFIX, "https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_FORM = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<what>[^:]+))?")
_PAGE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?:blob|resolve)/(?P<revision>[^/]+)/(?P<file>[^?]+\.gguf)(?:\?.*)?")
_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")
_DEFAULT_QUANTS = ("Q4_K_M", "Q4_0", "MXFP4", "Q8_0")  # what is taken where the user named none, as in llama.cpp
_NO_MODELS = ("mmproj", "imatrix")  # GGUF files beside the model's


@dataclass(frozen=True)
class HubReference:
    """A repository, and which of its files is meant."""

    repo: str
    revision: str = "main"
    file: str = ""
    quant: str = ""

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        what = self.file or self.quant
        return f"{PREFIX}{self.repo}{at}{':' if what else ''}{what}"


def parse_reference(text: str) -> HubReference | None:
    """The file on the hub that `text` means; None where it does not look like one.

    Without a prefix "owner/repo:QUANT" is one, because llama.cpp's users write that. Raises InputError for a prefix
    with something else behind it.
    """
    prefix = next((one for one in _PREFIXES if text.lower().startswith(one)), None)
    rest = text if prefix is None else text[len(prefix) :].strip("/")
    page = _PAGE.fullmatch(rest) if prefix else None
    if page:
        return HubReference(page["repo"], page["revision"], file=page["file"])
    match = _FORM.fullmatch(rest)
    if match is None or (prefix is None and not match["what"]):
        if prefix is None:
            return None
        raise InputError(f'"{text}" names no file on the hub.', "Write hf:owner/repo:file.gguf or hf:owner/repo:QUANT.")
    what = match["what"] or ""
    is_file = what.lower().endswith(".gguf")
    if is_file and (what.startswith("/") or ".." in what.split("/")):
        raise InputError(f'"{what}" is no file of a repository.', "Write its path as the hub shows it.")
    return HubReference(
        match["repo"], match["revision"] or "main", file=what if is_file else "", quant="" if is_file else what
    )


def all_parts(file: str) -> list[str]:
    """The names of all parts of a split model, from the name of any; or the one file."""
    match = _PART.match(file)
    if match is None:
        return [file]
    return [f"{match['stem']}-{i:05d}-of-{match['parts']}.gguf" for i in range(1, int(match["parts"]) + 1)]


def is_first_part(file: str) -> bool:
    """Whether a model is opened by this file: it is whole, or the first of its parts."""
    match = _PART.match(file)
    return match is None or int(match["part"]) == 1


def has_quant(file: str, quant: str) -> bool:
    """Whether a file's name, or its folder's, says that it is of this type."""
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])", file, re.IGNORECASE) is not None


def choose_files(reference: HubReference, listed: list[HubFile]) -> tuple[HubFile, ...]:
    """The parts of the one model that `reference` means, out of the files of its repository.

    Raises InputError that names the choice where there is none, or more than one.
    """
    by_path = {file.path: file for file in listed if file.path.lower().endswith(".gguf")}
    models = [path for path in by_path if is_first_part(path) and not any(word in path.lower() for word in _NO_MODELS)]
    if not models:
        raise InputError(f"{reference.repo} holds no GGUF model.", "Look for a repository whose name ends with -GGUF.")
    if reference.file:
        chosen = [path for path in models if path == all_parts(reference.file)[0]]
        if not chosen and reference.file in by_path:
            chosen = [reference.file]  # a draft head or the like: the user knows
    elif reference.quant:
        chosen = [path for path in models if has_quant(path, reference.quant)]
        exact = [path for path in chosen if not has_quant(path, f"UD-{reference.quant}")]  # another recipe's types
        chosen = exact or chosen
    else:
        chosen = models if len(models) == 1 else _by_default(models)
    if len(chosen) != 1:
        what = reference.file or reference.quant
        offers = ", ".join(sorted(chosen or models)[:12])
        if not what:
            raise InputError(f"{reference.repo} holds several models.", f"Name one of {offers}.")
        many = "holds several files" if chosen else "holds no file"
        raise InputError(f'{reference.repo} {many} for "{what}".', f"Name one of {offers}.")
    wanted = all_parts(chosen[0])
    missing = [path for path in wanted if path not in by_path]
    if missing:
        raise InputError(f"{reference.repo} lacks {missing[0]}, a part of the model.", "Choose another file.")
    return tuple(by_path[path] for path in wanted)


def _by_default(models: list[str]) -> list[str]:
    for quant in _DEFAULT_QUANTS:
        found = [path for path in models if has_quant(path, quant) and not has_quant(path, f"UD-{quant}")]
        if len(found) == 1:
            return found
    return []


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
    hint = f"Did you mean {', '.join(near)}? " if near else ""
    return ModelNameError(
        f'There is no model "{name}".',
        f"{hint}moeedge list --all names those of the catalog; hf:owner/repo:QUANT takes one from the hub.",
    )
