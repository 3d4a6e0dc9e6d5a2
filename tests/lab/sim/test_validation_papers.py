"""Validation: figures of other publications from which no constant was chosen. The simulator fails it, and says so."""

from __future__ import annotations

import pytest

from moeedge.lab.sim.papers import Cases, Papers, figures


@pytest.mark.slow
def test_no_row_that_fed_no_constant_is_within_a_quarter() -> None:
    with Cases() as cases:
        rows = Papers(cases).elsewhere()
    held_out = {row.name: row.ratio for row in rows if not row.fitted}
    assert set(held_out) == {
        "MoE-Infinity, mixtral-8x7b:F16",
        "Accelerate, deepseek-v2-lite:F16",
        "Accelerate, mixtral-8x7b:F16",
        "Mixtral Offload, mixtral-8x7b:F16",
    }
    (figure,) = figures(rows)
    assert (figure.figure, figure.within_25_percent, figure.rows) == ("fed no constant", 0, 4)
    assert all(ratio is not None and 1 / 7 < ratio < 7 for ratio in held_out.values())
