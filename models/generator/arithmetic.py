"""One-step sums and differences, asked in several ways, and one-sentence word problems."""

from __future__ import annotations

import random
import re

from models.generator.base import Chat, Turn
from models.generator.words import CHILDREN, ITEMS

DOMAIN = "arithmetic"
LARGEST = 20  # operands of a sum lie in 0..LARGEST

PLUS = (
    "What is {a} + {b}?",
    "{a}+{b}=",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "How much is {a} + {b}?",
    "Please add {a} and {b}.",
    "What's {a}+{b}?",
    "Calculate {a} + {b}.",
    "{a} plus {b}",
    "What is the sum of {a} and {b}?",
    "Can you add {a} and {b}?",
)
MINUS = (
    "What is {a} - {b}?",
    "{a}-{b}=",
    "{a} - {b} = ?",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
    "What's {a}-{b}?",
    "Calculate {a} - {b}.",
    "{a} - {b}",
    "Take {b} away from {a}.",
)


def _operands(rng: random.Random) -> tuple[int, int]:
    return rng.randint(0, LARGEST), rng.randint(0, LARGEST)


def _plain(rng: random.Random) -> Turn:
    a, b = _operands(rng)
    if rng.random() < 0.6:
        return Turn(rng.choice(PLUS).format(a=a, b=b), f"{a} + {b} = {a + b}", (str(a + b),))
    a, b = max(a, b), min(a, b)
    return Turn(rng.choice(MINUS).format(a=a, b=b), f"{a} - {b} = {a - b}", (str(a - b),))


def _follow_up(rng: random.Random, value: int) -> Turn:
    b = rng.randint(0, 10)
    if value >= b and rng.random() < 0.4:
        ask = rng.choice(("Now subtract {b}.", "Take away {b}.", "And minus {b}?"))
        return Turn(ask.format(b=b), f"{value} - {b} = {value - b}", (str(value - b),))
    ask = rng.choice(("Now add {b}.", "Add {b} to that.", "And plus {b}?"))
    return Turn(ask.format(b=b), f"{value} + {b} = {value + b}", (str(value + b),))


def _story_sum(rng: random.Random) -> Turn:
    a, b = _operands(rng)
    name, item = rng.choice(CHILDREN), rng.choice(ITEMS)
    if rng.random() < 0.6:
        deed = rng.choice(("gets {b} more", "finds {b} more", "buys {b} more"))
        op, value = "+", a + b
    else:
        a, b = max(a, b), min(a, b)
        deed = rng.choice(("gives away {b}", "loses {b}", "sells {b}"))
        op, value = "-", a - b
    ask = f"{name} has {a} {item} and {deed.format(b=b)}. How many {item} does {name} have now?"
    return Turn(ask, f"{a} {op} {b} = {value}. {name} has {value} {item}.", (str(value),))


def make(rng: random.Random) -> Chat:
    """One to three sums; a second one may build on the result of the first."""
    kind = rng.choices(("sum", "word-problem", "chain"), (6, 2, 2))[0]
    if kind == "word-problem":
        turns = [_story_sum(rng)]
    elif kind == "chain":
        first = _plain(rng)
        turns = [first, _follow_up(rng, int(first.expect[0]))]
    else:
        turns = [_plain(rng) for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0])]
    return Chat(DOMAIN, tuple(turns), kind)


def score(chat: Chat, index: int, answer: str) -> bool:
    """Right when the last number of the answer is the result."""
    numbers = re.findall(r"-?\d+", answer)
    return bool(numbers) and numbers[-1] == chat.turns[index].expect[0]
