"""The result of `moeedge fit` as tables."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.ui.tables import Column, print_table, text_column, value_columns

if TYPE_CHECKING:
    from moeedge.analysis.step_fit import Predicted, TimePoint
    from moeedge.analysis.what_if import Outlook
    from moeedge.bench.fit_report import FitReport

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
    Column("by measured times", "from_times", ".3f"),
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
    model, fit = report.fit.model, report.fit
    rows = [(name, getattr(model, name), fit.lower[name], fit.upper[name], _MEANINGS[name]) for name in fit.lower]
    columns = [text_column("parameter", 0)]
    columns += [
        Column("fitted", lambda row: _value(row[0], row[1])),
        Column("lower", lambda row: _value(row[0], row[2])),
        Column("upper", lambda row: _value(row[0], row[3])),
    ]
    print_table(console, [*columns, text_column("", 4, fold=True)], rows, title="MoESD's parameters; times in ms")
    machine = report.times.machine
    _line(
        console,
        f"Memory {machine.bytes_per_s / 1e9:.1f} GB/s, kernels {machine.flops / 1e9:.1f} GFLOPS: ridge point "
        f"{model.ridge_point:.1f} tokens, fitted {model.ridge_tokens:.1f}.",
    )
    left_out = (
        "" if fit.left_out_error is None else f", each number of tokens left out in turn {fit.left_out_error:.1%}"
    )
    other = report.other_fit
    if other.left_out_error is not None:
        form = {False: "as MoESD prints it", True: "experts computed in sequence"}
        _line(
            console,
            f"Form: {form[model.in_sequence]}; {form[other.model.in_sequence]} the error of numbers of tokens left out "
            f"is {other.left_out_error:.1%}.",
        )
    others = [
        f"{name} {error:.1%}" for name, error in (("draft", fit.draft_error), ("rejection", fit.reject_error)) if error
    ]
    _line(
        console,
        f"Median error: target {fit.fit_error:.1%}{left_out}{''.join(f', {text}' for text in others)}. The samples of "
        f"one number of tokens differ by a factor of {report.spread:.2f} (median). Single parameters are not "
        "determined by so few times; their sums are.",
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
        title="Target: t tokens of B sequences in one batch, k experts per token",
        n_keys=3,
    )


def _key(point: TimePoint | Predicted) -> tuple[int, int, int]:
    return point.n_tokens, point.n_sequences, point.n_used


def _print_speed_ups(report: FitReport, console: Console) -> None:
    console.print()
    print_table(console, _SPEED_UP_COLUMNS, report.speed_ups, title="Speed-up of one sequence by draft length")
    how = f"counted in {report.acceptance.n_steps} steps" if report.acceptance.n_steps else "as given"
    error = "" if report.speed_up_error is None else f" Largest error: {report.speed_up_error:.1%}."
    _line(console, f"Acceptance: {how}. Target efficiency: T(1) / T(gamma + 1).{error}")


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
    """Target efficiency and speed-ups by batch size and draft length, then the best for other sparsities, machines."""
    own = [row for row in report.outlooks if _is_own(row, report)]
    gammas = list(dict.fromkeys(row.gamma for row in own))
    columns = [Column("batch size", 0), *value_columns([f"gamma {gamma}" for gamma in gammas], "")]
    for title, value in (
        ("Predicted target efficiency, T(B) / T(B (gamma + 1))", "target_efficiency"),
        ("Predicted speed-up", "speed_up"),
    ):
        rows = [
            (batch_size, *(_marked(getattr(row, value), row) for row in of_size))
            for batch_size, of_size in groupby(own, key=lambda row: row.batch_size)
        ]
        console.print()
        print_table(console, columns, rows, title=title)
    others = [row for row in report.outlooks if not _is_own(row, report)]
    sizes = list(dict.fromkeys(row.batch_size for row in own))
    lines = []
    for (machine, n_used), variants in groupby(report.outlooks, key=lambda row: (row.machine, row.n_used)):
        best = [
            max(of_size, key=lambda row: row.speed_up)
            for _, of_size in groupby(variants, key=lambda row: row.batch_size)
        ]
        sparsity = f"{n_used} of {report.times.n_experts}"
        texts = (f"{_marked(row.speed_up, row)} ({row.gamma})" for row in best)
        lines.append((machine, sparsity, best[0].full_activation_tokens, *texts))
    if others:
        columns = [text_column("machine", 0), Column("experts", 1), Column("95 % at", 2)]
        columns += [Column(f"B={size}", index) for index, size in enumerate(sizes, start=3)]
        console.print()
        print_table(console, columns, lines, title="What if: best predicted speed-up (gamma) by batch size B", n_keys=3)
    _line(
        console,
        "~: more tokens in a batch than were measured. 95 % at: tokens that use 95 % of all experts if routing is "
        "uniform. Other machines are taken to hold the entire model, at the published rates of their memory.",
    )


def _is_own(row: Outlook, report: FitReport) -> bool:
    return row.machine == report.times.machine.name and row.n_used == report.times.n_used


def _marked(speed_up: float, row: Outlook) -> str:
    return f"{'~' if row.beyond_measured else ''}{speed_up:.2f}"
