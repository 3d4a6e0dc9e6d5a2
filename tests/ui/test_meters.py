"""Bars and sparklines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.ui.figures import bar, resample, sparkline


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0, "░░░░"), (1, "████"), (0.5, "██░░"), (0.3125, "█▎░░"), (-1, "░░░░"), (7, "████"), (0.999, "███▉")],
)
def test_a_bar(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn


@given(st.floats(-2, 3), st.integers(0, 60))
def test_a_bar_has_the_width_it_is_given(share: float, columns: int) -> None:
    assert len(bar(share, columns)) == columns


def test_values_are_resampled_to_means() -> None:
    assert resample([1, 3, 5, 7], 2) == [2, 6]
    assert resample([1, 2, 3], 2) == [1, 2.5]
    assert resample([1, 2], 5) == [1, 2]
    assert resample([], 5) == []


@given(st.lists(st.floats(0, 5), min_size=1, max_size=60), st.integers(1, 60))
def test_resampling_uses_every_value_once(values: list[float], n: int) -> None:
    means = resample(values, n)
    assert len(means) == min(n, len(values))
    assert min(values) - 1e-9 <= min(means) <= max(means) <= max(values) + 1e-9


def test_a_sparkline_is_as_wide_as_there_is_room() -> None:
    assert sparkline([0, 1, 2, 3, 4], 10, top=4) == "▁▃▅▆█"
    assert sparkline([0, 0, 4, 4], 2, top=4) == "▁█"
    assert sparkline([9, -1], 2, top=4) == "█▁"
    assert sparkline([1], 2, top=0) == ""
