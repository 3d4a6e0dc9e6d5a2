"""The utility of MoE-SpAc's published program, against its rule in plain Python."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, Observation, PolicyConfig
from moeedge.policies.registry import make_policy

GAMMA, CAP, UP, DOWN = 8, 4, 3, 1
SHAPE = CacheShape.uniform(2, 6, 12)


def observation(counts: NDArray[np.uint32]) -> Observation:
    return Observation(counts, GAMMA + 1, GAMMA)


def test_the_utility_follows_the_counts_and_not_their_changes() -> None:
    """A count that stays high keeps raising the utility; with fixed boundaries, as in the program."""
    rng = np.random.default_rng(1)
    policy = make_policy("spac-program", SHAPE, PolicyConfig(gamma=GAMMA, cap=CAP, ablations=frozenset({"no-ada-bc"})))
    expected = np.zeros((2, 6), dtype=int)
    for _ in range(40):
        counts = rng.integers(0, GAMMA + 2, (2, 6)).astype(np.uint32)
        policy.observe(observation(counts))
        for expert in np.ndindex(2, 6):
            difference = int(counts[expert]) - expected[expert]
            if difference >= UP:
                expected[expert] = min(CAP, expected[expert] + 1)
            elif -difference >= DOWN:
                expected[expert] = max(0, expected[expert] - 1)
        plan = policy.plan(np.zeros((2, 6), dtype=np.uint8), [])
        assert np.array_equal(plan.utility, expected)


def test_what_is_used_all_the_time_is_hot_as_it_is_not_under_the_printed_rule() -> None:
    counts = np.zeros((2, 6), dtype=np.uint32)
    counts[:, 0] = GAMMA + 1
    utilities = {}
    for name in ("spac-program", "spac-paper"):
        policy = make_policy(name, SHAPE, PolicyConfig(gamma=GAMMA, cap=CAP))
        for _ in range(10):
            policy.observe(observation(counts))
        utilities[name] = policy.plan(np.zeros((2, 6), dtype=np.uint8), []).utility[0, 0]
    assert utilities == {"spac-program": CAP, "spac-paper": 1}


def test_a_hot_resident_expert_stays_whatever_the_utility_of_absent_ones() -> None:
    config = PolicyConfig(gamma=GAMMA, cap=CAP, ablations=frozenset({"no-ada-bc", "no-het-wb"}))
    policy = make_policy("spac-program", CacheShape.uniform(1, 4, 2), config)
    for step in range(8):
        used = [0, 1, 2] if step >= 5 else [0]
        policy.observe(observation(np.bincount(used, minlength=4)[None].astype(np.uint32) * (GAMMA + 1)))
    plan = policy.plan(np.array([[0, 1, 1, 0]], dtype=np.uint8), [])
    assert plan.utility.tolist() == [[4, 3, 3, 0]] and plan.tau[0] == 2  # all three are hot
    assert len(plan.uploads) == len(plan.victims) == 0
