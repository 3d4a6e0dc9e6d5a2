"""What was measured on a machine, kept for later runs: one JSON file for each model and set of conditions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from moeedge import paths

_DIGITS = 16  # hexadecimal, of the conditions
Kept = TypeVar("Kept")


def measurement_dir() -> Path:
    """The folder of these files, which may not exist. Raises OSError without a cache folder."""
    return paths.cache_dir() / "calibration"


def measurement_file(name: str, conditions: dict[str, Any]) -> Path:
    """Where a measurement is kept; name: of the model, conditions: everything else that the figures depend on.

    Raises OSError without a cache folder.
    """
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
    return measurement_dir() / f"{name}-{digest[:_DIGITS]}.json"


def measurement_files(name: str) -> list[Path]:
    """All files that `measurement_file` named so, oldest first. Raises OSError without a cache folder."""
    found = measurement_dir().glob(f"{escape(name)}-{'[0-9a-f]' * _DIGITS}.json")
    return sorted(found, key=lambda file: (file.stat().st_mtime_ns, file.name))


def write_measurement(file: Path, text: str) -> None:
    """Replaces the file at once: another process may read it. Raises OSError where it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with paths.replace_file(file) as new_file:
        new_file.write_text(text, encoding="utf-8")


def parse_measurement(text: str, schema: int, make: Callable[[dict[str, Any]], Kept]) -> Kept:
    """What `make` makes of the fields of a JSON object with that number as `schema`.

    Raises ValueError for anything else.
    """
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("schema") != schema:
            raise ValueError("this measurement is of another version")
        return make(fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no such measurement: {error}") from None
