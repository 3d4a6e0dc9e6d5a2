"""The catalog of models that people use: names, where their files lie on the hub, and which drafts go with them.

models/catalog.toml comes with the package; a file of the user's own adds entries and replaces those of the same name
(docs/models.md has the format).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from moeedge import paths
from moeedge.errors import CatalogError

BUNDLED = "bundled"  # the name of the pair that comes with the package
_NEAR = 0.6  # difflib's similarity from which a name is worth asking back
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class HubFile:
    """One file of a repository on the hub."""

    path: str
    size_bytes: int | None = None  # None: the catalog does not know
    sha256: str | None = None


@dataclass(frozen=True)
class Variant:
    """One quantization of a model: a file, or the parts of a split one in their order."""

    quant: str
    repo: str = ""  # empty: a file of the user's own
    revision: str = "main"
    files: tuple[HubFile, ...] = ()
    local: Path | None = None  # instead of repo and files
    about_bytes: int | None = None  # where the exact sizes are not known
    verified: bool = True  # False: names could not be confirmed
    source: str = ""

    @property
    def size_bytes(self) -> int | None:
        """All parts together, or None where one is not known."""
        sizes = [file.size_bytes for file in self.files]
        return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)


@dataclass(frozen=True)
class ModelEntry:
    """One model: how it is called, its files, and what it is run with."""

    name: str
    about: str
    licence: str
    variants: tuple[Variant, ...]  # the first is the default
    aliases: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()  # names in this catalog, optionally NAME:QUANT; the best first
    draft_max: int | None = None  # tokens per draft that suit the pair
    note: str = ""
    source: str = ""
    own: bool = False  # from the user's file

    def variant(self, quant: str) -> Variant | None:
        """The variant of that name, whatever its case."""
        return next((one for one in self.variants if one.quant.lower() == quant.lower()), None)


@dataclass(frozen=True)
class Choice:
    """What a name stands for: an entry and one of its variants."""

    entry: ModelEntry
    variant: Variant

    @property
    def name(self) -> str:
        """As a user would write it."""
        default = self.variant is self.entry.variants[0]
        return self.entry.name if default else f"{self.entry.name}:{self.variant.quant}"


@dataclass(frozen=True)
class Catalog:
    """All entries, by name."""

    entries: Mapping[str, ModelEntry] = field(default_factory=dict)

    @cached_property
    def _names(self) -> dict[str, str]:
        """Names and aliases in lower case -> names; a name wins over an alias of another entry."""
        known = {alias.lower(): entry.name for entry in self.entries.values() for alias in entry.aliases}
        return known | {name.lower(): name for name in self.entries}

    def find(self, text: str) -> Choice | None:
        """The entry that NAME, an alias or NAME:QUANT means. Raises CatalogError where only the quantization is
        unknown."""
        whole = self._names.get(text.lower())
        if whole is not None:
            return Choice(self.entries[whole], self.entries[whole].variants[0])
        name, colon, quant = text.rpartition(":")
        found = self._names.get(name.lower()) if colon else None
        if found is None:
            return None
        entry = self.entries[found]
        variant = entry.variant(quant)
        if variant is None:
            raise CatalogError(
                f'The catalog has no {entry.name} of type "{quant}".',
                f"It has {', '.join(one.quant for one in entry.variants)}.",
            )
        return Choice(entry, variant)

    def near(self, text: str) -> list[str]:
        """Names that look like `text`: those with it inside first, then the most alike."""
        wanted = text.lower().partition(":")[0]
        if not wanted:
            return []
        alike = {name: difflib.SequenceMatcher(None, wanted, name).ratio() for name in self._names}
        order = sorted(alike, key=lambda name: (wanted not in name, -alike[name]))
        near = [self._names[name] for name in order if wanted in name or alike[name] >= _NEAR]
        return list(dict.fromkeys(near))[:5]

    def drafts(self, entry: ModelEntry) -> Iterator[Choice]:
        """The drafts that go with `entry`, the best first."""
        for name in entry.drafts:
            choice = self.find(name)
            assert choice is not None  # load_catalog looked
            yield choice

    def targets_of(self, name: str) -> list[str]:
        """The names of the entries that name `name` (NAME, or NAME:QUANT) as a draft."""
        return [entry.name for entry in self.entries.values() if name in entry.drafts]


def load_catalog() -> Catalog:
    """The package's catalog and the user's own over it. Raises CatalogError for a file that makes no sense."""
    entries = _read(paths.catalog_file(), own=False)
    own = paths.own_catalog_file()
    if own is not None:
        entries |= _read(own, own=True)
    catalog = Catalog(entries)
    for entry in entries.values():
        for draft in entry.drafts:
            if catalog.find(draft) is None:
                where = own if entry.own else paths.catalog_file()
                raise CatalogError(f'{where}: the draft "{draft}" of {entry.name} is no entry.', "Add one for it.")
    return catalog


def _read(path: Path, *, own: bool) -> dict[str, ModelEntry]:
    try:
        data = parse_toml(path)
    except OSError as error:
        raise CatalogError(f"The catalog {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # no TOML, or not UTF-8
        raise CatalogError(f"The catalog {path} is no TOML: {error}.") from None
    reader = _Reader(path)
    models = reader.tables(data, "model", "the file")
    reader.only(data, {"model"}, "the file")
    entries: dict[str, ModelEntry] = {}
    for table in models:
        entry = reader.entry(table, own=own)
        if entry.name in entries:
            reader.fail(f"there are two entries {entry.name}")
        entries[entry.name] = entry
    return entries


def parse_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises OSError and ValueError."""
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    with path.open("rb") as file:
        tables: dict[str, Any] = tomllib.load(file)
    return tables


class _Reader:
    """Checks what the tables of one file hold; every complaint names the file and the entry."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fail(self, why: str) -> None:
        raise CatalogError(f"The catalog {self._path} cannot be used: {why}.", "docs/models.md has the format.")

    def entry(self, table: dict[str, Any], *, own: bool) -> ModelEntry:
        name = self.text(table, "name", "a [[model]]", needed=True)
        where = f"model {name}"
        if not re.fullmatch(r"[\w.-]+", name) or name.lower() == BUNDLED:
            self.fail(f'"{name}" cannot be a name (letters, digits, ".", "-", "_"; not "{BUNDLED}")')
        known = {"name", "aliases", "about", "licence", "drafts", "draft_max", "note", "source", "variant"}
        self.only(table, known, where)
        draft_max = table.get("draft_max")
        if draft_max is not None and (not isinstance(draft_max, int) or isinstance(draft_max, bool) or draft_max < 0):
            self.fail(f"draft_max of {where} must be a number from 0 on")
        variants = tuple(self.variant(one, where) for one in self.tables(table, "variant", where))
        if not variants:
            self.fail(f"{where} has no [[model.variant]]")
        if len({one.quant.lower() for one in variants}) < len(variants):
            self.fail(f"{where} has two variants of one quant")
        return ModelEntry(
            name=name,
            about=self.text(table, "about", where),
            licence=self.text(table, "licence", where),
            variants=variants,
            aliases=self.texts(table, "aliases", where),
            drafts=self.texts(table, "drafts", where),
            draft_max=draft_max,
            note=self.text(table, "note", where),
            source=self.text(table, "source", where),
            own=own,
        )

    def variant(self, table: dict[str, Any], where: str) -> Variant:
        where = f"a variant of {where}"
        known = {"quant", "repo", "revision", "files", "size_bytes", "sha256", "about_gb", "path", "verified", "source"}
        self.only(table, known, where)
        verified = table.get("verified", True)
        if not isinstance(verified, bool):
            self.fail(f"verified of {where} must be true or false")
        quant = self.text(table, "quant", where) or "default"
        local = self.text(table, "path", where)
        if local:
            if "repo" in table or "files" in table:
                self.fail(f"{where} has a path and a repo: give one of them")
            return Variant(quant, local=(self._path.parent / Path(local).expanduser()).absolute())
        repo = self.text(table, "repo", where, needed=True)
        if not _REPO.fullmatch(repo):
            self.fail(f'repo of {where} must be "owner/name", not "{repo}"')
        return Variant(
            quant=quant,
            repo=repo,
            revision=self.text(table, "revision", where) or "main",
            files=self.files(table, where),
            about_bytes=self.about(table, where),
            verified=verified,
            source=self.text(table, "source", where),
        )

    def about(self, table: dict[str, Any], where: str) -> int | None:
        value = table.get("about_gb")
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
            self.fail(f"about_gb of {where} must be a number above 0")
        return round(value * 10**9)

    def files(self, table: dict[str, Any], where: str) -> tuple[HubFile, ...]:
        names = self.texts(table, "files", where)
        sizes = table.get("size_bytes", [None] * len(names))
        hashes = self.texts(table, "sha256", where) or (None,) * len(names)
        if not names:
            self.fail(f"{where} names no files")
        if not isinstance(sizes, list) or len(sizes) != len(names) or len(hashes) != len(names):
            self.fail(f"{where} needs as many size_bytes and sha256 as files")
        for size in sizes:
            if size is not None and (not isinstance(size, int) or size <= 0):
                self.fail(f"size_bytes of {where} must be numbers above 0")
        for name in names:
            if name.startswith("/") or ".." in name.split("/") or not name.endswith(".gguf"):
                self.fail(f'"{name}" of {where} is no GGUF file of a repository')
        for digest in hashes:
            if digest is not None and not _SHA256.fullmatch(digest):
                self.fail(f"sha256 of {where} must be 64 hexadecimal digits")
        return tuple(HubFile(*one) for one in zip(names, sizes, hashes, strict=True))

    def tables(self, table: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self.fail(f"{key} of {where} must be tables: [[{'model.' if key == 'variant' else ''}{key}]]")
        return list(value)

    def only(self, table: dict[str, Any], known: set[str], where: str) -> None:
        strange = sorted(set(table) - known)
        if strange:
            self.fail(f'{where} has an unknown key "{strange[0]}" (known: {", ".join(sorted(known))})')

    def text(self, table: dict[str, Any], key: str, where: str, *, needed: bool = False) -> str:
        value = table.get(key, "")
        if not isinstance(value, str) or (needed and not value):
            self.fail(f"{key} of {where} must be a text")
        return str(value)

    def texts(self, table: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.fail(f"{key} of {where} must be a list of texts")
        return tuple(value)
