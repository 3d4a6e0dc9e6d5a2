"""Conversation: small talk and memory of what was said, short stories, and open questions that are beyond the model."""

from __future__ import annotations

import random

from models.generator import open, stories, talk
from models.generator.base import Chat

DOMAIN = "conversation"


def make(rng: random.Random) -> Chat:
    """A chat of one of the three sorts."""
    sort = rng.choices((talk, stories, open), (5, 2, 3))[0]
    return sort.make(rng)


make_long = open.make_long
