"""From scores to transfers: which experts, in which order, under hysteresis, thresholds and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moeedge.experts import FloatArray, Resident
from moeedge.policies.base import CacheShape, Plan, PolicyConfig
from moeedge.policies.planner import PooledPolicy
from tests.support.plans import check_plan

CAP = 4


class Scored(PooledPolicy):
    """Utilities equal to scores."""

    def planned(self, scores: FloatArray, resident: Resident, margin: float = 0.0, **options: object) -> Plan:
        self._score, self._utility = scores, np.minimum(scores, CAP)
        self.lowest = self._fit(resident, margin)
        return self._moves(resident, **options)


def plan(score: list[list[float]], resident: list[list[int]], n_slots: int, **options: object) -> Plan:
    """The plan for one group of `n_slots`, utilities equal to scores, tau = 1."""
    scores, there = np.array(score, dtype=np.float32), np.array(resident, dtype=np.uint8)
    shape = CacheShape.uniform(*scores.shape, n_slots)
    policy = Scored(shape, PolicyConfig(cap=CAP), evict=bool(options.pop("evict", True)))
    policy._tau[:] = options.pop("tau", 1.0)
    made = policy.planned(scores, there, float(options.pop("margin", 0.0)), **options)
    check_plan(made, shape, there, CAP)
    return made


def test_uploads_go_by_priority_then_layer() -> None:
    made = plan([[1.2, 4.9, 0.0], [3.5, 1.0, 2.0], [4.0, 0.5, 3.1]], [[0] * 3] * 3, 6)
    assert made.uploads.tolist() == [[0, 1], [2, 0], [1, 0], [2, 2], [1, 2], [0, 0]]
    assert made.priority.tolist() == [4, 4, 3, 3, 2, 1]
    assert not len(made.victims)


@pytest.mark.parametrize(
    ("score", "resident", "n_slots", "options", "uploads", "victims"),
    [
        ([[3.0, 2.0, 1.0, 0.5, 2.5]], [[0, 0, 1, 1, 1]], 3, {}, [[0, 0], [0, 1]], [[0, 3], [0, 2]]),  # the lowest leave
        # a margin keeps experts that are nearly as good
        ([[2.0, 1.9, 1.0, 3.0]], [[0, 1, 1, 0]], 2, {}, [[0, 3], [0, 0]], None),
        ([[2.0, 1.9, 1.0, 3.0]], [[0, 1, 1, 0]], 2, {"margin": 0.5}, [[0, 3]], None),
        ([[2.0, 1.9, 1.0, 3.0]], [[0, 1, 1, 0]], 2, {"margin": 2.5}, [], None),
        ([[3.0, 2.0, 1.0]], [[0, 0, 0]], 3, {"tau": 2.0}, [[0, 0], [0, 1]], []),  # a threshold holds uploads back
        ([[0.3, 0.0, 0.1]], [[0, 0, 0]], 3, {}, [[0, 0], [0, 2]], []),  # at tau 1 all are hot that have a score
        # a limit takes the best
        ([[1.0, 3.0], [2.0, 2.5]], [[0, 0], [0, 0]], 4, {"max_uploads": 2}, [[0, 1], [1, 1]], []),
        ([[1.0, 3.0]], [[0, 0]], 2, {"max_uploads": 0}, [], []),
        # only allowed experts are uploaded
        ([[1.0, 3.0, 2.0]], [[0, 0, 0]], 2, {"allowed": np.array([[True, False, True]])}, [[0, 2]], []),
        # without eviction only free slots are filled
        ([[3.0, 2.0, 1.0, 0.5]], [[0, 0, 0, 1]], 3, {"evict": False}, [[0, 0], [0, 1]], []),
        ([[3.0, 1.0]], [[0, 1]], 1, {"evict": False}, [], None),
    ],
)
def test_which_experts_move(
    score: list[list[float]],
    resident: list[list[int]],
    n_slots: int,
    options: dict[str, Any],
    uploads: list[list[int]],
    victims: list[list[int]] | None,
) -> None:
    """victims None: any."""
    made = plan(score, resident, n_slots, **options)
    assert made.uploads.tolist() == uploads
    assert victims is None or made.victims.tolist() == victims
    utilities = [score[layer][expert] for layer, expert in made.victims.tolist()]
    assert made.victim_utility.tolist() == pytest.approx(utilities)


def test_equal_scores_fill_no_more_than_the_slots() -> None:
    assert len(plan([[1.0] * 6], [[0] * 6], 4).uploads) == 4
    made = plan([[2.0, 2.0, 1.0, 1.0]], [[0, 0, 1, 1]], 2)
    assert (len(made.uploads), len(made.victims)) == (2, 2)
    tied = plan([[2.0, 1.0, 1.0, 1.0]], [[0, 1, 1, 0]], 2)  # one of the equal ones has to go
    assert (tied.uploads.tolist(), len(tied.victims)) == ([[0, 0]], 1)


def test_groups_do_not_share_slots() -> None:
    shape = CacheShape(4, 2, np.array([1, 0, -1, 1], dtype=np.int32), np.array([1, 2], dtype=np.int32))
    scores = np.array([[4, 3], [2, 1], [9, 9], [1, 3.5]], dtype=np.float32)
    resident = np.zeros((4, 2), dtype=np.uint8)
    policy = Scored(shape, PolicyConfig(cap=CAP))
    made = policy.planned(scores, resident)
    assert policy.lowest == [2.0, 3.5]
    check_plan(made, shape, resident, CAP)
    assert made.uploads.tolist() == [[0, 0], [3, 1], [1, 0]]


@pytest.mark.parametrize(
    ("uploads", "change"),
    [
        ([[0, 2], [0, 3], [1, 2], [1, 3]], {"utility": np.full((2, 4), CAP + 1, dtype=np.float32)}),
        ([[0, 2], [0, 3], [1, 2], [1, 3]], {"tau": np.ones(2)}),  # float64
        ([[0, 2], [0, 1], [1, 2], [1, 3]], {}),  # is resident
        ([[1, 2], [1, 3], [0, 2], [0, 3]], {"priority": np.full(4, 3, dtype=np.uint8)}),  # layers out of order
        ([[0, 2], [0, 3], [1, 2], [1, 3]], {"victim_utility": np.array([1.0, 0.8, 0.7, 0.5], dtype=np.float32)}),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(uploads: list[list[int]], change: dict[str, Any]) -> None:
    """The check that these tests rely on."""
    resident = [[1, 1, 0, 0], [1, 1, 0, 0]]
    made = plan([[0.5, 1.0, 4.0, 4.0], [0.7, 0.8, 3.0, 3.0]], resident, 4)
    assert made.uploads.tolist() == [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert made.victims.tolist() == [[0, 0], [1, 0], [1, 1], [0, 1]]
    wrong = replace(made, **{"uploads": np.array(uploads, dtype=np.int32)} | change)
    with pytest.raises(ValueError, match=r"^[a-z]"):  # says which rule
        check_plan(wrong, CacheShape.uniform(2, 4, 4), np.array(resident, dtype=np.uint8), CAP)
