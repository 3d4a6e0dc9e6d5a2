"""Files to rows: JSON Lines (gzipped or not), a JSON array, CSV, Parquet; what is malformed is named with its line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeedge.errors import DatasetError

_MEND = "Mend or remove it."
PARQUET_MEND = 'Run: pip install "moeedge[score]"'


@dataclass(frozen=True)
class Row:
    """One record of a file; `where` names file and line for error messages."""

    fields: dict[str, Any]
    number: int  # line of a .jsonl, record of a .json, line of a .csv; from 1
    where: str

    def text(self, key: str) -> str:
        """The non-empty string under `key`. Raises DatasetError otherwise."""
        value = self.fields.get(key)
        if not isinstance(value, str) or not value.strip():
            raise DatasetError(f'{self.where}: "{key}" must be a non-empty string.', _MEND)
        return value

    def strings(self, key: str) -> list[str]:
        """The non-empty list of non-empty strings under `key`. Raises DatasetError otherwise."""
        value = self.fields.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v.strip() for v in value):
            raise DatasetError(f'{self.where}: "{key}" must be a non-empty list of non-empty strings.', _MEND)
        return value

    def optional_text(self, key: str) -> str:
        """The string under `key`; empty where there is none."""
        value = self.fields.get(key)
        return value if isinstance(value, str) else ""

    def optional_texts(self, *keys: str) -> tuple[str, ...]:
        """What is not blank of the first of `keys` that has a string or a list of strings; empty for none."""
        for key in keys:
            value = self.fields.get(key)
            listed = value if isinstance(value, list) else [value]
            texts = tuple(text for text in listed if isinstance(text, str) and text.strip())
            if texts:
                return texts
        return ()

    def identity(self, *keys: str) -> str:
        """The first id-like field that is there, else the row's number."""
        for key in keys:
            value = self.fields.get(key)
            if isinstance(value, (str, int)) and str(value):
                return str(value)
        return str(self.number)


def read_rows(path: Path) -> list[Row]:
    """All rows of `path`, by its suffix: .jsonl, .json, .csv, each also with .gz, and .parquet.

    Raises DatasetError for a file that is absent, unreadable, malformed (with the line) or empty.
    """
    kind = path.name.removesuffix(".gz").rpartition(".")[2].lower()
    text = "" if kind == "parquet" else _read_text(path)
    if kind == "parquet":
        rows = _parquet_rows(path)
    elif kind == "csv":
        rows = list(_csv_rows(text, path.name))
    elif kind == "json":
        rows = _json_rows(text, path.name)
    else:
        rows = list(_jsonl_rows(text, path.name))
    if not rows:
        raise DatasetError(f"{path.name} holds no prompts.", "Give a file with one JSON object per line.")
    return rows


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except FileNotFoundError:
        raise DatasetError(f"There is no file {path}.", "Check the path.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read ({error}).", "Check the file.") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DatasetError(f"{path.name}, line {line}: not UTF-8 text.", "Save the file as UTF-8.") from None


def _jsonl_rows(text: str, name: str) -> Iterator[Row]:
    # split at newlines only: str.splitlines would also cut at U+2028, which JSON strings may hold
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{where}: not valid JSON ({error.msg}, column {error.colno}).", _MEND) from None
        yield _object(fields, number, where)


def _json_rows(text: str, name: str) -> list[Row]:
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{name}, line {error.lineno}: not valid JSON ({error.msg}).", _MEND) from None
    if not isinstance(records, list):
        raise DatasetError(f"{name}: the file must hold an array of objects.", _MEND)
    return [_object(fields, number, f"{name}, record {number}") for number, fields in enumerate(records, start=1)]


def _csv_rows(text: str, name: str) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    for fields in reader:
        yield Row(dict(fields), reader.line_num, f"{name}, line {reader.line_num}")


def _parquet_rows(path: Path) -> list[Row]:
    if not path.is_file():
        raise DatasetError(f"There is no file {path}.", "Check the path.")
    if not reads_parquet():
        raise DatasetError(f"{path.name} is Parquet, which needs the package pyarrow.", PARQUET_MEND)
    from pyarrow.parquet import read_table  # imported here: a third of a second, for the few files that need it

    try:
        records = read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise DatasetError(
            f"{path} cannot be read ({' '.join(str(error).split())[:200]}).", "Check the file."
        ) from None
    return [Row(fields, number, f"{path.name}, row {number}") for number, fields in enumerate(records, start=1)]


def reads_parquet() -> bool:
    """Whether the library for Parquet is installed."""
    return find_spec("pyarrow") is not None


def _object(fields: object, number: int, where: str) -> Row:
    if not isinstance(fields, dict):
        raise DatasetError(f"{where}: a JSON object is expected, not {type(fields).__name__}.", _MEND)
    return Row(fields, number, where)
