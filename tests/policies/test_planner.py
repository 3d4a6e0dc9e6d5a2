"""From scores to transfers: which experts, in which order, under hysteresis, thresholds and limits."""

from __future__ import annotations

import numpy as np

from moeedge.policies.base import CacheShape, Plan, check_plan
from moeedge.policies.planner import PooledPlanner

CAP = 4


def plan(score: list[list[float]], resident: list[list[int]], n_slots: int, **options: object) -> Plan:
    """The plan for one group of `n_slots`, utilities equal to scores, tau = 1."""
    scores, there = np.array(score, dtype=np.float32), np.array(resident, dtype=np.uint8)
    shape = CacheShape.uniform(*scores.shape, n_slots)
    planner = PooledPlanner(shape, CAP, evict=bool(options.pop("evict", True)))
    planner.fit(scores, there, float(options.pop("margin", 0.0)))
    tau = np.full(len(scores), options.pop("tau", 1.0), dtype=np.float32)
    made = planner.moves(scores, np.minimum(scores, CAP), tau, there, **options)
    check_plan(made, shape, there, CAP)
    return made


def test_uploads_go_by_priority_then_layer() -> None:
    made = plan([[1.2, 4.9, 0.0], [3.5, 1.0, 2.0], [4.0, 0.5, 3.1]], [[0] * 3] * 3, 6)
    assert made.uploads.tolist() == [[0, 1], [2, 0], [1, 0], [2, 2], [1, 2], [0, 0]]
    assert made.priority.tolist() == [4, 4, 3, 3, 2, 1]
    assert not len(made.victims)


def test_victims_are_the_lowest_and_no_better_than_the_uploads() -> None:
    made = plan([[3.0, 2.0, 1.0, 0.5, 2.5]], [[0, 0, 1, 1, 1]], 3)
    assert made.uploads.tolist() == [[0, 0], [0, 1]]
    assert made.victims.tolist() == [[0, 3], [0, 2]]
    assert made.victim_utility.tolist() == [0.5, 1.0]


def test_a_margin_keeps_experts_that_are_nearly_as_good() -> None:
    scores, resident = [[2.0, 1.9, 1.0, 3.0]], [[0, 1, 1, 0]]
    assert plan(scores, resident, 2).uploads.tolist() == [[0, 3], [0, 0]]
    assert plan(scores, resident, 2, margin=0.5).uploads.tolist() == [[0, 3]]
    assert not len(plan(scores, resident, 2, margin=2.5).uploads)


def test_a_threshold_above_one_holds_uploads_back() -> None:
    made = plan([[3.0, 2.0, 1.0]], [[0, 0, 0]], 3, tau=2.0)
    assert made.uploads.tolist() == [[0, 0], [0, 1]]


def test_at_tau_one_every_expert_that_fits_is_hot() -> None:
    made = plan([[0.3, 0.0, 0.1]], [[0, 0, 0]], 3)
    assert made.uploads.tolist() == [[0, 0], [0, 2]]  # but not an expert without a score
    assert made.priority.tolist() == [1, 1]


def test_a_limit_takes_the_best() -> None:
    made = plan([[1.0, 3.0], [2.0, 2.5]], [[0, 0], [0, 0]], 4, max_uploads=2)
    assert made.uploads.tolist() == [[0, 1], [1, 1]]
    assert not len(plan([[1.0, 3.0]], [[0, 0]], 2, max_uploads=0).uploads)


def test_only_allowed_experts_are_uploaded() -> None:
    allowed = np.array([[True, False, True]])
    assert plan([[1.0, 3.0, 2.0]], [[0, 0, 0]], 2, allowed=allowed).uploads.tolist() == [[0, 2]]


def test_without_eviction_only_free_slots_are_filled() -> None:
    made = plan([[3.0, 2.0, 1.0, 0.5]], [[0, 0, 0, 1]], 3, evict=False)
    assert made.uploads.tolist() == [[0, 0], [0, 1]]
    assert not len(made.victims)
    assert not len(plan([[3.0, 1.0]], [[0, 1]], 1, evict=False).uploads)


def test_an_expert_in_flight_is_neither_uploaded_nor_evicted() -> None:
    made = plan([[3.0, 0.1, 1.0]], [[0, 2, 1]], 2)
    assert made.uploads.tolist() == [[0, 0]]
    assert made.victims.tolist() == [[0, 2]]


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
    planner = PooledPlanner(shape, CAP)
    assert planner.fit(scores, resident, 0.0) == [2.0, 3.5]
    made = planner.moves(scores, np.minimum(scores, CAP), np.ones(4, dtype=np.float32), resident)
    check_plan(made, shape, resident, CAP)
    assert made.uploads.tolist() == [[0, 0], [3, 1], [1, 0]]


def test_no_slots_and_no_groups() -> None:
    assert not len(plan([[1.0, 2.0]], [[0, 0]], 0).uploads)
    shape = CacheShape(2, 2, np.full(2, -1, dtype=np.int32), np.zeros(0, dtype=np.int32))
    planner = PooledPlanner(shape, CAP)
    scores, resident = np.ones((2, 2), dtype=np.float32), np.zeros((2, 2), dtype=np.uint8)
    planner.fit(scores, resident, 0.0)
    assert not len(planner.moves(scores, scores, np.ones(2, dtype=np.float32), resident).uploads)
