"""Small Python functions, to be completed or written from a description."""

from __future__ import annotations

import random
import re

from models.generator.base import Chat, Turn, vary

DOMAIN = "code"

# (function name, arguments, description, body)
FUNCTIONS = (
    ("add", "a, b", "adds two numbers", "return a + b"),
    ("subtract", "a, b", "subtracts b from a", "return a - b"),
    ("multiply", "a, b", "multiplies two numbers", "return a * b"),
    ("divide", "a, b", "divides a by b", "return a / b"),
    ("square", "x", "squares a number", "return x * x"),
    ("double", "x", "doubles a number", "return x * 2"),
    ("is_even", "n", "checks if a number is even", "return n % 2 == 0"),
    ("is_odd", "n", "checks if a number is odd", "return n % 2 == 1"),
    ("largest", "items", "returns the largest item of a list", "return max(items)"),
    ("smallest", "items", "returns the smallest item of a list", "return min(items)"),
    ("first", "items", "returns the first item of a list", "return items[0]"),
    ("last", "items", "returns the last item of a list", "return items[-1]"),
    ("total", "items", "returns the sum of a list", "return sum(items)"),
    ("count", "items", "counts the items of a list", "return len(items)"),
    ("reverse", "text", "reverses a string", "return text[::-1]"),
    ("upper", "text", "turns a string into upper case", "return text.upper()"),
    ("greet", "name", "greets a person", 'return "Hello, " + name'),
    ("sort", "items", "sorts a list", "return sorted(items)"),
    ("average", "items", "returns the average of a list", "return sum(items) / len(items)"),
    ("is_empty", "items", "checks if a list is empty", "return len(items) == 0"),
)


def make(rng: random.Random) -> Chat:
    """Write a function from its description, or complete one whose head is given."""
    name, args, what, body = rng.choice(FUNCTIONS)
    other = rng.choice((name, name, "f", "my_" + name, "do_" + name))
    head = f"def {other}({args}):"
    code = f"{head}\n    {body}"
    if rng.random() < 0.5:
        ask = rng.choice(
            (
                "Write a Python function that {}.",
                "Write a function {n} that {}.",
                "Python: a function that {}",
                "Please write a function that {}.",
            )
        )
        if "{n}" not in ask:
            code = f"def {name}({args}):\n    {body}"
        ask = vary(rng, ask.format(what, n=other)) if "{n}" not in ask else ask.format(what, n=other)
        return Chat(DOMAIN, (Turn(ask, f"```python\n{code}\n```", (body,)),), "write")
    ask = rng.choice(
        (
            f"Complete this function:\n{head}\n    # {what}",
            f'Complete the code:\n{head}\n    """{what}"""',
            f"Complete the following Python function.\n{head}\n    # {what}",
        )
    )
    return Chat(DOMAIN, (Turn(ask, f"```python\n{code}\n```", (body,)),), "complete")


def score(chat: Chat, index: int, answer: str) -> bool:
    """Right when the expected statement is in the answer, spaces aside, under some `def`."""
    squeeze = re.sub(r"\s+", "", answer)
    return "def" in squeeze and re.sub(r"\s+", "", chat.turns[index].expect[0]) in squeeze
