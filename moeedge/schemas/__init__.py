"""JSON Schemas (draft 2020-12) of what moeedge writes for other programs: records of `-o json`, and trace files.

NAME.txt has a line for every key: its name, with "?" where it may be missing, its type, its meaning with the unit, and
when it is null. Keys of an object are indented below it; deeper lines go on with the meaning. Types, "|" between
alternatives:

    str, bool, int, num, null   int>=0, num0..1: with a least, or a least and a largest value; str:FORMAT
    "text"  =1                  one of these texts; this value alone
    {}  {*}  {int>=0}           an object of the keys below; one with others, too; one of values of a type
    [int]  [num;3]              an array; one of so many elements
    @name                       what the line `def name` describes
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+)(?P<optional>\??) (?P<type>\S+)(?:  (?P<meaning>.*))?")
_GO_ON = 4  # spaces more than the line above: its meaning goes on
_RANGE = re.compile(r"(int|num|str|bool|null)(?:>=(-?\d+)|(-?\d+)\.\.(\d+)|:([\w-]+))?")
_TYPES = {"int": "integer", "num": "number", "str": "string", "bool": "boolean", "null": "null"}


def schema_names() -> list[str]:
    """Returns the names of all schemas, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.txt"))


def schema_text(name: str) -> str:
    """Returns the JSON text of a schema. Raises KeyError for a name that is not in `schema_names`."""
    if name not in schema_names():
        raise KeyError(name)
    return json.dumps(_schema((_FOLDER / f"{name}.txt").read_text(encoding="utf-8")), indent=2) + "\n"


def _schema(text: str) -> dict[str, Any]:
    title, about, *entries = _entries(text)
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= {"title": title.removeprefix("title "), "description": about.removeprefix("about ")}
    open_objects: list[dict[str, Any]] = []  # by depth
    for entry in entries:
        name, _, rest = entry.partition(" ")
        if name in ("root", "def"):
            own, _, line = ("", "", rest) if name == "root" else rest.partition(" ")
            kind, _, meaning = line.partition("  ")
            found = schema if name == "root" else schema.setdefault("$defs", {}).setdefault(own, {})
            found |= ({"description": meaning} if meaning else {}) | _type(kind)
            open_objects = [found]
            continue
        match = _LINE.fullmatch(entry)
        assert match is not None, entry
        depth = len(match["indent"]) // 2
        member = {"description": match["meaning"]} | _type(match["type"])
        parent = _object_of(open_objects[depth - 1])
        parent.setdefault("properties", {})[match["name"]] = member
        if not match["optional"]:
            parent.setdefault("required", []).append(match["name"])
        open_objects[depth:] = [member]
    return schema


def _entries(text: str) -> list[str]:
    """The lines, each with those that go on with it."""
    found: list[str] = []
    indent = 0
    for line in text.splitlines():
        own = len(line) - len(line.lstrip())
        if found and own >= indent + _GO_ON:
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
            indent = own
    return found


def _object_of(member: dict[str, Any]) -> dict[str, Any]:
    """The object whose keys are below a line: its own, or that of its elements."""
    while "items" in member:
        member = member["items"]
    return member


def _type(text: str) -> dict[str, Any]:
    """The schema of a type."""
    parts = re.split(r"\|(?![^\[{]*[\]}])", text)
    if text[0] == "@":
        found = {"$ref": f"#/$defs/{parts[0][1:]}"}
        return {"oneOf": [found, {"type": "null"}]} if len(parts) > 1 else found
    if text[0] == "=":
        value = json.loads(text[1:])
        return {"type": "string" if isinstance(value, str) else "integer", "const": value}
    if text[0] == '"':
        return {"enum": [json.loads(part) if part != "null" else None for part in parts]}
    merged: dict[str, Any] = {}
    for part in parts:
        one = _single(part)
        kinds = merged.get("type", [])
        merged |= one | {"type": [*kinds, one["type"]]}
    if len(merged["type"]) == 1:
        merged["type"] = merged["type"][0]
    return merged


def _single(part: str) -> dict[str, Any]:
    if part[0] == "[":
        inner, _, length = part[1:-1].partition(";")
        size = {"minItems": int(length), "maxItems": int(length)} if length else {}
        return {"type": "array", **({"items": _type(inner)} if inner else {}), **size}
    if part[0] == "{":
        others: Any = {"": False, "*": None}.get(part[1:-1], part[1:-1])
        others = _type(others) if isinstance(others, str) else others
        return {"type": "object"} | ({} if others is None else {"additionalProperties": others})
    match = _RANGE.fullmatch(part)
    assert match is not None, part
    kind, least, low, high, form = match.groups()
    found: dict[str, Any] = {"type": _TYPES[kind]}
    if least or low:
        found["minimum"] = int(least or low)
    if high:
        found["maximum"] = int(high)
    return found | ({"format": form} if form else {})
