"""Values for cases, made from type hints, and any value as JSON."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import itertools
import json
import re
import sys
import types
import typing
import zlib
from collections import abc
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

import numpy as np

# of parameters that are parsed
TEXTS = (
    *("1,3-5", "12GiB", "0.5", "1GB/s", "lru=0.5", "3", '{"a": [1, "b"], "type": "object"}', "true", "A: B\n\nC"),
    *("# Title\n**bold** `code` <think>x</think> The answer is \\boxed{7}.\n```python\nprint(3)\n```", "emulated"),
    *("qwen3-30b-a3b:Q4_K_M", "hf:owner/repo:file.gguf"),
)
MANY = 40
LONG = 4000  # characters from which a text is kept as its hash
_PATHS = re.compile(r"(?<![\w.])/(?:[\w.@+-]+/)+")
_DIGITS = 9


class Unmade(Exception):
    """No value of a type can be made."""


def plain(value: Any) -> Any:
    """The value as JSON has it: dataclasses by field, arrays as lists, folders of paths left out, floats rounded."""
    if value is None or (isinstance(value, (bool, int)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if value - value == 0 else str(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Path):
        return value.name
    if isinstance(value, str):
        text = _PATHS.sub("", value) if value != sys.executable else "python"  # or python3, python3.12
        return text if len(text) <= LONG else f"{len(text)} characters, {digest(text)}"
    if type(value).__name__ == "Provenance":  # of this machine and commit
        return "a Provenance"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "close"):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, abc.Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=str)
    if isinstance(value, (list, tuple, abc.Iterator)):
        return [plain(item) for item in itertools.islice(value, 100)]
    if isinstance(value, bytes):
        return digest(value.hex())
    if callable(value):
        return "a function"
    return f"a {type(value).__name__}"


def digest(text: str) -> str:
    """Twelve hexadecimal digits of the text's hash."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def compact(value: Any, records: int = 10 * MANY) -> Any:
    """The value with long lists in it (more than MANY values, or more than `records` of records) as number and hash."""
    if isinstance(value, dict):
        return {key: compact(item, records) for key, item in value.items()}
    if isinstance(value, list):
        n = len(flat(value))
        if n > (records if any(isinstance(item, dict) for item in value) else MANY):
            return f"{n} values, {digest(json.dumps(value))}"
        return [compact(item, records) for item in value]
    return value


def flat(value: Any, at: str = "") -> dict[str, Any]:
    """Every value that is no object or list, by its place."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        return {at: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found |= flat(item, f"{at}.{key}" if at else str(key))
    return found


@cache
def hints(function: Any, owner: Any) -> dict[str, Any]:
    """The types of a function's parameters, or of a class's fields; imports for type checking included."""
    return typing.get_type_hints(function, _names(owner))


@cache
def _names(owner: Any) -> dict[str, Any]:
    names = dict(vars(owner))
    for node in ast.parse(inspect.getsource(owner)).body:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for statement in node.body:
                with suppress(ImportError):  # of stubs
                    exec(compile(ast.Module([statement], []), "<types>", "exec"), names)
    return names


def example(kind: Any, name: str = "", variant: int = 0, depth: int = 0) -> Any:
    """A value of the type, which depends on the field's name and the variant alone. Raises Unmade."""
    if depth > 9:
        raise Unmade(str(kind))
    number = zlib.crc32(f"{name} {variant}".encode())
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        present = [each for each in arguments if each is not type(None)]
        if len(present) < len(arguments) and variant % 3 == 1:
            return None
        return example(present[variant % len(present)], name, variant, depth)
    if origin is typing.Annotated:
        return example(arguments[0], name, variant, depth)
    if origin is Literal:
        return arguments[number % len(arguments)]
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return tuple(example(each, f"{name}{i}", variant, depth + 1) for i, each in enumerate(arguments))
    if origin in (list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection):
        made = [example(arguments[0], name, variant + i, depth + 1) for i in range(3)]
        return origin(made) if isinstance(origin, type) and origin in (tuple, set, frozenset) else made
    if origin in (dict, abc.Mapping):
        keys = [example(arguments[0], name, variant + i, depth + 1) for i in range(2)]
        return {key: example(arguments[1], f"{name}{key}", variant, depth + 1) for key in keys}
    if origin is np.ndarray or kind is np.ndarray:
        scalar = typing.get_args(arguments[1])[0] if len(arguments) > 1 else np.float64
        return (np.random.default_rng(number).random((4, 4)) * 4).astype(scalar if isinstance(scalar, type) else float)
    if kind is Any or kind is object:
        return number % 50
    if kind is bool:
        return bool((number >> 3) & 1)
    if kind is int:
        scale = 1 << 20 if "bytes" in name else 1
        return (variant + 2) * (number % 40 + 1) * scale if variant % 4 != 2 else number % 3
    if kind is float:
        share = (number % 997) / 997
        if name.endswith(("_bytes", "per_s")):
            return share * 1e9
        return share * (20 if name.endswith("_ts") else 1.0)
    if kind is str and depth == 0 and variant % (len(TEXTS) + 1):
        return TEXTS[variant % (len(TEXTS) + 1) - 1]
    if kind is str:
        words = re.sub(r"\d+$", "", name) or "text"
        return f"{words} {number % 7}"
    if kind is bytes:
        return name.encode()
    if kind is Path:
        return Path(f"{name or 'file'}{number % 5}.gguf")
    if not isinstance(kind, type):
        raise Unmade(str(kind))
    if issubclass(kind, Enum):
        return list(kind)[number % len(list(kind))]
    if dataclasses.is_dataclass(kind) and not hasattr(kind, "close"):  # what has to be closed holds a handle
        return _dataclass(kind, variant, depth)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        known = hints(kind, sys.modules[kind.__module__])
        return kind(*(example(known[field], field, variant, depth + 1) for field in kind._fields))
    raise Unmade(kind.__name__)


def _dataclass(kind: Any, variant: int, depth: int) -> Any:
    """Fields of every third variant keep their defaults where a check refuses the others."""
    known = hints(kind, sys.modules[kind.__module__])
    given: dict[str, Any] = {}
    spare: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        try:
            value = example(known[field.name], field.name, variant, depth + 1)
        except Unmade:
            if needed:
                raise
            continue
        (given if needed else spare)[field.name] = value
    try:
        return kind(**given, **spare)
    except Exception:
        pass
    for name, value in spare.items():  # one by one: those that a check refuses keep their defaults
        with suppress(Exception):
            kind(**given, **{name: value})
            given[name] = value
    try:
        return kind(**given)
    except Exception as error:
        raise Unmade(f"{kind.__name__}: {error}") from None


def rebuilt(kind: Any, value: Any) -> Any:
    """The value of a type that `plain` made this JSON of; fields that it lacks keep their defaults. Raises Unmade."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if value is None or kind in (Any, object, bool, int, str) or origin is Literal:
        return value
    if origin is typing.Annotated:
        return rebuilt(arguments[0], value)
    if origin in (Union, types.UnionType):
        for each in arguments:
            with suppress(Exception):
                return rebuilt(each, value)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return tuple(rebuilt(each, item) for each, item in zip(arguments, value, strict=True))
    if origin in (list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection):
        made = [rebuilt(arguments[0], item) for item in value]
        return origin(made) if origin in (tuple, set, frozenset) else made
    if origin in (dict, abc.Mapping):
        keys = {key: int(key) if arguments[0] is int else rebuilt(arguments[0], key) for key in value}
        return {keys[key]: rebuilt(arguments[1], item) for key, item in value.items()}
    if origin is np.ndarray or kind is np.ndarray:
        scalar = typing.get_args(arguments[1])[0] if len(arguments) > 1 else np.float64
        return np.asarray(value, dtype=scalar if isinstance(scalar, type) else float)
    if kind is float:
        return float(value)
    if kind is Path:
        return Path(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[value]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        known = hints(kind, sys.modules[kind.__module__])
        names = [field.name for field in dataclasses.fields(kind) if field.init and field.name in value]
        return kind(**{name: rebuilt(known[name], value[name]) for name in names})
    raise Unmade(str(kind))
