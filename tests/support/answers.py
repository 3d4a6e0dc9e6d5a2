"""Answers that must be equal, and the set-up of rows that no run made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from moeedge.bench.quality import check_answers, logits_in
from moeedge.bench.records import Setup
from moeedge.bench.samples import Sample
from moeedge.engine.session import Session


def assert_equal_answers(session: Session, prompt: Sequence[int], expected: list[int], tokens: list[int]) -> None:
    """Equal token by token; a difference would have to be a near-tie of the session's target."""
    base, own = (Sample("", "", 0, 0, 0, tokens=each, prompt_ids=list(prompt)) for each in (expected, tokens))
    check = check_answers([own], [base], logits_in(session.target), session.model.eog_tokens)
    assert check.passed, check


def setup_of(**known: Any) -> Setup:
    """A row's set-up of which only these are known."""
    return Setup(**dict.fromkeys((field.name for field in fields(Setup)), None) | {"device": ""} | known)
