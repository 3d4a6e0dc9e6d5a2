"""An expert budget as it is asked for. tests/lab/policies/test_expert_budget.py tests what it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeedge.errors import InputError
from moeedge.policies.expert_budget import ExpertBudget


@pytest.mark.parametrize(
    "arguments",
    [
        {"budget": 0},
        {"budget": -1},
        {"budget": 4, "ranking": "best"},
        {"budget": 4, "ranking": "static"},
        {"budget": 4, "coverage": "none"},
    ],
)
def test_unusable_budgets_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ExpertBudget(**arguments)


def test_budget_of_each_layer() -> None:
    layers = np.array([1, 2])
    assert ExpertBudget(budget=16).per_layer(layers, 3, 64, 8).tolist() == [0, 16, 16]
    for large in (99, 1 << 31, 1 << 80):
        assert ExpertBudget(budget=large).per_layer(layers, 3, 64, 8).tolist() == [0, 64, 64]
    assert ExpertBudget(budget=8).per_layer(layers, 3, 64, [0, 6, 8]).tolist() == [0, 8, 8]
    for used in (8, [0, 6, 8]):
        with pytest.raises(InputError):
            ExpertBudget(budget=7).per_layer(layers, 3, 64, used)


@pytest.mark.parametrize(
    ("budget", "label"),
    [
        (ExpertBudget(budget=16), "budget 16 (lossy)"),
        (ExpertBudget(budget=16, coverage="truncation"), "budget 16 truncation (lossy)"),
        (ExpertBudget(budget=8, ranking="router"), "budget 8 router (lossy)"),
    ],
)
def test_labels_name_the_choices(budget: ExpertBudget, label: str) -> None:
    assert budget.label == label
