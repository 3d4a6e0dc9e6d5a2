"""JSON Schemas (draft 2020-12) of what moeedge writes for other programs: records of `-o json`, and trace files.

Each file NAME.schema.json says for every key what it means, its unit, and when it is null.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent
_SUFFIX = ".schema.json"


def schema_names() -> list[str]:
    """Returns the names of all schemas, sorted."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in _FOLDER.glob(f"*{_SUFFIX}"))


def schema_text(name: str) -> str:
    """Returns the JSON text of a schema. Raises KeyError for a name that is not in `schema_names`."""
    if name not in schema_names():
        raise KeyError(name)
    return (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
