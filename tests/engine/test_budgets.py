"""What a session says about an expert budget, and its keys in JSON records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.engine.context_choice import unmet_budget, usable_budget
from moeedge.engine.session import Session
from moeedge.engine.types import GenerationStats
from moeedge.errors import InputError
from moeedge.llama.model import Model
from moeedge.llama.model_info import ModelInfo
from moeedge.native.abi import BUDGET_LAYER
from moeedge.policies.expert_budget import ExpertBudget, budget_record
from moeedge.run import is_warning
from moeedge.scheduler.stats import StepRecord
from tests.support.hybrid import greedy_answer, hybrid_config


@pytest.fixture
def info(model: Model) -> ModelInfo:
    """16 experts, 4 per token."""
    return model.info


@pytest.mark.parametrize(
    ("budget", "gamma", "draft", "note"),
    [
        (8, 4, "d.gguf", None),
        (16, 4, "d.gguf", "changes nothing"),
        (99, 4, "ngram", "changes nothing"),
        (8, 1, "d.gguf", "2 tokens select at most 8 experts"),
        (8, 0, "d.gguf", "the draft length is 0"),
        (8, 0, "none", "there is no draft"),
    ],
)
def test_a_budget_without_effect_is_a_note(
    info: ModelInfo, budget: int, gamma: int, draft: str, note: str | None
) -> None:
    asked = ExpertBudget(budget=budget)
    usable, notes = usable_budget(asked, info, gamma=gamma, draft=draft)
    assert usable is asked
    assert [note in said and is_warning(said) for said in notes] == ([] if note is None else [True])


def test_models_that_a_budget_does_not_suit(info: ModelInfo) -> None:
    usable, notes = usable_budget(ExpertBudget(budget=8), replace(info, n_experts=0), gamma=4, draft="ngram")
    assert usable is None and len(notes) == 1  # a dense model has none
    with pytest.raises(InputError):  # below the experts per token
        usable_budget(ExpertBudget(budget=3), info, gamma=4, draft="ngram")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "no effect"),
        ({"kept_probability": 0.9, "substituted_layers": 1}, "not truncated"),
        ({"kept_probability": 0.9}, None),
        ({"n_drafted": 0, "n_verified": 1}, None),
        ({"n_drafted": 0, "n_verified": 4}, None),  # of four texts
        ({"n_verified": 0, "n_drafted": 0}, None),
    ],
)
def test_what_a_verification_did_not_keep_to_is_a_note(changes: dict[str, Any], said: str | None) -> None:
    note = unmet_budget(StepRecord(**({"tokens": [], "n_drafted": 8, "n_verified": 9} | changes)))
    assert bool(note) == (said is not None) and (said or "") in note


@pytest.mark.parametrize("batches", [0, 1])
def test_a_session_says_once_what_it_does_not_keep_to(
    batches: int, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """batches 0: no layer's router is recognised; 1: all are, but not the weights of their experts."""
    layers = np.zeros(4, dtype=BUDGET_LAYER)
    layers["batches"] = layers["substituted"] = batches
    budget = ExpertBudget(budget=5, coverage="truncation")
    with Session.open(replace(hybrid_config(*pair, 0.0), expert_budget=budget)) as session:
        monkeypatch.setattr(session.target.budget, "read", lambda: layers)
        n_before, said = len(session.info.notes), []
        session.run.show = said.append
        for _ in range(2):
            greedy_answer(session, [1, 2, 3], 12)
        assert len(said) == 1 and session.info.notes[n_before:] == said
        session.set_expert_budget(None)
        assert session.target.sequences[0].tokens == []  # what a verification under a budget left is not exact
        session.info.notes.clear()
        greedy_answer(session, [1, 2, 3], 12)
        assert not session.info.notes


def test_records_have_the_same_keys_with_and_without_a_budget() -> None:
    budget = ExpertBudget(budget=5, coverage="truncation")
    record, idle = (budget_record(budget, gamma=gamma) for gamma in (4, 0))
    assert (record["lossy"], record["expert_budget"]) == (True, 5)
    assert str(record["budget"]).endswith("(lossy)")
    assert (record["budget_policy"], record["budget_ranking"]) == ("truncation", "picks")
    assert idle == record | {"lossy": False, "budget": str(record["budget"]).replace("lossy", "idle")}
    assert budget_record(None, gamma=4) == dict.fromkeys(record) | {"lossy": False}


def test_sums_over_the_steps_under_a_budget() -> None:
    stats = GenerationStats()
    stats.add_step(StepRecord(tokens=[1], experts_unique=4.0), decode_s=0.1, sense_s=0)  # no draft: no limit
    assert (stats.experts_natural, stats.kept_probability) == (None, None)
    for natural, largest, kept in ((12.0, 8, 0.9), (10.0, 7, 0.7)):
        limited = {"experts_natural": natural, "experts_max": largest, "kept_probability": kept}
        stats.add_step(StepRecord(tokens=[1], experts_unique=7.0, **limited), decode_s=0.1, sense_s=0)
    assert (stats.experts_natural, stats.experts_max) == (pytest.approx(26 / 3), 8)
    assert stats.experts_per_verification == 6.0
    assert stats.kept_probability == pytest.approx(0.8)
