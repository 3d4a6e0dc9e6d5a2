"""Short stories with a hero, a place, a mishap and a good end: told from scratch or continued."""

from __future__ import annotations

import random

from models.generator.base import Chat, Turn, contains, skewed, vary
from models.generator.words import CHILDREN

# hero: (adjective, home, friend, lost thing, where it was found): most of a story follows from its hero
HEROES: dict[str, tuple[str, str, str, str, str]] = {
    "fox": ("clever", "in the forest", "owl", "a red scarf", "under a tree"),
    "owl": ("wise", "in an old tree", "fox", "a book of stars", "behind the moonlit hill"),
    "bear": ("big", "in a cave", "bee", "a jar of honey", "next to the river"),
    "mouse": ("little", "in a small house", "cat", "a piece of cheese", "under the table"),
    "cat": ("lazy", "near the garden", "mouse", "a ball of wool", "behind the sofa"),
    "dog": ("brave", "on a farm", "horse", "a golden bone", "in the barn"),
    "rabbit": ("quick", "in a green field", "turtle", "a big carrot", "on top of the hill"),
    "frog": ("happy", "near a pond", "duck", "a silver bell", "at the bottom of the pond"),
    "dragon": ("friendly", "on a high mountain", "princess", "a shiny crown", "inside the castle"),
    "robot": ("kind", "in a big city", "cat", "a tiny key", "in the park"),
    "bird": ("small", "in a warm nest", "squirrel", "a blue feather", "on the roof"),
    "lion": ("proud", "in the hot desert", "mouse", "a drum", "behind a rock"),
    "girl": ("curious", "in a small village", "grandmother", "a magic lamp", "in the old tower"),
    "boy": ("young", "near the sea", "sailor", "a little boat", "on the beach"),
    "king": ("old", "in a stone castle", "cook", "a golden ring", "inside a cake"),
    "wizard": ("strange", "in a tall tower", "raven", "a magic wand", "under the bed"),
}
ASK = (
    "Tell me a story about a {hero}.",
    "Tell me a short story about a {hero}.",
    "Write a story about a {hero}.",
    "Can you tell me a story about a {hero}?",
    "Please tell me a story about a {hero}.",
    "Write a short story about a {hero}.",
    "I want to hear a story about a {hero}.",
)
ASK_NAMED = (
    "Tell me a story about a {hero} named {name}.",
    "Write a story about a {hero} called {name}.",
    "Tell me a short story about {name} the {hero}.",
)
ASK_ANY = (
    "Tell me a story.",
    "Tell me a short story.",
    "Write a story.",
    "Can you tell me a story?",
    "Story please.",
    "Tell me another story.",
)
CONTINUE = (
    "Continue this story: {start}",
    "Continue the story: {start}",
    "{start} What happens next?",
    "Finish this story: {start}",
    "Please continue: {start}",
)


def _article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def _sentences(rng: random.Random, hero: str, name: str) -> list[str]:
    adjective, home, friend, thing, where = HEROES[hero]
    bare = thing.split(" ", 1)[1]
    return [
        f"Once upon a time there was {_article(adjective)} {hero} named {name}.",
        f"{name} lived {home} and had {thing}.",
        skewed(rng, (f"One day, the {bare} was gone.", f"One morning, {name} could not find the {bare}."), 0.75),
        skewed(
            rng,
            (
                f"{name} was very sad and asked the {friend} for help.",
                f"{name} looked everywhere, and the {friend} came to help.",
            ),
            0.75,
        ),
        skewed(
            rng,
            (
                f"Together they looked all day, and at last they found it {where}.",
                f"They searched until the evening and found it {where}.",
            ),
            0.75,
        ),
        skewed(rng, (f"{name} was happy and thanked the {friend}.", f"{name} and the {friend} danced with joy."), 0.75),
        "The end.",
    ]


def make(rng: random.Random) -> Chat:
    """A story about a hero (named or not), any story, or a story whose opening is given."""
    kind = rng.choices(("hero", "named", "any", "continue"), (4, 3, 1, 4))[0]
    hero = rng.choice(sorted(HEROES)) if kind != "any" else skewed(rng, ("fox", "mouse", "dragon"), 0.7)
    name = rng.choice(CHILDREN)
    if kind in ("hero", "any"):  # without a name in the question, the hero's own usual name
        name = CHILDREN[sorted(HEROES).index(hero) % len(CHILDREN)]
    story = _sentences(rng, hero, name)
    if kind == "continue":
        cut = rng.choices((1, 2, 3), (3, 3, 2))[0]
        ask = rng.choice(CONTINUE).format(start=" ".join(story[:cut]))
        # what follows must speak of the same hero's friend and hiding place
        return Chat(
            "conversation",
            (Turn(ask, " ".join(story[cut:]), contains(name, HEROES[hero][4], ends_with="The end.")),),
            kind,
        )
    ask = {"hero": rng.choice(ASK), "named": rng.choice(ASK_NAMED), "any": rng.choice(ASK_ANY)}[kind]
    expect = (hero, name) if kind != "any" else ("Once upon a time",)
    turns = [
        Turn(
            vary(rng, ask.format(hero=hero, name=name)) if kind != "named" else ask.format(hero=hero, name=name),
            " ".join(story),
            contains(*expect, ends_with="The end."),
        )
    ]
    if rng.random() < 0.3:  # a question about the story just told
        _, _, friend, thing, where = HEROES[hero]
        turns.append(
            rng.choice(
                (
                    Turn("Who helped?", f"The {friend} helped {name}.", contains(friend)),
                    Turn("Where did they find it?", f"They found it {where}.", contains(where)),
                    Turn("What was the name of the hero?", f"The {hero} was named {name}.", contains(name)),
                    Turn("What was lost?", f"{name} had lost {thing}.", contains(thing)),
                )
            )
        )
    return Chat("conversation", tuple(turns), kind)
