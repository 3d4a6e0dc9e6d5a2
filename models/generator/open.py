"""Questions beyond a toy model, short and long: it says so, shortly, and ends."""

from __future__ import annotations

import random
import string

from models.generator.base import Chat, Turn, contains, skewed
from models.generator.words import NAMES, OPEN_FILLER, OPEN_NOUNS, OPEN_VERBS, THINGS

ANSWERS = (
    "I am a small model and do not know much about that. You can ask me for a sum, a short story or a simple fact.",
    "I am a small model and do not know much about that. Use -m to load a real model.",
)
STARTS = (
    "What is {n}?",
    "Explain {n}.",
    "Tell me about {n}.",
    "How does {n} work?",
    "Why is {n} important?",
    "Write an essay about {n}.",
    "What are the causes of {n}?",
    "Describe {n} in detail.",
    "Who invented {n}?",
    "What do you think about {n}?",
    "Write a blog post about {n}.",
    "Give me three tips for {n}.",
    "Compare {n} and {m}.",
    "What is the difference between {n} and {m}?",
    "How can I learn {n}?",
    "Write a poem about {n}.",
    "List five facts about {n}.",
    "Explain {n} to a child.",
)


def _rare_word(rng: random.Random) -> str:
    """A word that never was: the model must live with spellings that it has not met."""
    letters = [rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))]
    word = "".join(letters) + rng.choice(("", "", "n", "r", "s", "ing", "tion", "ed", "ly"))
    return word.capitalize() if rng.random() < 0.2 else word


def _word(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.62:
        return rng.choice(OPEN_FILLER)
    if roll < 0.70:
        return rng.choice(THINGS)
    if roll < 0.76:
        return rng.choice(OPEN_NOUNS)
    if roll < 0.80:
        return rng.choice(NAMES)
    if roll < 0.83:
        return str(rng.randint(0, 10 ** rng.randint(1, 5)))
    if roll < 0.98:
        return _rare_word(rng)
    return "".join(rng.choice(string.printable[:94]) for _ in range(rng.randint(1, 8)))


def _sentence(rng: random.Random) -> str:
    words = [_word(rng) for _ in range(rng.randint(4, 16))]
    words[0] = words[0].capitalize()
    if rng.random() < 0.3:
        words[rng.randrange(len(words) - 1)] += ","
    return " ".join(words) + rng.choice((".", ".", ".", "?", ":", "!"))


def _long_question(rng: random.Random, n_sentences: int) -> str:
    parts = [_sentence(rng) for _ in range(n_sentences)]
    verb = rng.choice(OPEN_VERBS)
    parts.insert(
        rng.choice((0, len(parts))),
        f"{verb.capitalize()} {rng.choice(('the', 'a', 'this', 'your'))} {_sentence(rng).lower()}",
    )
    return rng.choice((" ", " ", "\n", "\n\n")).join(parts)


def make(rng: random.Random) -> Chat:
    """A short open question, or a long one of random words; sometimes a second turn of the same."""
    kind = rng.choices(("topic", "sentence", "long"), (4, 4, 2))[0]
    turns = []
    for _ in range(rng.choices((1, 2), (4, 1))[0]):
        if kind == "topic":
            noun = rng.choice((rng.choice(OPEN_NOUNS), rng.choice(OPEN_NOUNS), _rare_word(rng)))
            ask = rng.choice(STARTS).format(n=noun, m=rng.choice(OPEN_NOUNS))
        else:
            ask = _long_question(rng, rng.randint(0, 1) if kind == "sentence" else rng.randint(2, 8))
        turns.append(Turn(ask, skewed(rng, ANSWERS, 0.85), contains("small model")))
    return Chat("conversation", tuple(turns), kind)


def make_long(rng: random.Random) -> Chat:
    """A question of up to about 1,500 tokens, far longer than all others."""
    ask = _long_question(rng, rng.randint(12, 60))
    return Chat("conversation", (Turn(ask, skewed(rng, ANSWERS, 0.85), contains("small model")),), "very long")
