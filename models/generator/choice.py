"""Multiple choice over the facts of the world, over passages and over sums.

The answer is worked: what is right, then the options one by one up to that one, then its letter. Small models look for
what follows a word that they know long before they look for what stands before it.
"""

from __future__ import annotations

import random

from models.generator.arithmetic import APPLY, operands
from models.generator.base import Chat, Turn, letter
from models.generator.facts import fact
from models.generator.questions import passage

DOMAIN = "choice"
LETTERS = "ABCDEFGHIJ"
STYLES = ("{}) {}", "({}) {}", "{}. {}")


def _sum(rng: random.Random) -> tuple[str, str, list[str]]:
    op = rng.choice("+-*")
    a, b = operands(rng, op)
    value = APPLY[op](a, b)
    return (
        f"What is {a} {op} {b}?",
        str(value),
        [str(value + d) for d in (-10, -3, -2, -1, 1, 2, 3, 10) if value + d >= 0],
    )


def make(rng: random.Random) -> Chat:
    """One question with three to six options in lines."""
    source = rng.choices(("fact", "passage", "sum"), (5, 3, 2))[0]
    if source == "fact":
        known = fact(rng)
        ask, short, others = rng.choice(known.asks), known.short, list(known.others)
    elif source == "passage":
        text, asked = passage(rng)
        one = rng.choice(asked)
        ask, short, others = f"{text} {rng.choice(one.asks)}", one.short, list(one.others)
    else:
        ask, short, others = _sum(rng)
    wrong = sorted(set(others) - {short})
    options = rng.sample(wrong, min(rng.choices((2, 3, 4, 5), (2, 6, 1, 1))[0], len(wrong)))
    options.insert(rng.randint(0, len(options)), short)
    style = rng.choice(STYLES)
    lines = [style.format(mark, text) for mark, text in zip(LETTERS, options, strict=False)]
    tail = rng.choice(("", "", "\nAnswer with the letter.", "\nWhich is right?"))
    n_read = options.index(short) + 1
    right = LETTERS[n_read - 1]
    listing = "\n".join(lines)
    worked = "\n".join((f"It is {short}.", *lines[:n_read], f"The answer is ({right})."))
    turn = Turn(f"{ask}\n{listing}{tail}", worked, letter(right))
    return Chat(DOMAIN, (turn,), source)
