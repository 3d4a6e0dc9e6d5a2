"""The picture of `moeedge fit`: times with their fit, and speed-ups by batch size, sparsity and machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeedge.ui.plots import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from moeedge.analysis.what_if import Outlook
    from moeedge.bench.speculation_fit import FitReport

_MS = 1e3  # from seconds


def draw_fit(report: FitReport, path: Path) -> None:
    """Writes the picture. Raises InputError where the file cannot be written."""
    figure = new_figure(12, 9)
    info = report.info
    figure.suptitle(f"{info.model}, draft {info.draft}, {info.n_threads} thread{'s'[: info.n_threads > 1]}")
    (times, by_size), (by_sparsity, by_machine) = figure.subplots(2, 2)
    _draw_times(times, report)
    own = [r for r in report.outlooks if r.machine == report.times.machine.name and r.n_used == report.times.n_used]
    _draw_lines(by_size, own, lambda row: f"gamma {row.gamma}", "speed-up by draft length")
    for index, row in enumerate(report.speed_ups):
        if row.measured is not None:
            style = {"color": COLOURS[index % len(COLOURS)], "marker": "x"}
            by_size.plot([1], [row.measured], linestyle="none", label="measured" if index == 0 else None, **style)
    by_size.legend(fontsize="small")
    gamma = max(own, key=lambda row: row.speed_up).gamma
    same = [row for row in report.outlooks if row.gamma == gamma]
    here = [row for row in same if row.machine == report.times.machine.name]
    title = f"sparsity: k of {report.times.n_experts} experts, gamma {gamma}"
    _draw_lines(by_sparsity, here, lambda row: f"k = {row.n_used}", title)
    machines = [row for row in same if row.n_used == report.times.n_used]
    _draw_lines(by_machine, machines, lambda row: row.machine, f"machine, gamma {gamma}")
    save_figure(figure, path)


def _draw_times(axes: Any, report: FitReport) -> None:
    """T_T(t): a line of the fit and points of the measurement for each number of active experts."""
    points = report.fit.fitted
    tokens = np.arange(1, max(point.n_tokens for point in points) + 1)
    for index, n_used in enumerate(dict.fromkeys(point.n_used for point in points)):
        colour = COLOURS[index % len(COLOURS)]
        model = report.fit.model.with_used(n_used)
        axes.plot(tokens, [_MS * model.target_s(int(t)) for t in tokens], color=colour, label=f"fit, k = {n_used}")
        of_used = [point for point in points if point.n_used == n_used]
        axes.plot(
            [point.n_tokens for point in of_used],
            [_MS * point.measured_s for point in of_used],
            "o",
            color=colour,
            markersize=4,
            label=f"measured, k = {n_used}",
        )
    axes.set_xlabel("tokens in the batch")
    axes.set_ylabel("T_T, ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_lines(axes: Any, rows: Sequence[Outlook], name: Callable[[Outlook], str], title: str) -> None:
    """Speed-up over batch size, a line per name; dotted where batches are larger than those measured."""
    for index, label in enumerate(dict.fromkeys(map(name, rows))):
        line = [row for row in rows if name(row) == label]
        colour = COLOURS[index % len(COLOURS)]
        n_known = sum(not row.beyond_measured for row in line)
        sizes, values = [row.batch_size for row in line], [row.speed_up for row in line]
        axes.plot(sizes[:n_known], values[:n_known], color=colour, label=label)
        start = max(n_known - 1, 0)
        axes.plot(sizes[start:], values[start:], color=colour, linestyle=":", label=None if n_known else label)
    axes.axhline(1, color="0.5", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size (sequences); dotted: beyond the measured batches")
    axes.set_ylabel("predicted speed-up")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
