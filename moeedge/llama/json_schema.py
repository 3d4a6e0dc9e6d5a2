r"""JSON schemas as grammars, through the converter of llama-cpp-python.

The schema is brought into a form that the converter handles: it takes an empty schema for an object, passes over `enum`
next to a list of types and over references at the root, and knows no \d, \w and \s in patterns. Its literals do not
escape backslashes, and its strings may hold control characters, which JSON forbids; both are corrected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from moeedge.errors import InputError
from moeedge.schemas import read_json

ANY_OBJECT = '{"type": "object"}'
_ANY: dict[str, Any] = {"type": ["object", "array", "string", "number", "boolean", "null"]}
_HINT = f"For any object give {ANY_OBJECT}."
_IGNORED = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("minProperties", "maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
        *("dependentRequired", "dependentSchemas", "not", "if", "then", "else"),
    )
)
_FORMATS = frozenset(["date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"])
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$anchor"),
    )
)
_MAPS = ("properties", "$defs", "definitions")  # names of their own, each with a schema
_PARTS = ("items", "additionalProperties")  # with a schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # of schemas
_ALONE = ("$ref", "oneOf", "anyOf")  # next to which the converter passes over all others
_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": " "}
_ESCAPE = re.compile(r"\\([dws])|(?<!\\)\[((?:[^\]\\]|\\.)*)\]|\\.")
_IN_CLASS = re.compile(r"\\(.)")
_KNOWN_ESCAPES = "[](){}|*+?\\"  # that the converter or a grammar's literals know
_NOT_IN_STRINGS = r'"\\\x7F\x00-\x1F'  # without an escape of JSON, in a class of a grammar
_CORRECTED = {  # rules of the converter
    r'char ::= [^"\\] |': f"char ::= [^{_NOT_IN_STRINGS}] |",
    r"dot ::= [^\x0A\x0D]": f"dot ::= [^{_NOT_IN_STRINGS}]",
}


class SchemaGrammar(NamedTuple):
    """A grammar in GBNF, and the keywords of the schema that it does not enforce."""

    text: str
    ignored: list[str]


def schema_grammar(text: str) -> SchemaGrammar:
    """The grammar of the JSON values that follow the JSON schema `text`. Raises InputError for text that is none."""
    try:
        schema = read_json(text)
    except ValueError as error:
        raise InputError(f"The JSON schema is not JSON: {error}.", _HINT) from None
    if not isinstance(schema, dict):
        raise InputError("The JSON schema is not an object.", _HINT)
    try:
        ignored = sorted(set(_ignored(schema)))
        grammar = _convert(_convertible(schema, is_root=True))
    except InputError:
        raise
    except Exception as error:  # the converter's errors have no class in common
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"The JSON schema cannot become a grammar: {reason}.", _HINT) from None
    for rule, corrected in _CORRECTED.items():
        grammar = grammar.replace(rule, corrected)
    return SchemaGrammar(grammar, ignored)


def _convert(schema: dict[str, Any]) -> str:
    from llama_cpp.llama_grammar import SchemaConverter

    class Converter(SchemaConverter):  # type: ignore[misc]
        """With literals that hold all characters; they come as JSON."""

        def _format_literal(self, literal: str) -> str:
            value = json.dumps(json.loads(literal), ensure_ascii=False)
            for character, escaped in (("\\", r"\\"), ('"', r"\""), ("\r", r"\r"), ("\n", r"\n")):
                value = value.replace(character, escaped)
            return f'"{value}"'

    converter = Converter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
    converter.visit(converter.resolve_refs(schema, "schema"), "")
    return str(converter.format_grammar())


def _convertible(schema: Any, *, is_root: bool = False) -> dict[str, Any]:
    """The schema in a form that the converter handles. Raises InputError for one that no value follows."""
    if schema is True:
        return dict(_ANY)
    if not isinstance(schema, dict):
        raise InputError(f"The JSON schema has {json.dumps(schema)} in place of a schema.", _HINT)
    converted = {key: value for key, value in schema.items() if key not in _ANNOTATIONS and key not in _IGNORED}
    if "enum" in converted and not converted["enum"]:
        raise InputError("The JSON schema has an empty enum, which no value follows.", _HINT)
    for key, value in converted.items():
        if key in _MAPS and isinstance(value, dict):
            converted[key] = {name: _convertible(part) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            converted[key] = [_convertible(part) for part in value]
        elif key in _PARTS and value is not False:
            converted[key] = [_convertible(part) for part in value] if isinstance(value, list) else _convertible(value)
    if "enum" in converted or "const" in converted:
        converted.pop("type", None)
    if isinstance(converted.get("pattern"), str):
        if re.search(r'"|\\\\|\\[nrtfbBuxDWS]', converted["pattern"]):
            raise InputError(
                f"The pattern {converted['pattern']} of the JSON schema cannot become a part of a grammar.",
                "Leave out quotation marks, backslashes, control characters and classes like \\D in patterns.",
            )
        converted["pattern"] = _ESCAPE.sub(_spelled_out, converted["pattern"])
    types = converted.get("type")
    if isinstance(types, list):
        definitions = {key: converted.pop(key) for key in ("$defs", "definitions") if key in converted}
        return {"anyOf": [{**converted, "type": name} for name in types], **definitions}
    if is_root and "$ref" in converted:
        converted["anyOf"] = [{"$ref": converted.pop("$ref")}]
    return converted if converted or is_root else _convertible(_ANY)


def _spelled_out(match: re.Match[str]) -> str:
    """A class or an escape of a pattern as a grammar spells it."""
    if match[1]:
        return f"[{_CLASSES[match[1]]}]"
    if match[2] is not None:
        inside = _IN_CLASS.sub(_in_class, match[2])
        return f"[{inside}{_NOT_IN_STRINGS if inside.startswith('^') else ''}]"
    return match[0] if match[0][1].isalnum() or match[0][1] in _KNOWN_ESCAPES else f"[{_in_class(match)}]"


def _in_class(match: re.Match[str]) -> str:
    character = match[0][1]
    if character.isalnum() or character in r"\[]":
        return _CLASSES.get(character, match[0])
    return f"\\x{ord(character):02X}"


def _ignored(schema: Any) -> Iterator[str]:
    """The keywords in a schema and its parts that the grammar does not enforce."""
    if not isinstance(schema, dict):
        return
    alone = next((key for key in _ALONE if key in schema), None)
    for key, value in schema.items():
        is_passed_over = alone is not None and key not in (alone, *_ANNOTATIONS, "$defs", "definitions", "type")
        if key in _IGNORED or is_passed_over or (key == "format" and value not in _FORMATS):
            yield key
        parts = list(value.values()) if key in _MAPS and isinstance(value, dict) else []
        if key in _LISTS or key in _PARTS:
            parts = value if isinstance(value, list) else [value]
        for part in parts:
            yield from _ignored(part)
