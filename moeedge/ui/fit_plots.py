"""The picture of `moeedge fit`: times with their fit, Amdahl's law, predictions by batch size, sparsity, machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeedge.analysis.step_fit import measured_efficiency
from moeedge.ui.plots import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from moeedge.analysis.what_if import Outlook
    from moeedge.bench.fit_report import FitReport

_MS = 1e3  # from seconds


def draw_fit(report: FitReport, path: Path) -> None:
    """Writes the picture. Raises InputError where the file cannot be written."""
    figure = new_figure(17, 9)
    info = report.info
    figure.suptitle(f"{info.model}, draft {info.draft}, {info.n_threads} thread{'s'[: info.n_threads > 1]}")
    (times, efficiency, by_size), (shares, by_sparsity, by_machine) = figure.subplots(2, 3)
    _draw_times(times, report)
    _draw_amdahl(shares, report)
    own = [r for r in report.outlooks if r.machine == report.times.machine.name and r.n_used == report.times.n_used]
    _draw_lines(efficiency, own, "target_efficiency", lambda row: f"gamma {row.gamma}", "target efficiency")
    _draw_lines(by_size, own, "speed_up", lambda row: f"gamma {row.gamma}", "speed-up by draft length")
    for index, row in enumerate(report.speed_ups):
        style = {"color": COLOURS[index % len(COLOURS)], "marker": "x", "linestyle": "none"}
        if row.measured is not None:
            by_size.plot([1], [row.measured], label="measured" if index == 0 else None, **style)
        measured = measured_efficiency(report.times, row.gamma)
        efficiency.plot(list(measured), list(measured.values()), label="measured" if index == 0 else None, **style)
    for axes in (by_size, efficiency):
        axes.legend(fontsize="small")
    gamma = max(own, key=lambda row: row.speed_up).gamma
    same = [row for row in report.outlooks if row.gamma == gamma]
    here = [row for row in same if row.machine == report.times.machine.name]
    title = f"sparsity: k of {report.times.n_experts} experts, gamma {gamma}"
    _draw_lines(by_sparsity, here, "speed_up", lambda row: f"k = {row.n_used}", title)
    machines = [row for row in same if row.n_used == report.times.n_used]
    _draw_lines(by_machine, machines, "speed_up", lambda row: row.machine, f"machine, gamma {gamma}")
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


def _draw_amdahl(axes: Any, report: FitReport) -> None:
    """T(K + 1) / T(1) by the production study's law and measured."""
    tokens = [row.n_tokens for row in report.amdahl]
    axes.plot(tokens, [row.predicted for row in report.amdahl], color=COLOURS[0], label="f unique / k + 1 - f")
    axes.plot(tokens, [row.measured for row in report.amdahl], "o", color=COLOURS[1], markersize=4, label="measured")
    axes.set_title(f"Amdahl's law, f = {report.share:.2f}", fontsize="medium")
    axes.set_xlabel("tokens of a verification, K + 1")
    axes.set_ylabel("T(K+1) / T(1)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_lines(axes: Any, rows: Sequence[Outlook], value: str, name: Callable[[Outlook], str], title: str) -> None:
    """A prediction over batch size, a line per name; dotted where batches are larger than those measured."""
    for index, label in enumerate(dict.fromkeys(map(name, rows))):
        line = [row for row in rows if name(row) == label]
        colour = COLOURS[index % len(COLOURS)]
        n_known = sum(not row.beyond_measured for row in line)
        sizes, values = [row.batch_size for row in line], [getattr(row, value) for row in line]
        axes.plot(sizes[:n_known], values[:n_known], color=colour, label=label)
        start = max(n_known - 1, 0)
        axes.plot(sizes[start:], values[start:], color=colour, linestyle=":", label=None if n_known else label)
    if value == "speed_up":
        axes.axhline(1, color="0.5", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size (sequences); dotted: beyond the measured batches")
    axes.set_ylabel(f"predicted {value.replace('speed_up', 'speed-up').replace('_', ' ')}")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
