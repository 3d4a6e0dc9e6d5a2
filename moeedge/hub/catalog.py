"""The catalog of models, and the names that users write: an entry's, or hf:owner/repo[@revision][:QUANT or :file.gguf].

An entry says where a model's files are on the hub, and which drafts go with it. models/catalog.toml comes with the
package; the user's own file adds entries and replaces those of the same name (docs/models.md describes the format).
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from moeedge import paths
from moeedge.errors import CatalogError, InputError, ModelNameError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUNDLED = "bundled"  # the name of the pair that comes with the package
SHA256 = re.compile(r"[0-9a-f]{64}")
_SIMILAR = 0.6  # difflib's ratio from which a name is suggested
_MAX_SUGGESTIONS = 5


@dataclass(frozen=True)
class HubFile:
    path: str
    size_bytes: int | None = None  # None: unknown
    sha256: str | None = None


@dataclass(frozen=True)
class Variant:
    """One quantization of a model: a file, or the parts of a split one in their order."""

    quant: str
    repo: str = ""  # empty: a local file
    revision: str = "main"
    files: tuple[HubFile, ...] = ()
    local: Path | None = None  # instead of repo and files
    about_bytes: int | None = None  # approximate, if the exact sizes are unknown
    verified: bool = True  # False: the names could not be confirmed
    source: str = ""

    @property
    def size_bytes(self) -> int | None:
        """All parts together; None if a size is unknown."""
        sizes = [file.size_bytes for file in self.files if file.size_bytes is not None]
        return sum(sizes) if sizes and len(sizes) == len(self.files) else None


@dataclass(frozen=True)
class Shape:
    """Sizes for an estimate of a model's memory without its header; K and V of 16 bits. Experts: 0 in a dense model."""

    expert_layers: int
    experts: int  # per layer
    used: int  # per token and layer
    expert_weights: int  # of one expert
    weights: int  # of the model
    kv_bytes_per_token: int  # of all layers whose attention sees the entire context
    window_bytes: int = 0  # of all layers with a sliding window, at most
    vocabulary: int | None = None  # tokens
    context: int | None = None  # tokens, trained with
    source: str = ""

    @property
    def expert_share(self) -> float:
        """Share of the weights that belongs to experts."""
        return self.expert_layers * self.experts * self.expert_weights / self.weights


@dataclass(frozen=True)
class ModelEntry:
    """One model: its name, its variants, and the drafts that go with it."""

    name: str
    about: str
    licence: str
    variants: tuple[Variant, ...]  # the first is the default
    aliases: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()  # names in this catalog, NAME or NAME:QUANT; the best first
    draft_max: int | None = None  # tokens per draft that suit the pair
    note: str = ""
    source: str = ""
    shape: Shape | None = None  # None: unknown
    starter: bool = False  # offered as the first real model
    own: bool = False  # from the user's file


@dataclass(frozen=True)
class Choice:
    """The meaning of a name: an entry and one of its variants."""

    entry: ModelEntry
    variant: Variant

    @property
    def name(self) -> str:
        """NAME for the default variant, else NAME:QUANT."""
        is_default = self.variant is self.entry.variants[0]
        return self.entry.name if is_default else f"{self.entry.name}:{self.variant.quant}"


@dataclass(frozen=True)
class Starter:
    """The catalog's first real model, for those who have tried the bundled toy pair."""

    name: str
    size_bytes: int | None  # of the download; None: unknown
    command: str  # that downloads it and begins a chat


@dataclass(frozen=True)
class Catalog:
    entries: Mapping[str, ModelEntry] = field(default_factory=dict)

    @cached_property
    def _names(self) -> dict[str, str]:
        """Names and aliases in lower case -> names; a name wins over another entry's alias."""
        aliases = {alias.lower(): entry.name for entry in self.entries.values() for alias in entry.aliases}
        return aliases | {name.lower(): name for name in self.entries}

    def find(self, text: str) -> Choice | None:
        """Returns the entry for NAME, an alias or NAME:QUANT. Raises CatalogError for an unknown QUANT of an entry."""
        prefix, colon, quant = ("", "", "") if text.lower() in self._names else text.rpartition(":")
        name = self._names.get(prefix.lower() if colon else text.lower())
        if name is None:
            return None
        entry = self.entries[name]
        for variant in entry.variants:
            if not colon or variant.quant.lower() == quant.lower():
                return Choice(entry, variant)
        quants = ", ".join(variant.quant for variant in entry.variants)
        raise CatalogError(f"Unknown quantization '{quant}' of {entry.name}.", f"Choose from: {quants}.")

    def similar(self, text: str) -> list[str]:
        """Returns names similar to `text`: those that contain it first, then by similarity."""
        wanted = text.lower().partition(":")[0]
        if not wanted:
            return []
        ratio = {name: difflib.SequenceMatcher(None, wanted, name).ratio() for name in self._names}
        order = sorted(ratio, key=lambda name: (wanted not in name, -ratio[name]))
        similar = [self._names[name] for name in order if wanted in name or ratio[name] >= _SIMILAR]
        return list(dict.fromkeys(similar))[:_MAX_SUGGESTIONS]

    def drafts(self, choice: Choice) -> list[Choice]:
        """Returns the drafts that go with `choice`, the best first, which is downloaded with it; not the same file."""
        drafts = map(self.find, choice.entry.drafts)
        return [draft for draft in drafts if draft is not None and draft.variant != choice.variant]

    def starter(self) -> Starter | None:
        """Returns the first real model to try, the user's own choice before ours; None if no entry is marked."""
        marked = [entry for entry in self.entries.values() if entry.starter]
        if not marked:
            return None
        entry = max(marked, key=lambda entry: entry.own)
        size_bytes = entry.variants[0].size_bytes or entry.variants[0].about_bytes
        return Starter(entry.name, size_bytes, f"moeedge pull {entry.name} && moeedge chat -m {entry.name}")


def load_catalog() -> Catalog:
    """Reads the package's catalog, updated with the user's own. Raises CatalogError for a malformed file."""
    entries = _read(paths.catalog_file(), own=False)
    own = paths.own_catalog_file()
    if own is not None:
        entries |= _read(own, own=True)
    catalog = Catalog(entries)
    for entry in entries.values():
        for draft in entry.drafts:
            if catalog.find(draft) is None:
                file = own if entry.own else paths.catalog_file()
                raise CatalogError(f'{file}: the draft "{draft}" of {entry.name} has no entry of its own.', "Add one.")
    return catalog


def _read(path: Path, *, own: bool) -> dict[str, ModelEntry]:
    try:
        with path.open("rb") as file:
            data: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise CatalogError(f"Cannot read the catalog {path}: {error.strerror}.") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise CatalogError(f"The catalog {path} is not TOML: {error}.") from None
    reader = _Reader(path)
    reader.check(data, _FILE, "the file")
    entries: dict[str, ModelEntry] = {}
    for table in data.get("model", []):
        entry = reader.entry(table, own=own)
        reader.require(entry.name not in entries, f"there are two entries {entry.name}")
        entries[entry.name] = entry
    return entries


# what a value must be: its types, a further test, and both in words
_Rule = tuple[tuple[type, ...], Callable[[Any], bool], str]


def _rule(kind: type | tuple[type, ...], words: str, test: Callable[[Any], bool] = lambda value: True) -> _Rule:
    return (kind if isinstance(kind, tuple) else (kind,)), test, words


def _list(kind: type, words: str, test: Callable[[Any], bool] = lambda item: True) -> _Rule:
    return (list,), lambda value: all(type(item) is kind and test(item) for item in value), words


def _is_repo_path(value: str) -> bool:
    return not value.startswith("/") and ".." not in value.split("/") and value.endswith(".gguf")


_TEXT, _YES_OR_NO = _rule(str, "a text"), _rule(bool, "true or false")
_FILE: dict[str, _Rule] = {"model": _list(dict, "tables: [[model]]")}
_MODEL: dict[str, _Rule] = {
    "name": _rule(
        str,
        f'letters, digits, ".", "-" and "_", and not "{BUNDLED}"',
        lambda value: bool(re.fullmatch(r"[\w.-]+", value)) and value.lower() != BUNDLED,
    ),
    **dict.fromkeys(("about", "licence", "note", "source"), _TEXT),
    **dict.fromkeys(("aliases", "drafts"), _list(str, "a list of texts")),
    "draft_max": _rule(int, "a whole number, 0 or more", lambda value: value >= 0),
    "starter": _YES_OR_NO,
    "variant": _list(dict, "tables: [[model.variant]]"),
    "shape": _rule(dict, "a table: [model.shape]"),
}
_SHAPE_EXPERTS = ("expert_layers", "experts", "used", "expert_weights")  # a dense model has none of them
_SHAPE_NEEDS = ("weights", "kv_bytes_per_token")
_SHAPE: dict[str, _Rule] = {
    **dict.fromkeys(
        (*_SHAPE_EXPERTS, *_SHAPE_NEEDS, "window_bytes", "vocabulary", "context"),
        _rule(int, "a whole number above 0", lambda value: value > 0),
    ),
    "source": _TEXT,
}
_VARIANT: dict[str, _Rule] = {
    **dict.fromkeys(("quant", "revision", "path", "source"), _TEXT),
    "repo": _rule(str, '"owner/name"', lambda value: bool(re.fullmatch(r"[\w.-]+/[\w.-]+", value))),
    "files": _list(str, "paths of GGUF files in the repo", _is_repo_path),
    "size_bytes": _list(int, "a list of whole numbers above 0", lambda size: size > 0),
    "sha256": _list(str, "a list of hashes of 64 hexadecimal digits", lambda digits: bool(SHA256.fullmatch(digits))),
    "about_gb": _rule((int, float), "a number above 0", lambda value: 0 < value < 1e6),
    "verified": _YES_OR_NO,
}


class _Reader:
    """Builds entries from the tables of one file; every error names the file, the entry and the key.

    Not by pydantic, whose import takes longer than everything else in a lookup by name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def require(self, is_valid: object, why_not: str) -> None:
        if not is_valid:
            hint = "docs/models.md describes the format."
            raise CatalogError(f"Cannot use the catalog {self._path}: {why_not}.", hint)

    def check(self, table: dict[str, Any], rules: dict[str, _Rule], where: str) -> None:
        """Fails for an unknown key and for a value that breaks its rule."""
        for key in table:
            keys = ", ".join(sorted(rules))
            self.require(key in rules, f'{where} has an unknown key "{key}" (known: {keys})')
        for key, value in table.items():
            kinds, test, expected = rules[key]
            is_valid = type(value) in kinds and test(value)
            self.require(is_valid, f'{key} of {where} must be {expected}, not "{value}"')

    def entry(self, table: dict[str, Any], *, own: bool) -> ModelEntry:
        where = f"model {table.get('name', '')}".rstrip()
        self.require("name" in table, "a [[model]] has no name")
        self.check(table, _MODEL, where)
        variants = tuple(self.variant(variant, f"a variant of {where}") for variant in table.get("variant", []))
        self.require(variants, f"{where} has no [[model.variant]]")
        quants = {variant.quant.lower() for variant in variants}
        self.require(len(quants) == len(variants), f"{where} has two variants of one quant")
        values: dict[str, Any] = {"about": "", "licence": ""}
        values |= {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        if "shape" in table:
            values["shape"] = self.shape(table["shape"], f"[model.shape] of {where}")
        del values["variant"]
        return ModelEntry(**values, variants=variants, own=own)

    def shape(self, table: dict[str, Any], where: str) -> Shape:
        self.check(table, _SHAPE, where)
        is_dense = not set(_SHAPE_EXPERTS) & table.keys()
        missing = [key for key in (*(() if is_dense else _SHAPE_EXPERTS), *_SHAPE_NEEDS) if key not in table]
        self.require(not missing, f"{where} lacks {', '.join(missing)}")
        shape = Shape(**(dict.fromkeys(_SHAPE_EXPERTS, 0) | table))
        is_possible = is_dense or (0 < shape.expert_share < 1 and shape.used <= shape.experts)
        self.require(is_possible, f"{where} has experts that are more than its weights, or fewer than a token uses")
        return shape

    def variant(self, table: dict[str, Any], where: str) -> Variant:
        self.check(table, _VARIANT, where)
        quant = table.get("quant") or "default"
        if table.get("path"):
            self.require(not {"repo", "files"} & table.keys(), f"{where} has a path and a repo: give one of them")
            return Variant(quant, local=(self._path.parent / paths.user_path(table["path"])).absolute())
        names = table.get("files", [])
        sizes = table.get("size_bytes", [None] * len(names))
        hashes = table.get("sha256") or [None] * len(names)
        self.require("repo" in table and names, f"{where} has neither a path nor a repo and files")
        as_many = len(names) == len(sizes) == len(hashes)
        self.require(as_many, f"{where} needs as many size_bytes and sha256 as files")
        return Variant(
            quant,
            repo=table["repo"],
            revision=table.get("revision") or "main",
            files=tuple(HubFile(*file) for file in zip(names, sizes, hashes, strict=True)),
            about_bytes=round(table["about_gb"] * 10**9) if "about_gb" in table else None,
            verified=table.get("verified", True),
            source=table.get("source", ""),
        )


PREFIX = "hf:"
_PREFIXES = (PREFIX, "https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_FORM = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<what>[^:]+))?")
_PAGE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?:blob|resolve)/(?P<revision>[^/]+)/(?P<file>[^?]+\.gguf)(?:\?.*)?")
_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<suffix>(?i:\.gguf))$")
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
    match = _part(file)
    if match is None:
        return [file]
    numbers = range(1, int(match["parts"]) + 1)
    return [f"{match['stem']}-{i:05d}-of-{match['parts']}{match['suffix']}" for i in numbers]


def is_first_part(file: str) -> bool:
    """Whether a model is opened by this file: a single file, or the first part of a split one."""
    match = _part(file)
    return match is None or int(match["part"]) == 1


def _part(file: str) -> re.Match[str] | None:
    """The numbers in the name of a part; None for a single file, also where its numbers are no part's."""
    match = _PART.match(file)
    return match if match is not None and 1 <= int(match["part"]) <= int(match["parts"]) else None


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
