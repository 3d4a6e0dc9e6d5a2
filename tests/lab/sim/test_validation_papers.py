"""Validation: figures of other publications from which no constant was chosen. The simulator fails it, and says so."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from moeedge.lab.cli.validate import print_part
from moeedge.lab.sim.execution import TimeBreakdown
from moeedge.lab.sim.papers import Cases, Compared, Papers, figures
from moeedge.lab.sim.simulate import Range, SimulationConfig, SimulationResult


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


def compared(table: str, name: str, tpots_ms: tuple[float, float, float], cache_ratio: float = 0.5) -> Compared:
    """A row whose simulations with fast, chosen and slow constants take so long per token."""
    config = SimulationConfig(policy="lru", cache_ratio=cache_ratio, gamma=0)
    fast, chosen, slow = (
        SimulationResult(config, 0, None, TimeBreakdown(total_ns=round(ms * 1e6), tokens=1), {}, 1, {})
        for ms in tpots_ms
    )
    return Compared(table, name, "optimistic", Range(fast, chosen, slow))


def printed(rows: list[Compared]) -> list[list[str]]:
    """The words of each line."""
    text = StringIO()
    print_part(rows, Console(width=200, file=text))
    return [line.split() for line in text.getvalue().splitlines()]


def test_cutoff_layers_are_columns_of_each_model() -> None:
    rows = [
        compared("cutoff", f"{model}, layer {layer}", (first + 1, first + 3, first + 9))
        for model, layer, first in (("one", 4, 10), ("one", 8, 20), ("two", 4, 60), ("two", 8, 50))
    ]
    lines = printed(rows)
    for model, layers, times in (
        ("one", ["4", "8"], (["11.0", "21.0"], ["13.0", "23.0"], ["19.0", "29.0"])),
        ("two", ["4", "8"], (["61.0", "51.0"], ["63.0", "53.0"], ["69.0", "59.0"])),
    ):
        at = lines.index([model, *layers])
        for side, of_side in zip(("fast", "chosen", "slow"), times, strict=True):
            assert [side, *of_side] in lines[at : at + 6]
    best = [line[3] for line in lines if line[:3] == ["best", "at", "layer"]]
    assert best == ["4", "8"]


def test_ratios_are_columns_of_each_system() -> None:
    rows = [
        compared("figure5", name, (ms - 1, ms, ms + 10), ratio)
        for name, ratio, ms in (("A", 0.25, 50), ("A", 0.5, 20), ("B", 0.25, 100), ("B", 0.5, 40))
    ]
    lines = printed(rows)
    assert ["25%", "50%"] in lines
    assert any(line[0:2] + line[5:6] == ["A", "20.0", "50.0"] for line in lines)
    assert any(line[0:2] + line[5:6] == ["B", "10.0", "25.0"] for line in lines)
