"""Small instructions with one right answer: sort, reverse, count, pick out, repeat, change case."""

from __future__ import annotations

import random

from models.generator.base import Chat, Turn
from models.generator.words import NAMES, THINGS

DOMAIN = "instructions"


def _listing(words: list[str]) -> str:
    return ", ".join(words)


def _sort_numbers(rng: random.Random) -> Turn:
    numbers = rng.sample(range(1, 30), rng.randint(3, 4))
    ask = rng.choice(("Sort these numbers: {}", "Sort: {}", "Put these numbers in order: {}"))
    answer = ", ".join(map(str, sorted(numbers)))
    return Turn(ask.format(", ".join(map(str, numbers))), answer, (answer,))


def _sort_words(rng: random.Random) -> Turn:
    words = rng.sample(THINGS, 3)
    ask = rng.choice(("Sort these words: {}", "Sort alphabetically: {}", "Put these words in alphabetical order: {}"))
    answer = _listing(sorted(words))
    return Turn(ask.format(_listing(words)), answer, (answer,))


def _reverse(rng: random.Random) -> Turn:
    words = rng.sample(THINGS, rng.randint(3, 4))
    ask = rng.choice(("Reverse this list: {}", "Write these words in reverse order: {}", "Reverse: {}"))
    answer = _listing(words[::-1])
    return Turn(ask.format(_listing(words)), answer, (answer,))


def _count(rng: random.Random) -> Turn:
    words = rng.sample(THINGS, rng.randint(2, 6))
    ask = rng.choice(("Count these words: {}", "How many words are in this list: {}", "How many words: {}"))
    return Turn(ask.format(_listing(words)), f"There are {len(words)} words.", (str(len(words)),))


def _pick(rng: random.Random) -> Turn:
    words = rng.sample(THINGS, rng.randint(3, 5))
    which, word = rng.choice((("first", words[0]), ("last", words[-1]), ("second", words[1])))
    ask = rng.choice(
        (
            f"What is the {which} word: {{}}",
            f"Give me the {which} word of this list: {{}}",
            f"Which word is {which}? {{}}",
        )
    )
    return Turn(ask.format(_listing(words)), word, (word,))


def _repeat(rng: random.Random) -> Turn:
    text = " ".join(rng.sample(THINGS, rng.randint(1, 4)))
    ask = rng.choice(("Say: {}", "Repeat after me: {}", "Repeat: {}", "Say this: {}"))
    return Turn(ask.format(text), text, (text,))


def _extract(rng: random.Random) -> Turn:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    sentence = rng.choice(
        (
            f"Yesterday {name} bought a {thing} in town.",
            f"{name} has a new {thing}.",
            f"There is a {thing} in the house of {name}.",
            f"The {thing} belongs to {name}.",
        )
    )
    if rng.random() < 0.5:
        ask = rng.choice(("Find the name in this sentence: {}", "Extract the name: {}"))
        return Turn(ask.format(sentence), name, (name,))
    ask = rng.choice(("Find the thing in this sentence: {}", "Extract the thing: {}"))
    return Turn(ask.format(sentence), thing, (thing,))


TASKS = {
    "sort-numbers": _sort_numbers,
    "sort-words": _sort_words,
    "reverse": _reverse,
    "count": _count,
    "pick": _pick,
    "repeat": _repeat,
    "extract": _extract,
}


def make(rng: random.Random) -> Chat:
    """One instruction; sometimes a second one of another kind."""
    kinds = rng.sample(sorted(TASKS), 2)
    turns = [TASKS[kinds[0]](rng)]
    if rng.random() < 0.2:
        turns.append(TASKS[kinds[1]](rng))
    return Chat(DOMAIN, tuple(turns), kinds[0])


def score(chat: Chat, index: int, answer: str) -> bool:
    """Right only when the answer is exactly the expected text (for counts: contains the number)."""
    turn = chat.turns[index]
    if turn.assistant != turn.expect[0]:
        return turn.expect[0] in answer.split()
    return answer.strip().rstrip(".") == turn.expect[0]
