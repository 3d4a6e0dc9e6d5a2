"""Small Python functions to complete or to write; an answer is right when the function passes its tests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from models.generator.base import Chat, Turn, code_tests
from models.generator.words import ANIMALS, COLOURS, THINGS

DOMAIN = "code"

NUMBER_NAMES = ("x", "n", "number", "value")
LIST_NAMES = ("items", "numbers", "values")
TEXT_NAMES = ("text", "word", "s")


@dataclass(frozen=True)
class Family:
    """Functions that differ in their constants. {v} is the parameter, {k} a number, {p} and {q} words."""

    kind: str  # of the parameter: "number", "list", "text", "pair" (a, b)
    names: tuple[str, ...]
    what: str  # description in the form "return ..." of a docstring
    body: str
    most: int = 50  # largest {k}


FAMILIES = (
    Family("number", ("add", "plus", "add_{k}"), "Add {k} to {v}.", "return {v} + {k}"),
    Family("number", ("subtract", "minus", "take_{k}"), "Subtract {k} from {v}.", "return {v} - {k}"),
    Family("number", ("multiply", "times_{k}", "scale"), "Multiply {v} by {k}.", "return {v} * {k}"),
    Family("number", ("is_larger", "above_{k}", "check"), "Check if {v} is larger than {k}.", "return {v} > {k}"),
    Family("number", ("is_smaller", "below_{k}", "check"), "Check if {v} is smaller than {k}.", "return {v} < {k}"),
    Family("number", ("is_equal", "check", "is_{k}"), "Check if {v} is equal to {k}.", "return {v} == {k}"),
    Family(
        "number", ("divisible", "by_{k}", "check"), "Check if {v} is divisible by {k}.", "return {v} % {k} == 0", 12
    ),
    Family("number", ("at_least", "floor"), "Return {v}, but at least {k}.", "return max({v}, {k})"),
    Family("number", ("at_most", "limit"), "Return {v}, but at most {k}.", "return min({v}, {k})"),
    Family("number", ("square",), "Return the square of {v}.", "return {v} * {v}"),
    Family("number", ("is_even", "even"), "Check if {v} is even.", "return {v} % 2 == 0"),
    Family("number", ("is_odd", "odd"), "Check if {v} is odd.", "return {v} % 2 == 1"),
    Family(
        "number",
        ("size", "label", "name_it"),
        'Return "{p}" if {v} is larger than {k}, else "{q}".',
        'if {v} > {k}:\n        return "{p}"\n    return "{q}"',
    ),
    Family("list", ("first", "head"), "Return the first {k} items of {v}.", "return {v}[:{k}]", 5),
    Family("list", ("last", "tail"), "Return the last {k} items of {v}.", "return {v}[-{k}:]", 5),
    Family("list", ("count", "how_many"), "Count how often {k} occurs in {v}.", "return {v}.count({k})", 9),
    Family("list", ("larger", "keep"), "Keep the items of {v} larger than {k}.", "return [i for i in {v} if i > {k}]"),
    Family(
        "list", ("smaller", "keep"), "Keep the items of {v} smaller than {k}.", "return [i for i in {v} if i < {k}]"
    ),
    Family("list", ("add_all", "shift"), "Add {k} to each item of {v}.", "return [i + {k} for i in {v}]"),
    Family("list", ("scale", "multiply_all"), "Multiply each item of {v} by {k}.", "return [i * {k} for i in {v}]"),
    Family("list", ("total", "sum_of"), "Return the sum of {v}.", "return sum({v})"),
    Family("list", ("largest", "biggest"), "Return the largest item of {v}.", "return max({v})"),
    Family("list", ("smallest", "least"), "Return the smallest item of {v}.", "return min({v})"),
    Family("list", ("sort", "ordered"), "Sort {v}.", "return sorted({v})"),
    Family("list", ("length", "size"), "Count the items of {v}.", "return len({v})"),
    Family("list", ("reverse", "backwards"), "Reverse {v}.", "return {v}[::-1]"),
    Family(
        "list",
        ("weighted", "sum_times"),
        "Multiply each item of {v} by {k} and return the sum.",
        "total = 0\n    for i in {v}:\n        total += i * {k}\n    return total",
    ),
    Family("text", ("repeat", "many"), "Repeat {v} {k} times.", "return {v} * {k}", 9),
    Family("text", ("starts", "begins"), 'Check if {v} starts with "{p}".', 'return {v}.startswith("{p}")'),
    Family("text", ("ends", "closes"), 'Check if {v} ends with "{p}".', 'return {v}.endswith("{p}")'),
    Family("text", ("contains", "has"), 'Check if {v} contains "{p}".', 'return "{p}" in {v}'),
    Family("text", ("replace", "swap"), 'Replace "{p}" by "{q}" in {v}.', 'return {v}.replace("{p}", "{q}")'),
    Family("text", ("upper", "shout"), "Return {v} in upper case.", "return {v}.upper()"),
    Family("text", ("reverse", "backwards"), "Reverse {v}.", "return {v}[::-1]"),
    Family("text", ("extend", "append"), 'Add "{p}" to the end of {v}.', 'return {v} + "{p}"'),
    Family("pair", ("add", "plus"), "Add a and b.", "return a + b"),
    Family("pair", ("subtract", "minus"), "Subtract b from a.", "return a - b"),
    Family("pair", ("multiply", "product"), "Multiply a and b.", "return a * b"),
    Family("pair", ("largest", "larger"), "Return the larger of a and b.", "return max(a, b)"),
    Family("pair", ("smallest", "smaller"), "Return the smaller of a and b.", "return min(a, b)"),
)


def _arguments(rng: random.Random, kind: str, k: int, p: str, q: str) -> tuple[Any, ...]:
    if kind == "number":
        return (rng.choice((k, k + 1, k - 1, 2 * k, rng.randint(0, 60))),)
    if kind == "list":
        return ([rng.choice((k, rng.randint(0, 60), rng.randint(0, 9))) for _ in range(rng.randint(1, 6))],)
    if kind == "pair":
        return rng.randint(0, 30), rng.randint(0, 30)
    return (rng.choice((p, q, p + q, q + p, q + p + q, p + p)),)


def _tests(rng: random.Random, kind: str, name: str, code: str, k: int, p: str, q: str) -> str:
    """Assertions that the reference passes; their values come from running it."""
    space: dict[str, Any] = {}
    exec(code, space)  # our own text, made a few lines above
    lines = []
    for _ in range(6):
        arguments = _arguments(rng, kind, k, p, q)
        call = ", ".join(map(repr, arguments))
        lines.append(f"assert {name}({call}) == {space[name](*arguments)!r}")
    return "\n".join(lines)


def make(rng: random.Random) -> Chat:
    """Complete a function whose head and docstring are given, or write one from its description."""
    family = rng.choice(FAMILIES)
    k = rng.randint(2, family.most)
    p, q = rng.sample((*ANIMALS, *COLOURS, *THINGS[:40]), 2)
    variable = {"number": NUMBER_NAMES, "list": LIST_NAMES, "text": TEXT_NAMES, "pair": ("a, b",)}[family.kind]
    v = rng.choice(variable)
    name = rng.choice((*family.names, "f", "solve")).format(k=k)
    what = family.what.format(v=v, k=k, p=p, q=q)
    head = f"def {name}({v}):"
    code = f"{head}\n    {family.body.format(v=v, k=k, p=p, q=q)}"
    reference = code_tests(_tests(rng, family.kind, name, code, k, p, q))
    if rng.random() < 0.6:
        lead = rng.choice(("Complete this function:", "Complete the code:", "Complete the following Python function."))
        ask, kind = f'{lead}\n{head}\n    """{what}"""', "complete"
    else:
        lead = rng.choice(("Write a Python function {}.", "Write the function {}.", "Write a function {} in Python."))
        ask, kind = f"{lead.format(head[4:-1])} {what}", "write"
    return Chat(DOMAIN, (Turn(ask, f"```python\n{code}\n```", reference),), kind)
