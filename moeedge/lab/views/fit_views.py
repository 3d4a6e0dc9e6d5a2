"""The result of `moeedge lab fit` as tables and as a picture."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from moeedge.ui.plots import COLOURS, new_figure, save_figure
from moeedge.ui.progress import Bar
from moeedge.ui.tables import Column, print_table, text_column, value_columns

if TYPE_CHECKING:
    from moeedge.lab.analysis.step_fit import Predicted, TimePoint
    from moeedge.lab.experiments.fit_report import FitReport

_MS = 1e3  # from seconds

_MEANINGS = {
    "bias_s": "loading the weights that every step reads",
    "k1_s": "dense operations, times G(t)",
    "k2_s": "loading one expert in every layer, times N(t)",
    "k3_s": "operations of experts, times G(tokens per expert), in sequence times N(t)",
    "draft_bias_s": "loading the draft",
    "draft_k_s": "operations of the draft, times G(t)",
    "reject_bias_s": "rejection sampling",
    "reject_k_s": "the same, times t",
    "ridge_share": "lambda: where the slope of G begins, as a share of the ridge point",
    "growth": "s: growth of G before",
}
_TIME_COLUMNS = (
    Column("t", "n_tokens"),
    Column("B", "n_sequences"),
    Column("k", "n_used"),
    Column("measured ms", "measured_s", ".3f", _MS),
    Column("fitted ms", "predicted_s", ".3f", _MS),
    Column("error", "error", "+.1%"),
)
_SPEED_UP_COLUMNS = (
    Column("gamma", "gamma"),
    Column("tokens/step", "tokens_per_step", ".2f"),
    Column("target efficiency", "target_efficiency", ".3f"),
    Column("predicted", "predicted", ".3f"),
    Column("measured", "measured", ".3f"),
    Column("error", "error", "+.1%"),
)
_AMDAHL_COLUMNS = (
    Column("tokens", "n_tokens"),
    Column("unique/k", "expert_ratio", ".2f"),
    Column("predicted", "predicted", ".3f"),
    Column("measured", "measured", ".3f"),
    Column("error", lambda row: row.predicted / row.measured - 1, "+.1%"),
    Column("f that fits", "share", ".2f"),
)


class PartsProgress(Bar):
    """Work of several parts, one bar after the other; without a bar, a line per part."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())

    def part_of(self, label: str, total: int) -> None:
        """A part of so many passes comes next."""
        if not self.is_shown:
            self.note(f"{label}: {total} pass{'es' * (total != 1)}")
        if self._task is not None:
            self._progress.remove_task(self._task)
        self.start(label, total)

    def one(self) -> None:
        """A pass is done."""
        self.add()


def print_fit(report: FitReport, console: Console) -> None:
    """Parameters, times with their errors, speed-ups, Amdahl's law, and what was not measured."""
    _print_parameters(report, console)
    _print_times(report, console)
    _print_speed_ups(report, console)
    _print_amdahl(report, console)
    _print_outlooks(report, console)


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=not console.is_terminal)


def _print_parameters(report: FitReport, console: Console) -> None:
    model, fit, other = report.fit.model, report.fit, report.other_fit
    rows = [
        (name, *(_value(name, value) for value in (getattr(model, name), fit.lower[name], fit.upper[name])), meaning)
        for name, meaning in _MEANINGS.items()
    ]
    columns = [text_column("parameter", 0), *value_columns(["fitted", "lower", "upper"], "")]
    print_table(console, [*columns, text_column("", 4, fold=True)], rows, title="MoESD's parameters; times in ms")
    machine = report.times.machine
    _line(
        console,
        f"Memory {machine.bytes_per_s / 1e9:.1f} GB/s, kernels {machine.flops / 1e9:.1f} GFLOPS: ridge point "
        f"{model.ridge_point:.1f} tokens, fitted {model.ridge_tokens:.1f}.",
    )
    left_out = ""
    if fit.left_out_error is not None and other.left_out_error is not None:
        left_out = f", each number of tokens left out in turn {fit.left_out_error:.1%}"
        form = {False: "as MoESD prints it", True: "experts computed in sequence"}
        _line(
            console,
            f"Form: {form[model.in_sequence]}; {form[other.model.in_sequence]} the error of numbers of tokens left out "
            f"is {other.left_out_error:.1%}.",
        )
    for name, error in (("draft", fit.draft_error), ("rejection", fit.reject_error)):
        left_out += f", {name} {error:.1%}" if error else ""
    _line(
        console,
        f"Median error: target {fit.fit_error:.1%}{left_out}. The samples of one number of tokens differ by a factor "
        f"of {report.spread:.2f} (median). Single parameters are not determined by so few times; their sums are.",
    )


def _value(name: str, value: float) -> str:
    """Seconds in ms, others as they are."""
    if value == float("inf"):
        return "none"
    return format(value * _MS if name.endswith("_s") else value, ".4g")


def _print_times(report: FitReport, console: Console) -> None:
    left_out = {_key(point): point.error for point in report.fit.left_out}
    unique = {_key(point): point.unique_experts for point in report.times.target}
    columns = [
        *_TIME_COLUMNS,
        Column("left out", lambda point: left_out.get(_key(point)), "+.1%"),
        Column("experts", lambda point: unique[_key(point)], ".1f"),
    ]
    console.print()
    print_table(
        console,
        columns,
        report.fit.fitted,
        title=f"Target: t tokens of B sequences in one batch, after {report.times.depth} each; k experts per token",
        n_keys=3,
    )


def _key(point: TimePoint | Predicted) -> tuple[int, int, int]:
    return point.n_tokens, point.n_sequences, point.n_used


def _print_speed_ups(report: FitReport, console: Console) -> None:
    console.print()
    print_table(console, _SPEED_UP_COLUMNS, report.speed_ups, title="Speed-up of one sequence by draft length")
    error = "" if report.speed_up_error is None else f" Largest error: {report.speed_up_error:.1%}."
    _line(
        console,
        f"Acceptance: counted in {report.acceptance.n_steps} steps. Target efficiency: T(1) / T(gamma + 1).{error}",
    )


def _print_amdahl(report: FitReport, console: Console) -> None:
    if not report.amdahl:
        return
    measured = (
        "" if report.share_measured is None else f" (by fewer experts per token; by the fit {report.share_fitted:.2f})"
    )
    console.print()
    title = f"Amdahl's law: T(K+1) / T(1), routed experts take f = {report.share:.2f} of a plain step{measured}"
    print_table(console, _AMDAHL_COLUMNS, report.amdahl, title=title)


def _print_outlooks(report: FitReport, console: Console) -> None:
    """Speed-ups by batch size and draft length."""
    columns = [Column("batch size", 0), *value_columns([f"gamma {row.gamma}" for row in report.speed_ups], "")]
    rows = [
        (size, *(f"{'~' if row.beyond_measured else ''}{row.speed_up:.2f}" for row in of_size))
        for size, of_size in groupby(report.outlooks, key=lambda row: row.batch_size)
    ]
    console.print()
    print_table(console, columns, rows, title="Predicted speed-up")
    _line(console, "~: more tokens in a batch than were measured.")


def draw_fit(report: FitReport, path: Path) -> None:
    """Times with their fit, Amdahl's law, and speed-ups by batch size.

    Raises InputError where the file cannot be written.
    """
    figure = new_figure(17, 5)
    info = report.info
    figure.suptitle(f"{info.model}, draft {info.draft}, {info.n_threads} thread{'s'[: info.n_threads > 1]}")
    times, shares, by_size = figure.subplots(1, 3)
    _draw_times(times, report)
    _draw_amdahl(shares, report)
    _draw_speed_ups(by_size, report)
    for axes in (times, shares, by_size):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save_figure(figure, path)


def _draw_times(axes: Any, report: FitReport) -> None:
    """T_T(t): a line of the fit and points of the measurement for each number of active experts."""
    points = report.fit.fitted
    tokens = np.arange(1, max(point.n_tokens for point in points) + 1)
    for index, n_used in enumerate(dict.fromkeys(point.n_used for point in points)):
        colour = COLOURS[index % len(COLOURS)]
        model = report.fit.model.with_used(n_used)
        axes.plot(tokens, [_MS * model.target_s(int(t)) for t in tokens], color=colour, label=f"fit, k = {n_used}")
        measured = [(point.n_tokens, _MS * point.measured_s) for point in points if point.n_used == n_used]
        axes.plot(*zip(*measured, strict=True), "o", color=colour, markersize=4, label=f"measured, k = {n_used}")
    axes.set_xlabel("tokens in the batch")
    axes.set_ylabel("T_T, ms")
    axes.set_ylim(bottom=0)


def _draw_amdahl(axes: Any, report: FitReport) -> None:
    """T(K + 1) / T(1) by the production study's law and measured."""
    tokens = [row.n_tokens for row in report.amdahl]
    axes.plot(tokens, [row.predicted for row in report.amdahl], color=COLOURS[0], label="f unique / k + 1 - f")
    axes.plot(tokens, [row.measured for row in report.amdahl], "o", color=COLOURS[1], markersize=4, label="measured")
    axes.set_title(f"Amdahl's law, f = {report.share:.2f}", fontsize="medium")
    axes.set_xlabel("tokens of a verification, K + 1")
    axes.set_ylabel("T(K+1) / T(1)")
    axes.set_ylim(bottom=0)


def _draw_speed_ups(axes: Any, report: FitReport) -> None:
    """Over batch size, a line per draft length; dotted where batches are larger than those measured."""
    for index, row in enumerate(report.speed_ups):
        line = [each for each in report.outlooks if each.gamma == row.gamma]
        colour = COLOURS[index % len(COLOURS)]
        n_known = sum(not each.beyond_measured for each in line)
        sizes, values = [each.batch_size for each in line], [each.speed_up for each in line]
        start = max(n_known - 1, 0)
        axes.plot(sizes[:n_known], values[:n_known], color=colour, label=f"gamma {row.gamma}")
        axes.plot(sizes[start:], values[start:], color=colour, linestyle=":")
        if row.measured is not None:
            axes.plot([1], [row.measured], "x", color=colour, label=None if index else "measured")
    axes.axhline(1, color="0.5", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size (sequences); dotted: beyond the measured batches")
    axes.set_ylabel("predicted speed-up")
