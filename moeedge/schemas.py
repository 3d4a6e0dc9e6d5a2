"""JSON Schemas (draft 2020-12) of records: every key with its type, its meaning and its unit. And a reader of JSON.

`read_json` reads what a user wrote or a file holds, with one error for all that can be wrong with it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from moeedge.records import Figure, json_figures, record_in, type_of

_TYPES: dict[Any, str] = {
    **{bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", type(None): "null"},
    **dict.fromkeys((list, tuple, Sequence), "array"),
    **dict.fromkeys((dict, Mapping), "object"),
}
_NULL = re.compile(r"\bnull\b")
_REF = "#/$defs/"


def json_schema(kind: Any, title: str, about: str, *, nulls: bool = True) -> dict[str, Any]:
    """The schema of a record, or of a list of records. nulls: whether keys are there whose value is null."""
    maker = _Maker(nulls)
    root = maker.schema(kind, None)
    if "$ref" in root:
        root = maker.defs[kind.__name__]
    schema: dict[str, Any] = maker.inlined(root)
    shared = {name: maker.inlined(entry) for name, entry in maker.defs.items() if maker.n_uses[name] > 1}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, "description": about}
    return head | schema | ({"$defs": shared} if shared else {})


class _Maker:
    """Makes the schemas of types; records go to `defs`, and those that are used once are put in place at the end."""

    def __init__(self, nulls: bool) -> None:
        self._nulls = nulls
        self.defs: dict[str, dict[str, Any]] = {}
        self.n_uses: Counter[str] = Counter()

    def schema(self, kind: Any, declared: Figure | None) -> dict[str, Any]:
        """The schema of a type, with the bounds that a figure declares for its numbers."""
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in (Union, types.UnionType):
            return self._union([self.schema(each, declared) for each in arguments])
        if dataclasses.is_dataclass(kind):
            return self._record(kind)
        if origin not in _TYPES:
            return {}
        made: dict[str, Any] = {"type": _TYPES[origin]}
        if made["type"] in ("integer", "number") and declared is not None:
            bounds = {"minimum": declared.least, "maximum": declared.most}
            made |= {name: bound for name, bound in bounds.items() if bound is not None}
        elif made["type"] == "array" and arguments and (items := self.schema(arguments[0], declared)):
            made["items"] = items
        elif made["type"] == "object" and len(arguments) > 1 and (values := self.schema(arguments[1], declared)):
            made["additionalProperties"] = values
        return made

    def _union(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        if any("$ref" in part for part in parts):
            return {"oneOf": parts}
        if any("enum" in part for part in parts):
            return {"enum": list(dict.fromkeys(value for part in parts for value in part.get("enum", [None])))}
        kinds = dict.fromkeys(kind for part in parts for kind in _kinds(part))
        return {key: value for part in parts for key, value in part.items()} | {"type": list(kinds)}

    def _record(self, kind: Any) -> dict[str, Any]:
        name = kind.__name__
        self.n_uses[name] += 1
        if name not in self.defs:
            made: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
            made |= {} if getattr(kind, "is_open", False) else {"additionalProperties": False}
            self.defs[name] = made
            for key, declared, member in self._members(kind):
                may_lack, about = declared.optional, declared.description
                if not self._nulls and _allows_null(member):
                    may_lack, about, member = True, _NULL.sub("left out", about), _without_null(member)
                group, dot, leaf = key.rpartition(".")
                parts = {"description": f"Figures of {group}.", "type": "object", "properties": {}, "required": []}
                holder = made["properties"].setdefault(group, parts) if dot else made
                holder["properties"][leaf] = {"description": about} | member
                holder["required"] += [] if may_lack else [leaf]
                if dot and group not in made["required"]:
                    made["required"].append(group)
        return {"$ref": _REF + name}

    def _members(self, kind: Any, holder: Figure | None = None) -> Iterator[tuple[str, Figure, dict[str, Any]]]:
        for name, key, declared in json_figures(kind, holder):
            own = type_of(kind, name)
            if declared.prefix is None:
                yield key, declared, self.schema(own, declared)
                continue
            part = record_in(own)
            for inner_key, inner, member in self._members(part, declared):
                may_lack = part is not own and inner.absent is None
                yield inner_key, inner, self._union([member, {"type": "null"}]) if may_lack else member

    def inlined(self, schema: Any) -> Any:
        """The schema with the definitions that are used once in their places."""
        if isinstance(schema, list):
            return [self.inlined(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        name = str(schema.get("$ref", "")).removeprefix(_REF)
        if name and self.n_uses[name] == 1:
            schema = {key: value for key, value in schema.items() if key != "$ref"} | self.defs[name]
        return {key: self.inlined(value) for key, value in schema.items()}


def key_rows(schema: dict[str, Any], defs: Mapping[str, Any] | None = None, group: str = "") -> Iterator[list[str]]:
    """Key ("a.b": in an object, "a[].b": in the objects of an array), types and meaning of all keys of a schema."""
    defs = schema.get("$defs", {}) if defs is None else defs
    for key, member in schema.get("items", schema).get("properties", {}).items():
        about, name, inner = member.get("description", ""), f"{group}{key}", member
        alternatives = [each for each in member.get("oneOf", [member]) if each != {"type": "null"}]
        inner = alternatives[0].get("items", alternatives[0])
        shared = str(inner.get("$ref", "")).removeprefix(_REF)
        inner = defs.get(shared, inner)
        is_array = "items" in alternatives[0]
        values = member.get("enum", [member["const"]] if "const" in member else [])
        kinds = _kinds(member) or ["array"] * is_array or [json.dumps(value) for value in values] or ["object"]
        kinds += ["null"] * ({"type": "null"} in member.get("oneOf", ()))
        if (array := inner.get("properties", {})).keys() == {"dtype", "shape"}:  # of a trace
            axes = array["shape"]["description"].rpartition(": ")[2].rstrip(".")
            kinds, inner = [f"{' or '.join(array['dtype']['enum'])} [{axes}]"], {}
        yield [f"`{name}`", ", ".join(kinds), about]
        others = {each: entry for each, entry in defs.items() if each != shared}  # it may hold itself
        yield from key_rows(inner, others, f"{name}[]." if is_array else f"{name}.")


def _kinds(member: dict[str, Any]) -> list[str]:
    kinds = member.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def _without_null(member: dict[str, Any]) -> dict[str, Any]:
    """A member whose key is left out where the value is null."""
    if "type" in member:
        kinds = [kind for kind in _kinds(member) if kind != "null"]
        return member | {"type": kinds[0] if len(kinds) == 1 else kinds}
    if "enum" in member:
        return {"enum": [value for value in member["enum"] if value is not None]}
    return {"oneOf": others} if len(others := [e for e in member["oneOf"] if e != {"type": "null"}]) > 1 else others[0]


def _allows_null(member: dict[str, Any]) -> bool:
    return "null" in _kinds(member) or None in member.get("enum", ()) or {"type": "null"} in member.get("oneOf", ())


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, which says where, also for values that Python cannot use."""
    try:
        value = json.loads(text, parse_int=_as_integer)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!r} is half of a character") from None
    except ValueError:
        raise ValueError("a number has too many digits") from None


def _as_integer(digits: str) -> int:
    """Raises ValueError for one that no float can hold: what is read is computed with."""
    if len(digits) > sys.float_info.max_10_exp:
        raise ValueError
    return int(digits)
