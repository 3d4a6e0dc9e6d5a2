"""Grade-school arithmetic: sums in figures and in words, word problems of one to three worked steps."""

from __future__ import annotations

import random
from collections.abc import Callable

from models.generator.base import Chat, Turn, number, vary
from models.generator.words import CHILDREN, ITEMS

DOMAIN = "arithmetic"
LARGEST = 50  # operands of a sum or difference are in 0..LARGEST
LARGEST_FACTOR = 10

SYMBOL_ASKS = (
    "What is {e}?",
    "{e} =",
    "{e} = ?",
    "How much is {e}?",
    "What's {e}?",
    "Calculate {e}.",
    "{e}",
    "Please calculate {e}.",
    "Solve {e}.",
)
WORD_ASKS = {
    "+": (
        "Add {a} and {b}.",
        "What is {a} plus {b}?",
        "{a} plus {b}",
        "What is the sum of {a} and {b}?",
        "Can you add {a} and {b}?",
    ),
    "-": ("Subtract {b} from {a}.", "What is {a} minus {b}?", "{a} minus {b}", "Take {b} away from {a}."),
    "*": (
        "Multiply {a} by {b}.",
        "What is {a} times {b}?",
        "{a} times {b}",
        "What is the product of {a} and {b}?",
    ),
    "/": ("Divide {a} by {b}.", "What is {a} divided by {b}?", "{a} divided by {b}"),
}
APPLY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


def operands(rng: random.Random, op: str) -> tuple[int, int]:
    """Two numbers whose result is an integer and not negative."""
    if op in "*/":
        a, b = rng.randint(1, LARGEST_FACTOR), rng.randint(1, LARGEST_FACTOR)
        return (a, b) if op == "*" else (a * b, b)
    top = LARGEST if rng.random() < 0.7 else 20
    a, b = rng.randint(0, top), rng.randint(0, top)
    return (a, b) if op == "+" else (max(a, b), min(a, b))


def _step(a: int, op: str, b: int) -> tuple[str, int]:
    value = APPLY[op](a, b)
    return f"{a} {op} {b} = {value}", value


def _plain(rng: random.Random) -> Turn:
    op = rng.choices("+-*/", (5, 4, 3, 1))[0]
    a, b = operands(rng, op)
    if rng.random() < 0.55:
        sign = rng.choice(("*", "*", "x")) if op == "*" else op
        space = rng.choice((" ", " ", ""))
        ask = rng.choice(SYMBOL_ASKS).format(e=f"{a}{space}{sign}{space}{b}")
    else:
        ask = rng.choice(WORD_ASKS[op]).format(a=a, b=b)
    step, value = _step(a, op, b)
    return Turn(vary(rng, ask), step, number(value))


def _three_terms(rng: random.Random) -> Turn:
    a, b, c = (rng.randint(1, 30) for _ in range(3))
    first, value = _step(a, "+", b)
    op = "-" if value >= c and rng.random() < 0.4 else "+"
    second, total = _step(value, op, c)
    ask = rng.choice(SYMBOL_ASKS).format(e=f"{a} + {b} {op} {c}")
    return Turn(ask, f"{first}. {second}. The answer is {total}.", number(total))


def _follow_up(rng: random.Random, value: int) -> Turn:
    b = rng.randint(0, 10)
    op = "-" if value >= b and rng.random() < 0.4 else "+"
    asks = {
        "-": ("Now subtract {b}.", "Take away {b}.", "And minus {b}?"),
        "+": ("Now add {b}.", "Add {b} to that.", "And plus {b}?"),
    }
    step, result = _step(value, op, b)
    return Turn(rng.choice(asks[op]).format(b=b), step, number(result))


def _problem(rng: random.Random) -> Turn:
    """A story with numbers; every step of the answer is one operation, the last sentence names the result."""
    who, other = rng.sample(CHILDREN, 2)
    item = rng.choice(ITEMS)
    a, b, c = rng.randint(2, 30), rng.randint(2, 9), rng.randint(2, 9)
    kind = rng.randrange(9)
    steps: list[tuple[int, str, int]]
    if kind == 0:
        verb = rng.choice(("gets", "finds", "buys"))
        text = f"{who} has {a} {item} and {verb} {b * c} more. How many {item} does {who} have now?"
        steps = [(a, "+", b * c)]
    elif kind == 1:
        a += c
        verb = rng.choice(("gives away", "loses", "sells"))
        text = f"{who} has {a} {item} and {verb} {c}. How many {item} does {who} have now?"
        steps = [(a, "-", c)]
    elif kind == 2:
        text = (
            f"{who} has {a} {item}. {other} gives {who} {b} bags with {c} {item} each. How many {item} does {who} have?"
        )
        steps = [(b, "*", c), (b * c, "+", a)]
    elif kind == 3:
        text = f"{who} has {b} boxes with {c} {item} each and loses {min(b, c)} {item}. How many {item} are left?"
        steps = [(b, "*", c), (b * c, "-", min(b, c))]
    elif kind == 4:
        text = f"{who} has {a} {item}. {other} has {b} more than {who}. How many {item} do they have together?"
        steps = [(a, "+", b), (a, "+", a + b)]
    elif kind == 5:
        text = f"{who} buys {b} {item} for {c} dollars each and pays with {b * c + a} dollars. How much is left?"
        steps = [(b, "*", c), (b * c + a, "-", b * c)]
    elif kind == 6:
        half = b * c
        first = rng.randint(0, half)
        text = (
            f"{who} has {first} {item} and {other} has {half - first}. They share them among {b} friends. "
            f"How many {item} does each friend get?"
        )
        steps = [(first, "+", half - first), (half, "/", b)]
    elif kind == 7:
        text = f"{who} reads {b} pages a day for {c} days and then {a} pages more. How many pages is that?"
        steps = [(b, "*", c), (b * c, "+", a)]
    else:
        d = rng.randint(2, 9)
        text = (
            f"{who} buys {b} {item} for {c} dollars each and a bag for {d} dollars. "
            f"{who} has {b * c + d + a} dollars. How much is left?"
        )
        steps = [(b, "*", c), (b * c, "+", d), (b * c + d + a, "-", b * c + d)]
    worked, value = [], 0
    for left, op, right in steps:
        line, value = _step(left, op, right)
        worked.append(f"{line}.")
    return Turn(text, f"{' '.join(worked)} The answer is {value}.", number(value))


def make(rng: random.Random) -> Chat:
    """Sums, a sum that builds on the one before, or a word problem."""
    kind = rng.choices(("sum", "three-terms", "chain", "word-problem"), (5, 1, 1, 4))[0]
    if kind == "word-problem":
        turns = [_problem(rng) for _ in range(rng.choices((1, 2), (4, 1))[0])]
    elif kind == "three-terms":
        turns = [_three_terms(rng)]
    elif kind == "chain":
        first = _plain(rng)
        turns = [first, _follow_up(rng, int(first.reference.expect[0]))]
    else:
        turns = [_plain(rng) for _ in range(rng.choices((1, 2, 3), (5, 3, 2))[0])]
    return Chat(DOMAIN, tuple(turns), kind)
