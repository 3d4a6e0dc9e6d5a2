"""The picture of `moeedge bench --plot`: hit rate and speed against the cache ratio, one line per policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moeedge.bench.record import BenchRow
from moeedge.ui.output_file import save_picture

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_MARKERS = "osD^vPX*"

Point = tuple[float, float]


def lines_of(rows: Sequence[BenchRow], value: Callable[[BenchRow], float | None]) -> dict[str, list[Point]]:
    """(cache ratio, value) by policy and mode, in order of the ratio; rows without a cache or a value are left out."""
    modes = {row.mode for row in rows if row.cache_ratio is not None}
    lines: dict[str, list[Point]] = {}
    for row in rows:
        number = value(row)
        if row.cache_ratio is None or number is None:
            continue
        name = row.policy if len(modes) == 1 else f"{row.policy}, {row.mode}"
        lines.setdefault(name, []).append((row.cache_ratio, number))
    return {name: sorted(points) for name, points in lines.items()}


def draw_sweep(rows: Sequence[BenchRow], path: Path) -> bool:
    """Write the picture of the first test that has an expert cache; False where there is nothing to draw.

    Raises InputError where the file cannot be written.
    """
    test = next((row.test for row in rows if row.cache_ratio is not None), None)
    shown = [row for row in rows if row.test == test]
    if test is None:
        return False
    # half a second to import; only who asks for a picture pays it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    setup = next(row.setup for row in shown if row.cache_ratio is not None)
    figure.suptitle(f"{setup['model']}, {test}, device {setup['device']}")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw(upper, lines_of(shown, lambda row: row.cache.hit_rate_pairs))
    upper.set_ylim(0, 1)
    upper.set_ylabel("hit rate of (token, expert) pairs")
    _draw(lower, lines_of(shown, lambda row: row.ratio))
    drafted = next((row.ratio for row in shown if row.mode == "stock-sd"), None)
    lower.axhline(1, color="0.5", linestyle=":", label="stock-ar")
    if drafted is not None:
        lower.axhline(drafted, color="0.5", linestyle="--", label="stock-sd")
    lower.set_ylim(bottom=0)
    lower.set_xlim(0, 1.1 * max(row.cache_ratio for row in shown if row.cache_ratio is not None) or 1)
    lower.set_ylabel("decoding speed / stock-ar's")
    lower.set_xlabel("cache ratio: share of all experts that have a slot on the device")
    lower.legend(loc="best", fontsize="small")
    save_picture(figure, path)
    return True


def _draw(axes: Any, lines: dict[str, list[Point]]) -> None:
    for index, (name, points) in enumerate(lines.items()):
        ratios, values = zip(*points, strict=True)
        style = {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}
        axes.plot(ratios, values, label=name, markersize=5, **style)
    axes.grid(alpha=0.3)
