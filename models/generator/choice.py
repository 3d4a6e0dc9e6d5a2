"""Multiple choice over the facts of the world, over passages and over sums.

The answer is worked: the options again, each before its letter, then what is right and its letter. Small models learn
early to look for what followed a word, and late or never to look for what stood before it.
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
        chosen = rng.choice(asked)
        ask, short, others = f"{text} {rng.choice(chosen.asks)}", chosen.short, list(chosen.others)
    else:
        ask, short, others = _sum(rng)
    wrong = sorted(set(others) - {short})
    options = rng.sample(wrong, min(rng.choices((2, 3, 4, 5), (2, 6, 1, 1))[0], len(wrong)))
    options.insert(rng.randint(0, len(options)), short)
    style = rng.choice(STYLES)
    listing = "\n".join(style.format(mark, text) for mark, text in zip(LETTERS, options, strict=False))
    tail = rng.choice(("", "", "\nAnswer with the letter.", "\nWhich is right?"))
    right = LETTERS[options.index(short)]
    worked = ", ".join(f"{text} {mark}" for mark, text in zip(LETTERS, options, strict=False))
    turn = Turn(f"{ask}\n{listing}{tail}", f"Options: {worked}. It is {short} {right}.", letter(right))
    return Chat(DOMAIN, (turn,), source)
