"""JSON schemas as grammars: values that follow a schema are taken, others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeedge.errors import InputError
from moeedge.lab.widen.random_model import IM_END
from moeedge.llama.json_schema import schema_grammar
from moeedge.llama.model import Model
from moeedge.llama.samplers import Grammar, TokenArray

PYDANTIC = {
    "$defs": {"Part": {"title": "Part", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    "title": "Whole",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "type": "string"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "any": {"title": "Any"},
    },
    "required": ["name", "parts"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
}
CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "object"}, ["{}", '{"a": [1, true, null, "x"]}'], ["[]", "1"]),
    ({"type": "array"}, ["[]", '["a", {}]'], ["{}"]),
    ({"type": ["string", "null"]}, ["null", '"a"'], ["1", "{}"]),
    ({"type": ["string", "null"], "enum": ["x", None]}, ['"x"', "null"], ['"y"']),
    ({"type": "array", "items": {}}, ["[1]", '["a"]', "[[]]"], ["{}"]),
    ({"type": "object", "properties": {"k": True}, "required": ["k"]}, ['{"k": 1}', '{"k": "a"}'], ["{}"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
     ["[1]", "[1, -2]"], ["[]", "[1, 2, 3]"]),
    ({"enum": ["a\\b", 'q"q', "é", 3]}, [r'"a\\b"', r'"q\"q"', '"é"', "3"], ['"a"', "4"]),
    ({"const": {"x": [1]}}, ['{"x": [1]}'], ['{"x": [2]}']),
    ({"type": "string", "pattern": r"^\d{2}\.[\w-]+$"}, ['"12.a-b"'], ['"1.a"', '"12xa"', '"12."']),
    ({"type": "string", "pattern": "^[^a]+.$"}, ['"bcd"'], ['"b""', '"b\n"', '"ab"']),
    ({"type": "string"}, [r'"\n\u00e9\""', '"日本"'], ['"\n"', '"\x7f"', '"a']),
    ({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": True},
     ['{"a": 1}', '{"a": 1, "b": "x"}'], ['{"b": 1}']),
    (PYDANTIC, ['{"name": "x", "parts": [{"n": 1}], "note": null, "any": 3}', '{"name": "", "parts": []}'],
     ['{"name": 1, "parts": []}', '{"name": "x", "parts": [{"m": 1}]}']),
    (TREE, ['{"v": 1, "next": {"v": 2, "next": null}}'], ['{"v": 1}', '{"v": 1, "next": 2}']),
]  # fmt: skip


def follows(model: Model, grammar: str, text: str) -> bool:
    """Whether the grammar takes the text, byte by byte, and may end there."""
    state, work = Grammar.parse(grammar, model.vocab), TokenArray(1)
    for byte in text.encode():  # the tiny vocabulary's first tokens are the bytes
        if not state.allowed(work, [byte])[0]:
            return False
        state.accept(byte)
    return bool(state.allowed(work, [IM_END])[0])


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=[json.dumps(case[0])[:50] for case in CASES])
def test_values_that_follow_a_schema(schema: Any, right: list[str], wrong: list[str], model: Model) -> None:
    grammar = schema_grammar(json.dumps(schema))
    assert grammar.ignored == []
    for text in right:
        json.loads(text)
        assert follows(model, grammar.text, text), text
    for text in wrong:
        assert not follows(model, grammar.text, text), text


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"type": "foo"}', '{"$ref": "#/nowhere"}', '{"pattern": "a"}', '{"enum": []}'),
        *('{"properties": {"a": false}}', '{"type": "string", "pattern": "^\\\\D$"}', '{"$ref": "https://a.b/c"}'),
    ],
)
def test_a_schema_that_cannot_become_a_grammar(text: str) -> None:
    with pytest.raises(InputError):
        schema_grammar(text)


def test_keywords_that_a_schema_s_grammar_ignores_are_named() -> None:
    schema = {
        "type": "object",
        "properties": {"minimum": {"type": "integer", "minimum": 3}, "when": {"type": "string", "format": "date"}},
        "items": [{"not": {}}],
        "enum": [{"maximum": 3}],
    }
    assert schema_grammar(json.dumps(schema)).ignored == ["minimum", "not"]
    assert schema_grammar('{"type": "object"}').ignored == []
