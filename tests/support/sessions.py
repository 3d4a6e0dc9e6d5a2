"""Answers of sessions at their end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeedge.engine.answer import Generation
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig

GREEDY = SamplingConfig(temperature=0)


def plain_config(model: Path, draft: Any = None, **changes: Any) -> EngineConfig:
    """A session on one thread of the CPU."""
    fields = {"gamma": 4 if draft else 0, "n_ctx": 512, "n_threads": 1, "device": "none"}
    return EngineConfig(model=model, draft=draft, **fields | changes)


def answered(session: Session, prompt: Sequence[int], n_predict: int = -1, **options: Any) -> Generation:
    """The answer, at its end; greedy and not stopped by tokens that end one, unless the options say otherwise."""
    generation = session.generate(prompt, n_predict=n_predict, **{"sampling": GREEDY, "ignore_eos": True} | options)
    for _ in generation:
        pass
    return generation
