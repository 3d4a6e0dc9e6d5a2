"""The small world: everyday facts and an invented continent, each fact with several ways to ask for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from models.generator.words import CITIES, COLOURS, DAYS, FOODS

CAPITALS = {
    "France": "Paris",
    "England": "London",
    "Italy": "Rome",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Greece": "Athens",
}
COLOUR_OF = {
    "grass": "green",
    "the sky": "blue",
    "snow": "white",
    "the sun": "yellow",
    "a banana": "yellow",
    "blood": "red",
    "coal": "black",
    "milk": "white",
    "a carrot": "orange",
    "a tomato": "red",
    "chocolate": "brown",
}
SOUND_OF = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "duck": "quacks",
    "lion": "roars",
    "sheep": "bleats",
    "bird": "sings",
    "wolf": "howls",
    "mouse": "squeaks",
    "frog": "croaks",
}
OPPOSITES = {
    "big": "small",
    "hot": "cold",
    "up": "down",
    "day": "night",
    "happy": "sad",
    "fast": "slow",
    "old": "young",
    "open": "closed",
    "left": "right",
    "good": "bad",
    "light": "dark",
    "long": "short",
    "rich": "poor",
}
LEGS = {"dog": "4", "cat": "4", "spider": "8", "bird": "2", "horse": "4", "ant": "6", "snake": "0", "duck": "2"}

# The invented continent Aldara.
LANDS = ("Borland", "Celdia", "Dornia", "Felmark", "Gandor", "Hestia", "Kalmar", "Lorien", "Mordun", "Navaria")
TOWNS = ("Borheim", "Celvar", "Dorn", "Felport", "Ganda", "Hestun", "Kalten", "Lorby", "Mordal", "Navren")
RIVERS = ("Silva", "Runa", "Elva", "Tamsel", "Mira", "Olba", "Sarn", "Wend", "Torl", "Isna")
RULERS = ("Arno", "Bela", "Cyra", "Dagmar", "Edda", "Falk", "Gerda", "Hilde", "Ingmar", "Jorun")


@dataclass(frozen=True)
class Fact:
    """One fact: ways to ask for it, the full answer, the short one, and wrong answers of the same sort."""

    asks: tuple[str, ...]
    answer: str
    short: str
    others: tuple[str, ...]


def _table(
    pairs: dict[str, str], asks: Sequence[str], answer: str, others: Sequence[str] | None = None
) -> tuple[Fact, ...]:
    """One fact per entry; {k} stands for the key, {K} for the key as the start of a sentence, {v} for the value."""
    wrong = tuple(others if others is not None else sorted(set(pairs.values())))
    facts = []
    for key, value in pairs.items():
        words = {"k": key, "K": key[0].upper() + key[1:], "v": value, "V": value[0].upper() + value[1:]}
        facts.append(Fact(tuple(ask.format(**words) for ask in asks), answer.format(**words), value, wrong))
    return tuple(facts)


@cache
def topics() -> dict[str, tuple[Fact, ...]]:
    """All facts by topic."""

    def aldara(values: Sequence[str]) -> dict[str, str]:
        return dict(zip(LANDS, values, strict=True))

    return {
        "capital": _table(
            CAPITALS,
            ("What is the capital of {k}?", "Which city is the capital of {k}?", "Name the capital of {k}."),
            "The capital of {k} is {v}.",
            CITIES,
        ),
        "colour": _table(
            COLOUR_OF,
            ("What colour is {k}?", "What color is {k}?", "Which colour does {k} have?"),
            "{K} is {v}.",
            COLOURS,
        ),
        "sound": _table(
            SOUND_OF, ("What does a {k} do?", "Which sound does a {k} make?", "How does a {k} sound?"), "A {k} {v}."
        ),
        "opposite": _table(
            OPPOSITES,
            ("What is the opposite of {k}?", "Which word is the opposite of {k}?", "Name the opposite of {k}."),
            "The opposite of {k} is {v}.",
        ),
        "legs": _table(LEGS, ("How many legs does a {k} have?", "How many legs has a {k}?"), "A {k} has {v} legs."),
        "day": _table(
            dict(zip(DAYS, DAYS[1:] + DAYS[:1], strict=True)),
            ("Which day comes after {k}?", "What day follows {k}?", "Which day is after {k}?"),
            "{V} comes after {k}.",
        ),
        "town": _table(
            aldara(TOWNS),
            ("What is the chief town of {k}?", "Which town is the chief town of {k}?", "Name the chief town of {k}."),
            "The chief town of {k} is {v}.",
        ),
        "river": _table(
            aldara(RIVERS),
            ("Which river flows through {k}?", "What is the river of {k}?", "Name the river of {k}."),
            "The river {v} flows through {k}.",
        ),
        "ruler": _table(
            aldara(RULERS),
            ("Who rules {k}?", "Who is the ruler of {k}?", "Name the ruler of {k}."),
            "{v} rules {k}.",
        ),
        "food": _table(
            aldara(FOODS[: len(LANDS)]),
            ("What do people eat in {k}?", "What is the food of {k}?", "Which food do they like in {k}?"),
            "In {k} people eat {v}.",
        ),
        "flag": _table(
            aldara(COLOURS[: len(LANDS)]),
            ("What colour is the flag of {k}?", "Which colour has the flag of {k}?", "What color is the flag of {k}?"),
            "The flag of {k} is {v}.",
        ),
    }


def fact(rng: random.Random) -> Fact:
    """One fact; topics with more facts come more often."""
    every = topics()
    names = list(every)
    return rng.choice(every[rng.choices(names, [len(every[name]) for name in names])[0]])
