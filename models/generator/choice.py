"""Multiple choice over the facts of the small world, answered by a letter and the option's text."""

from __future__ import annotations

import random

from models.generator.base import Chat, Turn
from models.generator.world import everyday

DOMAIN = "choice"
LETTERS = "ABCD"


def make(rng: random.Random) -> Chat:
    """One question with four options in lines."""
    ask, _, short, others = everyday(rng)
    wrong = sorted(set(others) - {short})
    options = rng.sample(wrong, min(3, len(wrong)))
    options.insert(rng.randint(0, len(options)), short)
    lines = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, options, strict=False))
    tail = rng.choice(("", "\nAnswer with the letter.", "\nWhich is right?"))
    letter = LETTERS[options.index(short)]
    return Chat(DOMAIN, (Turn(f"{ask}\n{lines}{tail}", f"{letter}) {short}", (letter,)),), "choice")


def score(chat: Chat, index: int, answer: str) -> bool:
    """Right when the answer starts with the right letter."""
    return answer.strip()[:1] == chat.turns[index].expect[0]
