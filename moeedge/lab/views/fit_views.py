"""The result of `moeedge lab fit` as tables."""

from __future__ import annotations

from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.ui.tables import Column, print_table, text_column, value_columns

if TYPE_CHECKING:
    from moeedge.lab.experiments.speculation_fit import FitReport

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
    Column("t", lambda row: row[0].n_tokens),
    Column("B", lambda row: row[0].n_sequences),
    Column("k", lambda row: row[0].n_used),
    Column("measured ms", lambda row: row[0].measured_s, ".3f", _MS),
    Column("fitted ms", lambda row: row[0].predicted_s, ".3f", _MS),
    Column("error", lambda row: row[0].error, "+.1%"),
    Column("left out", lambda row: row[1].error if row[1] else None, "+.1%"),
    Column("experts", lambda row: row[2].unique_experts, ".1f"),
)
_SPEED_UP_COLUMNS = (
    Column("gamma", "gamma"),
    Column("tokens/step", "tokens_per_step", ".2f"),
    Column("target efficiency", "target_efficiency", ".3f"),
    Column("predicted", "speed_up", ".3f"),
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
    console.print()
    rows = list(zip_longest(report.fit.fitted, report.fit.left_out, report.times.target))
    title = f"Target: t tokens of B sequences in one batch, after {report.times.depth} each; k experts per token"
    print_table(console, _TIME_COLUMNS, rows, title=title, n_keys=3)
    console.print()
    alone = [row for row in report.speed_ups if row.batch_size == 1]
    print_table(console, _SPEED_UP_COLUMNS, alone, title="Speed-up of one sequence by draft length")
    _line(
        console,
        f"Acceptance: counted in {report.acceptance.n_steps} steps. Target efficiency: T(1) / T(gamma + 1). Measured "
        "ones: moeedge bench --modes stock-ar,moeedge:1-8.",
    )
    if report.amdahl:
        by_fit = f" (by fewer experts per token; by the fit {report.share_fitted:.2f})"
        measured = "" if report.share_measured is None else by_fit
        console.print()
        title = f"Amdahl's law: T(K+1) / T(1), routed experts take f = {report.share:.2f} of a plain step{measured}"
        print_table(console, _AMDAHL_COLUMNS, report.amdahl, title=title)
    _print_by_batch_size(report, console)


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


def _print_by_batch_size(report: FitReport, console: Console) -> None:
    """Speed-ups by batch size and draft length."""
    gammas = dict.fromkeys(row.gamma for row in report.speed_ups)
    columns = [Column("batch size", 0), *value_columns([f"gamma {gamma}" for gamma in gammas], "")]
    rows = [
        (size, *(f"{'~' if row.beyond_measured else ''}{row.speed_up:.2f}" for row in of_size))
        for size, of_size in groupby(report.speed_ups, key=lambda row: row.batch_size)
    ]
    console.print()
    print_table(console, columns, rows, title="Predicted speed-up")
    _line(console, "~: more tokens in a batch than were measured.")
