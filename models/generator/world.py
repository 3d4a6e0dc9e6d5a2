"""Question answering over a small world: everyday facts, an invented continent, and facts given in the question."""

from __future__ import annotations

import random

from models.generator.base import Chat, Turn, contains_all, vary
from models.generator.words import CITIES, COLOURS, DAYS, FOODS, JOBS, NAMES, THINGS

DOMAIN = "world"

# (question subject, relation) -> answer; plain facts that a small model can keep
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
LEGS = {"dog": 4, "cat": 4, "spider": 8, "bird": 2, "horse": 4, "ant": 6, "snake": 0, "duck": 2}

# the invented continent Aldara: land -> (chief town, river, food, colour of its flag)
ALDARA = {
    "Borland": ("Borheim", "Silva", "bread", "red"),
    "Celdia": ("Celvar", "Runa", "soup", "blue"),
    "Dornia": ("Dorn", "Elva", "cheese", "green"),
    "Felmark": ("Felport", "Tamsel", "rice", "white"),
    "Gandor": ("Ganda", "Mira", "pasta", "black"),
    "Hestia": ("Hestun", "Olba", "cake", "yellow"),
    "Kalmar": ("Kalten", "Sarn", "salad", "orange"),
    "Lorien": ("Lorby", "Wend", "curry", "purple"),
}


def everyday(rng: random.Random) -> tuple[str, str, str, list[str]]:
    """One fact as (question, full answer, short answer, other answers of the same sort)."""
    topic = rng.choices(("capital", "colour", "sound", "opposite", "legs", "day", "aldara"), (4, 3, 2, 2, 1, 2, 4))[0]
    if topic == "capital":
        land = rng.choice(sorted(CAPITALS))
        town = CAPITALS[land]
        return f"What is the capital of {land}?", f"The capital of {land} is {town}.", town, CITIES
    if topic == "colour":
        thing = rng.choice(sorted(COLOUR_OF))
        subject = thing[0].upper() + thing[1:]
        return f"What colour is {thing}?", f"{subject} is {COLOUR_OF[thing]}.", COLOUR_OF[thing], COLOURS
    if topic == "sound":
        animal = rng.choice(sorted(SOUND_OF))
        sound = SOUND_OF[animal]
        return f"What does a {animal} do?", f"A {animal} {sound}.", sound, sorted(SOUND_OF.values())
    if topic == "opposite":
        word = rng.choice(sorted(OPPOSITES))
        return (
            f"What is the opposite of {word}?",
            f"The opposite of {word} is {OPPOSITES[word]}.",
            OPPOSITES[word],
            sorted(OPPOSITES.values()),
        )
    if topic == "legs":
        animal = rng.choice(sorted(LEGS))
        return (
            f"How many legs does a {animal} have?",
            f"A {animal} has {LEGS[animal]} legs.",
            str(LEGS[animal]),
            ["2", "4", "6", "8", "0"],
        )
    if topic == "day":
        i = rng.randrange(7)
        day, after = DAYS[i], DAYS[(i + 1) % 7]
        return f"Which day comes after {day}?", f"{after} comes after {day}.", after, DAYS
    land = rng.choice(sorted(ALDARA))
    town, river, food, colour = ALDARA[land]
    return rng.choice(
        (
            (
                f"What is the chief town of {land}?",
                f"The chief town of {land} is {town}.",
                town,
                [v[0] for v in ALDARA.values()],
            ),
            (
                f"Which river flows through {land}?",
                f"The river {river} flows through {land}.",
                river,
                [v[1] for v in ALDARA.values()],
            ),
            (f"What do people eat in {land}?", f"In {land} people eat {food}.", food, [v[2] for v in ALDARA.values()]),
            (
                f"What colour is the flag of {land}?",
                f"The flag of {land} is {colour}.",
                colour,
                [v[3] for v in ALDARA.values()],
            ),
        )
    )


def given_facts(rng: random.Random) -> tuple[str, list[tuple[str, str, str]]]:
    """A passage of invented facts, and (question, full answer, short answer) about it."""
    facts: list[tuple[str, str, str, str]] = []
    for name in rng.sample(NAMES, rng.randint(2, 4)):
        city, job, food, thing = rng.choice(CITIES), rng.choice(JOBS), rng.choice(FOODS), rng.choice(THINGS)
        facts.append(
            rng.choice(
                (
                    (f"{name} lives in {city}.", f"Where does {name} live?", f"{name} lives in {city}.", city),
                    (f"{name} is a {job}.", f"What is the job of {name}?", f"{name} is a {job}.", job),
                    (f"{name} likes {food}.", f"What does {name} like?", f"{name} likes {food}.", food),
                    (f"{name} has a {thing}.", f"What does {name} have?", f"{name} has a {thing}.", thing),
                )
            )
        )
    return " ".join(f[0] for f in facts), [f[1:] for f in facts]


def make(rng: random.Random) -> Chat:
    """Facts known by heart, or a passage with one or two questions about it."""
    if rng.random() < 0.5:
        turns = []
        for _ in range(rng.choices((1, 2), (3, 1))[0]):
            ask, answer, short, _ = everyday(rng)
            turns.append(Turn(vary(rng, ask), answer, (short,)))
        return Chat(DOMAIN, tuple(turns), "fact")
    passage, asks = given_facts(rng)
    chosen = rng.sample(asks, min(len(asks), rng.choices((1, 2), (2, 1))[0]))
    turns = [Turn(q, a, (s,)) for q, a, s in chosen]
    turns[0] = Turn(f"{passage} {turns[0].user}", turns[0].assistant, turns[0].expect)
    return Chat(DOMAIN, tuple(turns), "passage")


def score(chat: Chat, index: int, answer: str) -> bool:
    """Right when the short answer occurs."""
    return contains_all(answer, chat.turns[index].expect)
