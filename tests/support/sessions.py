"""Answers of sessions at their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeedge.engine.answer import Generation
from moeedge.engine.session import Session
from moeedge.engine.types import SamplingConfig

GREEDY = SamplingConfig(temperature=0)


def answered(session: Session, prompt: Sequence[int], n_predict: int = -1, **options: Any) -> Generation:
    """The answer, at its end; greedy and not stopped by tokens that end one, unless the options say otherwise."""
    generation = session.generate(prompt, n_predict=n_predict, **{"sampling": GREEDY, "ignore_eos": True} | options)
    for _ in generation:
        pass
    return generation
