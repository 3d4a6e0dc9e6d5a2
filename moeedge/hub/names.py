"""The names that users write for a model: a catalog entry, or hf:owner/repo[@revision][:QUANT or :file.gguf]."""

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
_DEFAULT_QUANTS = ("Q4_K_M", "Q4_0", "MXFP4", "Q8_0")  # in this order where the user names none, as in llama.cpp
_OTHER_GGUF = ("mmproj", "imatrix")  # GGUF files that are no models
_MAX_OFFERS = 12


@dataclass(frozen=True)
class HubReference:
    """A repository and, optionally, which of its files."""

    repo: str
    revision: str = "main"
    file: str = ""
    quant: str = ""

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        what = self.file or self.quant
        return f"{PREFIX}{self.repo}{at}{':' if what else ''}{what}"


def parse_reference(text: str) -> HubReference | None:
    """Returns the file on the hub that `text` names; None if it does not look like one.

    Without a prefix "owner/repo:QUANT" is accepted, because llama.cpp's users write that. Raises InputError for a
    prefix followed by anything else.
    """
    prefix = next((prefix for prefix in _PREFIXES if text.lower().startswith(prefix)), None)
    rest = text if prefix is None else text[len(prefix) :].strip("/")
    page = _PAGE.fullmatch(rest) if prefix else None
    if page:
        return HubReference(page["repo"], page["revision"], file=page["file"])
    match = _FORM.fullmatch(rest)
    if prefix is None and (match is None or not match["what"]):
        return None
    if match is None:
        hint = "Write hf:owner/repo:file.gguf or hf:owner/repo:QUANT."
        raise InputError(f'"{text}" is not the name of a repository: it lacks OWNER/REPO.', hint)
    what, revision = match["what"] or "", match["revision"] or "main"
    if not what.lower().endswith(".gguf"):
        return HubReference(match["repo"], revision, quant=what)
    if what.startswith("/") or ".." in what.split("/"):
        raise InputError(f'"{what}" is not a path in a repository.', "Write its path as the hub shows it.")
    return HubReference(match["repo"], revision, file=what)


def all_parts(file: str) -> list[str]:
    """Returns the names of all parts of a split model, given any part; [file] for a single file."""
    match = _PART.match(file)
    if match is None:
        return [file]
    return [f"{match['stem']}-{i:05d}-of-{match['parts']}.gguf" for i in range(1, int(match["parts"]) + 1)]


def is_first_part(file: str) -> bool:
    """Whether a model is opened by this file: a single file, or the first part of a split one."""
    match = _PART.match(file)
    return match is None or int(match["part"]) == 1


def has_quant(file: str, quant: str) -> bool:
    """Whether the path of a file names this quantization; "" is any."""
    pattern = rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])"
    return not quant or re.search(pattern, file, re.IGNORECASE) is not None


def choose_files(reference: HubReference, listed: list[HubFile]) -> tuple[HubFile, ...]:
    """Returns the parts of the model that `reference` means, of its repository's files. Raises InputError."""
    by_path = {file.path: file for file in listed if file.path.lower().endswith(".gguf")}
    models = [path for path in by_path if is_first_part(path) and not any(word in path.lower() for word in _OTHER_GGUF)]
    if not models:
        raise InputError(f"{reference.repo} has no GGUF model.", "Look for a repository whose name ends with -GGUF.")
    matches = _matching(reference, models, by_path)
    if len(matches) != 1:
        what = reference.file or reference.quant
        number = f'{"several files" if matches else "no file"} for "{what}"' if what else "several models"
        hint = f"Choose from: {', '.join(sorted(matches or models)[:_MAX_OFFERS])}."
        raise InputError(f"{reference.repo} has {number}.", hint)
    parts = all_parts(matches[0])
    missing = [path for path in parts if path not in by_path]
    if missing:
        raise InputError(f"{reference.repo} lacks {missing[0]}, a part of the model.", "Choose another file.")
    return tuple(by_path[path] for path in parts)


def _matching(reference: HubReference, models: list[str], by_path: dict[str, HubFile]) -> list[str]:
    """Returns those of `models` that the reference may mean."""
    if reference.file:
        first = all_parts(reference.file)[0]
        if first in models:
            return [first]
        return [reference.file] if reference.file in by_path else []  # a draft head or the like, named explicitly
    if reference.quant:
        return _of_quant(models, reference.quant)
    if len(models) == 1:
        return models
    defaults = (_of_quant(models, quant, strict=True) for quant in _DEFAULT_QUANTS)
    return next((matches for matches in defaults if len(matches) == 1), [])


def _of_quant(models: list[str], quant: str, *, strict: bool = False) -> list[str]:
    """Returns the models of `quant`; UD-`quant`, another recipe, only if there is no plain one and not `strict`."""
    matches = [path for path in models if has_quant(path, quant)]
    plain = [path for path in matches if not has_quant(path, f"UD-{quant}")]
    return plain if strict else plain or matches


def find(catalog: Catalog, name: str, *, quant: str | None = None) -> Choice | HubReference:
    """Returns the catalog's entry or the place on the hub that `name` means.

    Raises ModelNameError with similar names for an unknown one, InputError if `quant` contradicts the name.
    """
    choice = catalog.find(f"{name}:{quant}" if quant and catalog.find(name) else name)
    if choice is not None:
        return choice
    reference = parse_reference(name)
    if reference is None and name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        reference = parse_reference(f"{PREFIX}{name}")
    if reference is None:
        similar = catalog.similar(name)
        suggestion = f"Did you mean {', '.join(similar)}? " if similar else ""
        names = "moeedge list --all shows the catalog; hf:owner/repo:QUANT names a model on Hugging Face."
        raise ModelNameError(f"Unknown model '{name}'.", f"{suggestion}{names}")
    if quant and (reference.file or reference.quant):
        raise InputError(f"{reference} already names its file.", "Leave out --quant.")
    return HubReference(reference.repo, reference.revision, reference.file, quant or reference.quant)
