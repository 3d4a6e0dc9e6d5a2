"""Random changes of text and other bytes, of a template's tokens, and of the members of a NumPy archive."""

from __future__ import annotations

import io
import json
import zipfile
from copy import deepcopy
from random import Random
from typing import Any

import jinja2
import numpy as np

# what breaks readers of JSON, CSV, Jinja and numbers
TOKENS = (
    *(b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b'"\\ud800"', b"1e999", b"NaN", b"-1", b"null", b"{}", b"\0", b"\xff"),
    *(b"\x1b[31m", b"\r", b'"', b",,,", b"\xe2\x80\xa8", b"a" * 140_000, b"2147483648", b"0", b"true"),
    *(b'"messages"', b'"turns"', b"{% for i in range(99999999) %}", b"{{ messages * 99999999 }}", b"{{ x.y.z }}"),
    *(b"{% include 'a' %}", b"{%", b"}}"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "a", "\x1b[31m", "\ud800", "\0", "x" * 140_000, [], [[]], [None], [0] * 5000),
    *({}, {"": None}, {"role": 1}, [{"text": 2}]),
)

# what a template's token becomes, by the lexer's name of it
_NAMES = """
messages m message content role loop index0 add_generation_prompt bos_token tools namespace raise_exception
strftime_now range dict lipsum cycler self caller none tojson trim length join list map groupby indent center batch
format replace defined string mapping startswith split __class__ items not in is if else true set for endfor endif
elif macro call filter break recursive
"""
TEMPLATE_TOKENS = {
    "name": tuple(_NAMES.split()),
    "operator": (*"+-*/%~|.,:()[]=<>", "**", "//", "==", "!=", "<=", ">="),
    "integer": ("0", "1", "-1", "99999999", "9" * 30, "2147483648"),
    "float": ("0.5", "1e308"),
    "string": ("''", "'a'", "'\\x1b[31m'", "'%s%s'", "'{0.__class__}'", "'\\ud800'", "'" + "x" * 9000 + "'"),
    "data": ("", "<|im_end|>", "{#", "\x1b]0;a\x07", "\n" * 99),
}
_STATEMENTS = """\
{% for i in range(9999999) %}a{% endfor %}
{{ 'a' * 9999999 }}
{{ ('a' * 9999)|center(999999)|indent(9) }}
{{ 9 ** 9 ** 9 }}
{{ ''.__class__.__mro__ }}
{{ raise_exception('a') }}
{{ raise_exception(messages) }}
{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}
{{ messages|tojson(indent=999999) }}
{{ 1 / 0 }}
{% include 'a' %}
{% import 'a' as a %}
{% extends messages %}
{% set x = [] %}{{ x.append(x) }}{{ x }}
{{ strftime_now('%Y' * 9999) }}
{{ lipsum(999) }}
{{ loop }}
{{ '%999999999d' % 1 }}
{{ '{:999999999}'.format(1) }}
{{ messages[-1].content.split('')[0] }}
{{ self }}
{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}
{{ range(99999999)|list|length }}
{{ x.y.z }}
"""
STATEMENTS = (*_STATEMENTS.splitlines(), "{{ " + "(" * 900 + "1" + ")" * 900 + " }}")


def mutated_template(rng: Random, data: bytes) -> bytes:
    """The template with one to three tokens that differ, or statements more; one time in five with other bytes."""
    if rng.random() < 0.2:
        return mutated(rng, data)
    tokens = [(kind, text) for _, kind, text in jinja2.Environment().lex(data.decode())]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.choice([n for n, (kind, _) in enumerate(tokens) if kind in TEMPLATE_TOKENS])
        kind = tokens[at][0]
        if rng.random() < 0.3:
            at = rng.choice([n for n, (kind, _) in enumerate(tokens) if kind == "data"])
            tokens.insert(at, ("statement", rng.choice(STATEMENTS)))
        elif rng.random() < 0.6:  # mostly one that stands elsewhere
            tokens[at] = (kind, rng.choice([text for other, text in tokens if other == kind]))
        else:
            tokens[at] = (kind, rng.choice(TEMPLATE_TOKENS[kind]))
    return "".join(text for _, text in tokens).encode("utf-8", "surrogatepass")


def mutated(rng: Random, data: bytes) -> bytes:
    """The bytes with one to four changes; where they are JSON, mostly one to three other values or keys in it."""
    if rng.random() < 0.6:
        lines = data.splitlines(keepends=True) if data[:1] == b"{" else [data]
        n = rng.randrange(len(lines)) if lines else 0
        try:
            value = json.loads(lines[n])
        except (IndexError, ValueError, RecursionError):
            pass
        else:
            for _ in range(rng.choice((1, 1, 2, 3))):
                value = _changed(rng, value)
            lines[n] = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
            return b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        end = min(end, at + rng.choice((1, 4, 64, 4096)))
        way = rng.randrange(6)
        if way == 0:
            data = data[:at] + data[end:]
        elif way == 1:
            data = data[:end] + data[at:]
        elif way == 2:
            data = data[:at] + rng.randbytes(end - at) + data[end:]
        elif way == 3:
            data = data[:at]
        else:
            data = data[:at] + rng.choice(TOKENS) + data[at if way == 4 else end :]
    return data


def _changed(rng: Random, value: Any) -> Any:
    """The value with another one in its place, or in a place within it; a key less, or with another name."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return deepcopy(rng.choice(VALUES))
    at = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
    way = rng.randrange(8)
    if way == 0:
        del value[at]
    elif way == 1 and isinstance(value, dict):
        value[rng.choice(("", "x", at + "s"))] = value.pop(at)
    elif way == 2 and isinstance(value, list):
        value += [value[at]] * rng.choice((1, 70))
    else:
        value[at] = _changed(rng, value[at])
    return value


def mutated_archive(rng: Random, data: bytes) -> bytes:
    """An .npz whose arrays differ in one value, type or shape, lack one, or whose bytes differ."""
    try:
        with np.load(io.BytesIO(data)) as archive:
            arrays = dict(archive)
    except Exception:  # changed before
        arrays = {}
    if not arrays or rng.random() < 0.3:
        return mutated(rng, data)
    name = rng.choice([*arrays])
    array, way = arrays[name], rng.randrange(6)
    if way == 0:
        del arrays[name]
    elif way == 1 and array.size and array.dtype.kind in "iuf":
        array.reshape(-1)[rng.randrange(array.size)] = rng.choice((0, 1, np.iinfo(np.int8).max))
    elif way == 2 and array.ndim:
        arrays[name] = array[: rng.randrange(len(array) + 1)]
    elif way == 3:
        arrays[name] = array.astype(rng.choice(("f4", "i8", "u1", "i4"))) if array.dtype.kind in "iufb" else array[None]
    elif way == 4:
        arrays[name] = array.reshape(array.shape[::-1])
    elif array.dtype.kind == "U":
        text = mutated(rng, str(array).encode()).decode("utf-8", "replace")
        arrays[name] = np.array(text)
    else:
        arrays[name] = np.full_like(array, rng.choice((0, 1)))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for key, value in arrays.items():
            stream = io.BytesIO()
            np.save(stream, value, allow_pickle=False)
            archive.writestr(f"{key}.npy", stream.getvalue())
    return file.getvalue()
