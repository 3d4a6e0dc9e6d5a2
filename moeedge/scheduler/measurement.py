"""Measurements of a machine, kept for later runs: one JSON file for each model and set of conditions.

It holds a dataclass with SCHEMA, its version: the fields that are not UNKEPT, and the properties that ALSO_KEPT names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from glob import escape
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from moeedge import paths
from moeedge.errors import require
from moeedge.records import plain

UNKEPT = {"kept": False}  # metadata of a field that tells of this run
_DIGITS = 16  # hexadecimal, of the conditions
Kept = TypeVar("Kept")


def measurement_dir() -> Path:
    """The folder of these files, which may not exist. Raises OSError without a cache folder."""
    return paths.cache_dir() / "calibration"


def measurement_file(name: str, conditions: dict[str, Any]) -> Path:
    """Where a measurement of a model is kept under conditions that it depends on. Raises OSError without a folder."""
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
    return measurement_dir() / f"{name}-{digest[:_DIGITS]}.json"


def measurement_files(name: str) -> list[Path]:
    """All files that `measurement_file` named so, oldest first. Raises OSError without a cache folder."""
    files = measurement_dir().glob(f"{escape(name)}-{'[0-9a-f]' * _DIGITS}.json")
    return sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name))


def read_measurement(kind: type[Kept], find_file: Callable[[], Path]) -> Kept | None:
    """The measurement that an earlier run kept in the file; None where there is none, or nothing usable."""
    with suppress(OSError, ValueError):
        return parse_measurement(kind, find_file().read_text(encoding="utf-8"))
    return None


def write_measurement(file: Path, measured: Any) -> None:
    """Replaces the file at once: another process may read it. Raises OSError where it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with paths.replace_file(file) as new_file:
        new_file.write_text(measurement_json(measured), encoding="utf-8")


def measurement_json(measured: Any) -> str:
    """The content of the file."""
    return json.dumps(kept_fields(measured), indent=1)


def kept_fields(value: Any) -> Any:
    """A measurement, or a part of one, as JSON has it; members of an IntEnum by their names."""
    if dataclasses.is_dataclass(value):
        names = [*_kept_names(value), *getattr(value, "ALSO_KEPT", ())]
        entries = {name: kept_fields(getattr(value, name)) for name in names}
        return entries | {"schema": value.SCHEMA} if hasattr(value, "SCHEMA") else entries
    if isinstance(value, dict):
        return {kept_fields(key): kept_fields(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [kept_fields(each) for each in value]
    if isinstance(value, IntEnum):
        return value.name.lower()
    return value.tolist() if isinstance(value, np.ndarray) else plain(value)


def parse_measurement(kind: type[Kept], text: str) -> Kept:
    """Reads what `write_measurement` wrote of such a dataclass. Raises ValueError for anything else."""
    try:
        measured: Kept = _parsed(kind, json.loads(text))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no such measurement: {error}") from None
    return measured


def _kept_names(kind: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(kind) if each.metadata != UNKEPT]


def _parsed(kind: Any, value: Any) -> Any:
    """The inverse of `kept_fields`, by the type; fields that the file lacks have their defaults."""
    make, origin, inner = kind, get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        types = get_type_hints(kind)
        require(value.get("schema") == getattr(kind, "SCHEMA", None), "this measurement is of another version")
        values = {name: _parsed(types[name], value[name]) for name in _kept_names(kind) if name in value}
        return make(**values, **({"from_file": True} if "from_file" in types else {}))
    if origin is UnionType:
        return None if value is None else _parsed(inner[0], value)
    if origin is dict:
        return {_parsed(inner[0], key): _parsed(inner[1], each) for key, each in value.items()}
    if origin is tuple:
        return tuple(_parsed(inner[0], each) for each in value)
    if origin is np.ndarray:
        return np.array(value, dtype=np.float64)
    if isinstance(kind, type):
        return make[value.upper()] if issubclass(kind, IntEnum) else make(value)
    return value  # a Literal
