"""Generated reports of a day, summarised in one sentence."""

from __future__ import annotations

import random

from models.generator.base import Chat, Turn, contains_all
from models.generator.words import CITIES, DAYS, NAMES

DOMAIN = "summaries"

EVENTS = (
    ("opened a new shop", "The shop sells {x}.", "Many people came to see it."),
    ("won the big race", "The prize was a box of {x}.", "The crowd was very loud."),
    ("lost a bag", "There were {x} in the bag.", "The police are looking for it."),
    ("built a bridge", "It was paid for with {x}.", "The work took two years."),
    ("found an old map", "It was hidden under some {x}.", "A museum wants to buy it."),
    ("wrote a book", "The book is about {x}.", "It has three hundred pages."),
    ("gave a concert", "The tickets were free for people with {x}.", "The music was beautiful."),
    ("planted a garden", "There will be {x} next year.", "Children helped with the work."),
)
GOODS = ["flowers", "books", "shoes", "apples", "coins", "toys", "hats", "lamps"]
WEATHER = ("The weather was fine.", "It rained all day.", "It was very cold.", "The sun was shining.")
ASK = (
    "Summarise this report: {}",
    "Summarize this text: {}",
    "Give a short summary: {}",
    "{}\nSummarise in one sentence.",
)


def make(rng: random.Random) -> Chat:
    """A report of four or five sentences; the summary says who did what, where and when."""
    name, city, day = rng.choice(NAMES), rng.choice(CITIES), rng.choice(DAYS)
    deed, detail, outcome = rng.choice(EVENTS)
    rest = [detail.format(x=rng.choice(GOODS)), outcome, rng.choice(WEATHER)]
    rng.shuffle(rest)
    report = " ".join([f"On {day}, {name} {deed} in {city}.", *rest[: rng.randint(2, 3)]])
    turn = Turn(rng.choice(ASK).format(report), f"{name} {deed} in {city} on {day}.", (name, deed, city))
    return Chat(DOMAIN, (turn,), "report")


def score(chat: Chat, index: int, answer: str) -> bool:
    """Right when person, deed and place are kept and the answer is one sentence."""
    return contains_all(answer, chat.turns[index].expect) and len(answer) < 120
