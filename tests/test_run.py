"""Turns, limits of time and the stopwatch of measurements."""

from __future__ import annotations

import math
from collections import Counter
from itertools import count, pairwise, permutations

import pytest

from moeedge.run import rotated, seconds_of, within
from tests.support.machine import Here


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_item_comes_equally_often_in_every_place_and_after_every_other(n: int) -> None:
    orders = [rotated(range(n), turn) for turn in range(2 * n)]
    for place in range(n):
        assert set(Counter(order[place] for order in orders).values()) == {2}
    after = Counter(pair for order in orders for pair in pairwise(order))
    assert all(after[a, b] == after[b, a] > 0 for a, b in permutations(range(n), 2) if after[a, b] or after[b, a])


@pytest.mark.parametrize(
    ("limit_s", "at_least", "n"), [(0.0, 1, 1), (2.5, 1, 3), (3.0, 1, 4), (0.0, 3, 3), (0.0, 9, 5), (math.inf, 1, 5)]
)
def test_rounds_end_after_the_limit_but_for_those_that_are_needed(
    limit_s: float, at_least: int, n: int, here: Here
) -> None:
    """Each round takes a second."""
    clock, left = count(0.0), iter(range(5))
    here.set_clock(lambda: next(clock))
    assert list(within(limit_s, left, at_least=at_least)) == list(range(n))
    assert list(left) == list(range(n, 5))  # rounds that are computed when they are requested are not


def test_the_stopwatch_tells_the_seconds_of_the_work(here: Here) -> None:
    clock = [5.0]
    here.set_clock(lambda: clock[-1])
    assert seconds_of(lambda: clock.append(7.5)) == 2.5
