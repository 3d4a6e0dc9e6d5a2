"""Question answering: facts of the small world known by heart, and facts given in a passage."""

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
    """Three to six facts about two to four people in a passage, and how to ask for them."""
    people = rng.sample(NAMES, rng.randint(2, 4))
    stated: dict[tuple[str, str], Fact] = {}
    sentences = []
    for i in range(rng.randint(3, 6)):
        name = people[i % len(people)]
        sentence, asks, answer, values = rng.choice(RELATIONS)
        if (name, sentence) in stated or sum(asks[0] in f.asks for f in stated.values()) > 2:
            continue
        value = rng.choice(values)
        sentences.append(sentence.format(n=name, v=value))
        stated[name, sentence] = Fact(
            tuple(ask.format(n=name) for ask in asks), answer.format(n=name, v=value), value, tuple(values)
        )
    return " ".join(sentences), list(stated.values())


def by_name(rng: random.Random, stated: list[Fact]) -> Turn:
    """The question the other way round: who is it that lives, likes, has ..."""
    chosen = rng.choice(stated)
    name, rest = chosen.answer.rstrip(".").split(" ", 1)
    return Turn(f"Who {rest}?", chosen.answer, contains(name))


def make(rng: random.Random) -> Chat:
    """Facts known by heart, or a passage with one to four questions about it."""
    if rng.random() < 0.35:
        turns = []
        for _ in range(rng.choices((1, 2), (3, 1))[0]):
            known = fact(rng)
            turns.append(Turn(vary(rng, rng.choice(known.asks)), known.answer, contains(known.short)))
        return Chat(DOMAIN, tuple(turns), "fact")
    text, stated = passage(rng)
    unique = [f for f in stated if sum(f.answer.split(" ", 1)[1] == g.answer.split(" ", 1)[1] for g in stated) == 1]
    if unique and rng.random() < 0.15:
        turns = [by_name(rng, unique)]
    else:
        chosen = rng.sample(stated, min(len(stated), rng.choices((1, 2, 3, 4), (3, 2, 1, 1))[0]))
        turns = [Turn(rng.choice(f.asks), f.answer, contains(f.short)) for f in chosen]
    turns[0] = Turn(f"{text} {turns[0].user}", turns[0].assistant, turns[0].reference)
    return Chat(DOMAIN, tuple(turns), "passage")
