"""Generated reports of news, of meetings and of matches, each summarised in one or two sentences."""

from __future__ import annotations

import random

from models.generator.base import Chat, Turn, contains
from models.generator.words import ANIMALS, CITIES, COLOURS, DAYS, ITEMS, JOBS, NAMES, SPORTS

DOMAIN = "summaries"
LONGEST_CHARS = 170  # a right summary is shorter

EVENTS = (
    ("opened a new shop", "The shop sells {x}.", "Many people came to see it."),
    ("won the big race", "The prize was a box of {x}.", "The crowd was very loud."),
    ("lost a bag", "There were {x} in the bag.", "The police are looking for it."),
    ("built a bridge", "It was paid for with {x}.", "The work took two years."),
    ("found an old map", "It was hidden under some {x}.", "A museum wants to buy it."),
    ("wrote a book", "The book is about {x}.", "It has three hundred pages."),
    ("gave a concert", "The tickets were free for people with {x}.", "The music was beautiful."),
    ("planted a garden", "There will be {x} next year.", "Children helped with the work."),
    ("saved a child", "It had gone out to look for {x}.", "The mayor said thank you."),
    ("started a school", "Pupils learn to count with {x}.", "It has room for forty children."),
)
GOODS = ["flowers", "books", "shoes", "apples", "coins", "toys", "hats", "lamps"]
WEATHER = ("The weather was fine.", "It rained all day.", "It was very cold.", "The sun was shining.", "It was windy.")
EXTRAS = (
    "Somebody brought a {a}.",
    "A {j} told us about it.",
    "The streets were full of people.",
    "There were {c} flags on every house.",
    "Nobody was hurt.",
    "The shops closed early.",
    "A {a} slept through it all.",
)
ASK = (
    "Summarise this report: {}",
    "Summarize this text: {}",
    "Give a short summary: {}",
    "{}\nSummarise in one sentence.",
    "Summarise: {}",
    "{}\nWhat is this report about?",
)


def _fillers(rng: random.Random, n: int) -> list[str]:
    texts = rng.sample(EXTRAS, min(n, len(EXTRAS)))
    return [t.format(a=rng.choice(ANIMALS), j=rng.choice(JOBS), c=rng.choice(COLOURS)) for t in texts]


def _news(rng: random.Random) -> tuple[str, str, tuple[str, ...]]:
    name, city, day = rng.choice(NAMES), rng.choice(CITIES), rng.choice(DAYS)
    deed, detail, outcome = rng.choice(EVENTS)
    rest = [detail.format(x=rng.choice(GOODS)), outcome, rng.choice(WEATHER), *_fillers(rng, rng.randint(0, 3))]
    rng.shuffle(rest)
    report = " ".join([f"On {day}, {name} {deed} in {city}.", *rest])
    return report, f"{name} {deed} in {city} on {day}.", (name, deed, city, day)


def _meeting(rng: random.Random) -> tuple[str, str, tuple[str, ...]]:
    first, second = rng.sample(NAMES, 2)
    n, item, day = rng.randint(2, 90), rng.choice(ITEMS), rng.choice(DAYS)
    rest = [
        f"{second} was against it at first.",
        f"The {rng.choice(JOBS)} took notes.",
        rng.choice(("There was coffee and cake.", "The room was cold.", "The meeting took two hours.")),
        *_fillers(rng, rng.randint(0, 2)),
    ]
    rng.shuffle(rest)
    report = " ".join(
        [f"{first} and {second} met on {day}.", *rest, f"In the end they agreed to buy {n} {item} for the school."]
    )
    return report, f"{first} and {second} agreed to buy {n} {item}.", (first, second, f"{n} {item}")


def _match(rng: random.Random) -> tuple[str, str, tuple[str, ...]]:
    home, guest = rng.sample(CITIES, 2)
    sport, n = rng.choice(SPORTS[:2]), rng.randint(1, 9)
    goals = rng.randint(0, n - 1)
    hero = rng.choice(NAMES)
    rest = [rng.choice(WEATHER), f"{hero} was the best player.", *_fillers(rng, rng.randint(1, 3))]
    rng.shuffle(rest)
    report = " ".join([f"{home} played {sport} against {guest}.", *rest, f"It ended {n} to {goals} for {home}."])
    return report, f"{home} won against {guest}, {n} to {goals}.", (home, guest, f"{n} to {goals}")


def make(rng: random.Random) -> Chat:
    """A report of four to eight sentences; the summary keeps who did what, where and when."""
    kind, tell = rng.choice((("news", _news), ("meeting", _meeting), ("match", _match)))
    report, summary, facts = tell(rng)
    turn = Turn(rng.choice(ASK).format(report), summary, contains(*facts, max_chars=LONGEST_CHARS))
    return Chat(DOMAIN, (turn,), kind)
