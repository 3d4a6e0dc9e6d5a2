"""Question answering: facts of the small world known by heart, and facts told in a passage."""

from __future__ import annotations

import random

from models.generator.base import Chat, Turn, contains, vary
from models.generator.facts import Fact, fact
from models.generator.words import ANIMALS, CITIES, COLOURS, FOODS, JOBS, NAMES, SPORTS, THINGS

DOMAIN = "questions"

# what a passage says of a person: sentence, questions, full answer, possible values
RELATIONS = (
    ("{n} lives in {v}.", ("Where does {n} live?", "Which city does {n} live in?"), "{n} lives in {v}.", CITIES),
    ("{n} is a {v}.", ("What is the job of {n}?", "What does {n} do?"), "{n} is a {v}.", JOBS),
    ("{n} likes {v}.", ("What does {n} like?", "Which food does {n} like?"), "{n} likes {v}.", FOODS),
    ("{n} has a {v}.", ("What does {n} have?", "Which thing does {n} have?"), "{n} has a {v}.", THINGS),
    ("{n} plays {v}.", ("What does {n} play?", "Which sport does {n} play?"), "{n} plays {v}.", SPORTS[:2]),
    (
        "{n} owns a {v} car.",
        ("Which colour is the car of {n}?", "What car does {n} own?"),
        "{n} owns a {v} car.",
        COLOURS,
    ),
    ("{n} keeps a {v}.", ("Which animal does {n} keep?", "What does {n} keep?"), "{n} keeps a {v}.", ANIMALS),
)


def passage(rng: random.Random) -> tuple[str, list[Fact]]:
    """Three to six told facts about two to four people, and how to ask for them."""
    people = rng.sample(NAMES, rng.randint(2, 4))
    told: dict[tuple[str, str], Fact] = {}
    sentences = []
    for i in range(rng.randint(3, 6)):
        name = people[i % len(people)]
        sentence, asks, answer, values = rng.choice(RELATIONS)
        if (name, sentence) in told or sum(asks[0] in f.asks for f in told.values()) > 2:
            continue
        value = rng.choice(values)
        sentences.append(sentence.format(n=name, v=value))
        told[name, sentence] = Fact(
            tuple(ask.format(n=name) for ask in asks), answer.format(n=name, v=value), value, tuple(values)
        )
    return " ".join(sentences), list(told.values())


def by_name(rng: random.Random, told: list[Fact]) -> Turn:
    """The question the other way round: who is it that lives, likes, has ..."""
    one = rng.choice(told)
    name, rest = one.answer.rstrip(".").split(" ", 1)
    return Turn(f"Who {rest}?", one.answer, contains(name))


def make(rng: random.Random) -> Chat:
    """Facts known by heart, or a passage with one to four questions about it."""
    if rng.random() < 0.35:
        turns = []
        for _ in range(rng.choices((1, 2), (3, 1))[0]):
            one = fact(rng)
            turns.append(Turn(vary(rng, rng.choice(one.asks)), one.answer, contains(one.short)))
        return Chat(DOMAIN, tuple(turns), "fact")
    text, told = passage(rng)
    unique = [f for f in told if sum(f.answer.split(" ", 1)[1] == g.answer.split(" ", 1)[1] for g in told) == 1]
    if unique and rng.random() < 0.15:
        turns = [by_name(rng, unique)]
    else:
        chosen = rng.sample(told, min(len(told), rng.choices((1, 2, 3, 4), (3, 2, 1, 1))[0]))
        turns = [Turn(rng.choice(f.asks), f.answer, contains(f.short)) for f in chosen]
    turns[0] = Turn(f"{text} {turns[0].user}", turns[0].assistant, turns[0].reference)
    return Chat(DOMAIN, tuple(turns), "passage")
