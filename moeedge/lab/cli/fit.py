"""`moeedge lab fit`: measure the parts of a speculative step, fit MoESD's model, and predict what speculation gains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import groupby, zip_longest
from math import inf
from typing import TYPE_CHECKING

from moeedge import paths
from moeedge.cli.common import emit, integers
from moeedge.cli.engine_options import EngineOptions
from moeedge.cli.options import Output, declare, flatten
from moeedge.records import as_dict, figures
from moeedge.run import Run
from moeedge.ui.console import notifier, say, stderr_console
from moeedge.ui.tables import Column, print_table, text_column, value_columns

if TYPE_CHECKING:
    from rich.console import Console

    from moeedge.lab.experiments.speculation_fit import FitReport

declare(
    """
    [Workload]
    --batch-tokens LIST  Tokens in a batch of the target, 1 to 64, whose times are measured.
    --batch-sizes LIST  Sequences in a batch, for which speed-ups are predicted.
    [Model]
    --n-expert-used LIST  Experts per token to measure with, at most the model's number. Default: the model's and half
        of it; the difference says what experts cost.
    """,
    "fit",
    read={integers: "batch_tokens batch_sizes n_expert_used"},
)


@partial(flatten, device="none")
def fit(
    batch_tokens: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48),
    draft_max: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8),
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    n_expert_used: Sequence[int] = (),
    dataset: str | None = None,
    limit: int = 8,
    offline_sample: bool = False,
    n_predict: int = 96,
    repetitions: int = 5,
    *,
    engine: EngineOptions,
    output: Output = Output.TEXT,
    verbose: bool = False,
) -> None:
    """Measure what a step of a model and its draft takes, and predict what drafts gain.

    Times the model over 1 to 48 tokens, its draft, and the choice of tokens; fits a formula of ten parameters to that
    (MoESD, docs/lab/speed-model.md); and predicts the gain by draft length and texts at a time, and for other numbers
    of experts per token. Needs a quiet machine: where the fit misses times that it was not given
    by more than 15 % (median), there are no predictions, and the exit code is 1.
    """
    engine.limit_openmp_spin()
    from moeedge.data.datasets import load_dataset
    from moeedge.engine.context_choice import thread_notes
    from moeedge.hardware.provenance import read_provenance
    from moeedge.lab.experiments.speculation_fit import FitPlan, run_fit
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.ui.console import Bar

    plan = FitPlan(
        tokens=tuple(sorted(batch_tokens)),
        gammas=tuple(sorted(draft_max)),
        batch_sizes=tuple(sorted(batch_sizes)),
        n_used=tuple(n_expert_used or ()),
        repetitions=repetitions,
        n_predict=n_predict,
    )
    config = engine.config(PlacementConfig(cache_ratio=0.0))  # an expert cache would change while times are taken
    provenance = as_dict(read_provenance(config.model))
    name = dataset or ("toy" if paths.is_bundled(config.model) else "sample")
    prompts = load_dataset(name, offline_sample=offline_sample).limited(limit or None).prompts
    err = stderr_console()
    for note in thread_notes(engine.threads):
        say(err, note, style="yellow")
    with Bar(err, "passes") as bar:
        report = run_fit(config, prompts, plan, Run(notifier(err), progress=bar))
    if output is Output.JSON or report.is_usable:
        record = report.as_dict() | {"provenance": provenance}
        emit(output, lambda _: json.dumps(record, ensure_ascii=False), print_fit, report)
    if not report.is_usable:
        raise report.unusable()


_MS = 1e3  # from seconds

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
    counted = f"Acceptance: counted in {report.acceptance.n_steps} steps. Target efficiency: T(1) / T(gamma + 1)."
    say(console, f"{counted} Measured ones: moeedge bench --modes stock-ar,moeedge:1-8.", style="")
    if report.amdahl:
        by_fit = f" (by fewer experts per token; by the fit {report.share_fitted:.2f})"
        measured = "" if report.share_measured is None else by_fit
        console.print()
        title = f"Amdahl's law: T(K+1) / T(1), routed experts take f = {report.share:.2f} of a plain step{measured}"
        print_table(console, _AMDAHL_COLUMNS, report.amdahl, title=title)
    _print_speed_ups(report, console)


def _print_parameters(report: FitReport, console: Console) -> None:
    from moeedge.lab.analysis.step_fit import StepModel

    model, fit, other = report.fit.model, report.fit, report.other_fit
    rows = []
    for name, parameter in figures(StepModel).items():
        values, scale = (getattr(model, name), fit.lower[name], fit.upper[name]), _MS if name.endswith("_s") else 1.0
        rows.append((name, *("none" if each == inf else f"{each * scale:.4g}" for each in values), parameter.help))
    columns = [text_column("parameter", 0), *value_columns(["fitted", "lower", "upper"], "")]
    print_table(console, [*columns, text_column("", 4, fold=True)], rows, title="MoESD's parameters; times in ms")
    machine = report.times.machine
    speeds = f"Memory {machine.bytes_per_s / 1e9:.1f} GB/s, kernels {machine.flops / 1e9:.1f} GFLOPS"
    ridge = f"ridge point {model.ridge_point:.1f} tokens, fitted {model.ridge_tokens:.1f}"
    say(console, f"{speeds}: {ridge}.", style="")
    errors = {"draft": fit.draft_error, "rejection": fit.reject_error}
    if fit.left_out_error is not None and other.left_out_error is not None:
        errors = {"each number of tokens left out in turn": fit.left_out_error, **errors}
        form = {False: "as MoESD prints it", True: "experts computed in sequence"}
        own, others = form[model.in_sequence], form[other.model.in_sequence]
        text = f"Form: {own}; {others} the error of numbers of tokens left out is {other.left_out_error:.1%}."
        say(console, text, style="")
    others = "".join(f", {name} {error:.1%}" for name, error in errors.items() if error)
    say(
        console,
        f"Median error: target {fit.fit_error:.1%}{others}. The samples of one number of tokens differ by a factor "
        f"of {report.spread:.2f} (median). Single parameters are not determined by so few times; their sums are.",
        style="",
    )


def _print_speed_ups(report: FitReport, console: Console) -> None:
    gammas = dict.fromkeys(row.gamma for row in report.speed_ups)
    columns = [Column("batch size", 0), *value_columns([f"gamma {gamma}" for gamma in gammas], "")]
    rows = [
        (size, *(f"{'~' if row.beyond_measured else ''}{row.speed_up:.2f}" for row in of_size))
        for size, of_size in groupby(report.speed_ups, key=lambda row: row.batch_size)
    ]
    console.print()
    print_table(console, columns, rows, title="Predicted speed-up")
    say(console, "~: more tokens in a batch than were measured.", style="")
