"""`--dataset NAME`: look in $MOEEDGE_DATA, then in the user's cache, then on the hub; or read a file of the user's."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

from moeedge import paths
from moeedge.data.catalog import CATALOG, Entry, HubFile, dataset_names
from moeedge.data.fetch import fetch, hub_endpoint
from moeedge.data.parsers import Parser, parse_custom
from moeedge.data.prompts import Dataset, Place
from moeedge.data.rows import PARQUET_MEND, read_rows, reads_parquet
from moeedge.errors import DatasetError, DownloadError

SAMPLE = "sample"
TOY = "toy"
_FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
_TOY_ANSWER_TOKENS = 160  # the longest of the generator's answers
_OFFLINE_MEND = "Or use --offline-sample for moeedge's own small set."


def load_dataset(name: str, *, offline_sample: bool = False) -> Dataset:
    """The prompt set `name`: one of `dataset_names()`, "sample", "toy", or the path of a .jsonl file.

    With `offline_sample` the hub is not asked: what neither $MOEEDGE_DATA nor the cache has becomes our own sample, and
    is named so. Raises DatasetError (unknown, absent or malformed) or DownloadError (the hub was asked in vain).
    """
    if name == SAMPLE:
        return load_sample()
    if name == TOY:
        return load_toy()
    if name.lower() in CATALOG:
        return _load_entry(CATALOG[name.lower()], offline_sample)
    if name.endswith(_FILE_SUFFIXES):
        path = Path(name).expanduser()
        stem = path.name.split(".jsonl")[0].removesuffix(".json").removesuffix(".csv").removesuffix(".parquet")
        return _read(stem, path, parse_custom, "file", "a file of the user's")
    known = ", ".join((*dataset_names(), SAMPLE, TOY))
    raise DatasetError(f'Unknown dataset "{name}".', f"Choose one of {known}, or give the path of a .jsonl file.")


def load_sample(kind: str | None = None) -> Dataset:
    """Our own prompts, which come with the package; only those that are like the set `kind`, if one is named."""
    with as_file(files("moeedge.data") / "sample.jsonl") as path:
        whole = _read(SAMPLE, path, parse_custom, "package", "moeedge's own small set of prompts")
    if kind is None:
        return whole
    chosen = tuple(prompt for prompt in whole.prompts if prompt.id.startswith(f"{kind}-"))
    return replace(whole, prompts=chosen, variant=f"{whole.variant}, those like {kind}")


def load_toy() -> Dataset:
    """Prompts of the kinds that the bundled pair was trained on; these very ones it never saw.

    They are `held_back(42, "toy")` of models/generator, by domain and without the system messages
    (`python -m models.toy`).
    """
    with as_file(files("moeedge.data") / "toy.jsonl") as path:
        toy = _read(TOY, path, parse_custom, "package", "prompts that the bundled toy model can answer")
    return replace(toy, answer_tokens=_TOY_ANSWER_TOKENS)


def _load_entry(entry: Entry, offline_sample: bool) -> Dataset:
    looked_at = []
    for place, folder, names, variant in _folders(entry):
        for name in names:
            if (folder / name).is_file():
                return _read_entry(entry, folder / name, place, variant)
        looked_at.append(str(folder))
    if offline_sample:
        return load_sample(entry.name)

    places = ", ".join(looked_at)
    if paths.data_dir() is None:
        places += " ($MOEEDGE_DATA is not set)"
    by_hand = f"Get it from {entry.original} and put it as {entry.files[0]} into the folder that $MOEEDGE_DATA names."
    path, source = _from_hub(entry, f"The dataset {entry.name} is not in {places}", f"{by_hand} {_OFFLINE_MEND}")
    return _read_entry(entry, path, "hub", source.variant)


def _from_hub(entry: Entry, absent: str, mend: str) -> tuple[Path, HubFile]:
    """The first of the hub's files that can be read and had. `absent` and `mend` are for the error where none is."""
    readable = [source for source in entry.hub if reads_parquet() or not source.file.endswith(".parquet")]
    if not readable:
        raise DatasetError(
            f"{absent}, and the hub has it as Parquet, which needs the package pyarrow.", f"{PARQUET_MEND} {mend}"
        )
    failures = []
    for source in readable:
        try:
            return fetch(source, _hub_folder(source)), source
        except DownloadError as error:
            failures.append(error.message)
    raise DownloadError(
        f"{absent}, and the hub did not help: {' '.join(failures)}",
        f"Check the network or $HF_ENDPOINT ({hub_endpoint()}). {mend}",
    )


def _folders(entry: Entry) -> Iterator[tuple[Place, Path, tuple[str, ...], str]]:
    """The local folders to look in, best first, the file names that the set may have there, and what that is of it."""
    data = paths.data_dir()
    if data is not None:
        yield "environment", data, entry.files, entry.about
        yield "environment", data / "prompts", entry.files, entry.about
    yield "cache", _cache(), entry.files, entry.about
    for source in entry.hub:
        yield "cache", _hub_folder(source), (source.file,), source.variant


def _cache() -> Path:
    return paths.cache_dir() / "datasets"


def _hub_folder(source: HubFile) -> Path:
    return _cache() / source.repo.replace("/", "--")


def _read_entry(entry: Entry, path: Path, place: Place, variant: str) -> Dataset:
    read = _read(entry.name, path, entry.parse, place, variant)
    return replace(read, unscored=entry.unscored, answer_tokens=entry.answer_tokens)


def _read(name: str, path: Path, parse: Parser, place: Place, variant: str) -> Dataset:
    prompts = [parse(row) for row in read_rows(path)]
    seen: Counter[str] = Counter()
    for index, prompt in enumerate(prompts):  # an answer finds its prompt by its id
        seen[prompt.id] += 1
        if seen[prompt.id] > 1:
            prompts[index] = replace(prompt, id=f"{prompt.id}#{seen[prompt.id]}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Dataset(name, tuple(prompts), place, path, digest, variant)
