"""JSON schemas as grammars, through the converter of llama-cpp-python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from moeedge.errors import InputError

ANY_OBJECT = '{"type": "object"}'
_HINT = f"For any object give {ANY_OBJECT}."
_IGNORED = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "uniqueItems", "contains"),
        *("minContains", "maxContains", "minProperties", "maxProperties", "patternProperties", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "not", "if", "then", "else"),
        *("unevaluatedProperties", "unevaluatedItems"),
    }
)
_FORMATS = frozenset({"date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"})
_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
# the converter's rule lets control characters into strings, which JSON forbids and llama.cpp's own rule excludes
_CHAR, _JSON_CHAR = r'char ::= [^"\\] |', r'char ::= [^"\\\x7F\x00-\x1F] |'


class SchemaGrammar(NamedTuple):
    """A grammar in GBNF, and the keywords of the schema that it does not enforce."""

    text: str
    ignored: list[str]


def schema_grammar(text: str) -> SchemaGrammar:
    """The grammar of the JSON values that follow the JSON schema `text`. Raises InputError for text that is none."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"The JSON schema is not JSON: {error.msg} in line {error.lineno}, column {error.colno}.", _HINT
        ) from None
    if not isinstance(schema, dict):
        raise InputError("The JSON schema is not an object.", _HINT)
    try:
        grammar = str(json_schema_to_gbnf(text))
    except Exception as error:  # its errors have no class in common
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"The JSON schema cannot become a grammar: {reason}.", _HINT) from None
    return SchemaGrammar(grammar.replace(_CHAR, _JSON_CHAR), sorted(set(_ignored(schema))))


def _ignored(schema: Any) -> Iterator[str]:
    """The keywords in a schema and its parts that the converter passes over."""
    if isinstance(schema, list):
        for item in schema:
            yield from _ignored(item)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _IGNORED or (key == "format" and value not in _FORMATS):
            yield key
        if key in _MAPS and isinstance(value, dict):
            for part in value.values():
                yield from _ignored(part)
        elif key not in ("enum", "const", "default", "examples"):
            yield from _ignored(value)
