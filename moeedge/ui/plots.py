"""The picture of `bench --plot`, drawn by Matplotlib without a display.

Matplotlib takes half a second to import, so it is imported where a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.bench.records import BenchRow

_DPI = 130
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
MARKERS = "osD^vPX*"
Point = tuple[float, float]


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches on a canvas without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes the picture; the suffix selects the format. Raises InputError where the file cannot be written."""
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        reason = error.strerror or "write error"
        raise InputError(f"Cannot write the picture {path}: {reason}.", "Choose another path.") from None


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
    """`bench --plot`: hit rate and speed against the cache ratio, a line per policy, of the first test with a cache.

    Returns False, and writes no file, if no row had an expert cache.

    Raises InputError where the file cannot be written.
    """
    test = next((row.test for row in rows if row.cache_ratio is not None), None)
    shown = [row for row in rows if row.test == test]
    if test is None:
        return False
    figure = new_figure(8, 8)
    setup = next(row.setup for row in shown if row.cache_ratio is not None)
    figure.suptitle(f"{setup['model']}, {test}, device {setup['device']}")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_lines(upper, lines_of(shown, lambda row: row.cache.hit_rate_pairs))
    upper.set_ylim(0, 1)
    upper.set_ylabel("pair hits: share of (token, expert) pairs")
    _draw_lines(lower, lines_of(shown, lambda row: row.ratio))
    drafted = next((row.ratio for row in shown if row.mode == "stock-sd"), None)
    lower.axhline(1, color="0.5", linestyle=":", label="stock-ar")
    if drafted is not None:
        lower.axhline(drafted, color="0.5", linestyle="--", label="stock-sd")
    lower.set_ylim(bottom=0)
    lower.set_xlim(0, 1.1 * max(row.cache_ratio for row in shown if row.cache_ratio is not None) or 1)
    lower.set_ylabel("decoding speed / stock-ar's")
    lower.set_xlabel("cache ratio: share of all experts cached on the device")
    lower.legend(loc="best", fontsize="small")
    save_figure(figure, path)
    return True


def _draw_lines(axes: Any, lines: dict[str, list[Point]]) -> None:
    for index, (name, points) in enumerate(lines.items()):
        ratios, values = zip(*points, strict=True)
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        axes.plot(ratios, values, label=name, markersize=5, **style)
    axes.grid(alpha=0.3)
