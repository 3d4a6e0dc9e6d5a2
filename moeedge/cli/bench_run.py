"""Runs what `moeedge bench` measures, prints its rows, draws and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge.cli import options
from moeedge.cli.bench_exit import exit_code
from moeedge.cli.common import show_log
from moeedge.cli.declare import Output, option
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.bench.config import BenchMode, BenchPlan
    from moeedge.bench.records import BenchRow
    from moeedge.bench.runner import Bench
    from moeedge.ui.progress import BenchProgress


Parallel = Annotated[
    str | None,
    option(
        options.WORK,
        "--parallel LIST",
        "Decode N prompts of the dataset together, each with its own drafts, once per N: throughput, and what "
        "speculation gains over plain decoding with the same N. First turns only.",
        also="-np",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How many texts are decoded together."""

    parallel: Parallel = None

    def counts(self) -> tuple[int, ...]:
        """Numbers of texts, ascending; () without --parallel. Raises InputError."""
        from moeedge.bench.config import parse_numbers
        from moeedge.engine.types import MAX_N_PARALLEL

        if self.parallel is None:
            return ()
        counts = parse_numbers(self.parallel, "--parallel", least=1)
        if max(counts) > MAX_N_PARALLEL:
            raise InputError(
                f"At most {MAX_N_PARALLEL} texts are decoded together, not {max(counts)}.", "Use a smaller --parallel."
            )
        return tuple(sorted(counts))


def refuse_with_parallel(given: dict[str, bool]) -> None:
    """Raises InputError for options that --parallel does not take; given: whether each was given."""
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise InputError(f"--parallel and {names[0]} cannot be used together.", "Measure them in two runs.")


def measure_parallel(plan: BenchPlan, notes: list[str], output: Output, *, verbose: bool, plot: Path | None) -> int:
    """Runs the plan, prints the rows and draws the curve. Returns the exit code."""
    from moeedge.bench.parallel import ParallelBench
    from moeedge.ui.bench_views import difference_lines, render
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.parallel_plots import draw_batch_curves
    from moeedge.ui.progress import BenchProgress

    if verbose:
        show_log()
    progress = BenchProgress(bar=not verbose)
    for note in notes:
        progress.note(note)
    with ParallelBench(plan, progress) as run, Interrupt() as interrupt:
        interrupt.arm()
        try:
            with progress:
                finished = run.run(cancel=interrupt)
        finally:  # the rows of the numbers that were measured come out, whatever happens
            interrupt.disarm()
            for line in difference_lines(run.rows):
                progress.note(line)
            if run.rows:
                typer.echo(render(run.rows, output.value), nl=False)
    if plot is not None and not draw_batch_curves(run.rows, plot):
        progress.note("No mode with drafts was measured next to plain decoding: there is nothing to draw.")
    if not finished:
        progress.note("Interrupted: the rows hold what every mode had done.")
        return interrupt.exit_code
    return exit_code(run.rows)


def measure(
    plans: Sequence[BenchPlan],
    notes: list[str],
    output: Output,
    *,
    verbose: bool,
    plot: Path | None,
    trace_out: Path | None,
    resume: str | None,
) -> int:
    """Runs the plans, prints the rows, draws and records. Returns the exit code."""
    from moeedge.bench.journal import Journal, settings_of
    from moeedge.bench.records import read_environment
    from moeedge.bench.runner import Bench
    from moeedge.ui.bench_views import difference_lines, quiet_lines, render
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.plots import draw_sweep
    from moeedge.ui.progress import BenchProgress
    from moeedge.ui.quality_plots import draw_quality

    recorded = _recorded_mode(plans[0], trace_out)
    environment = read_environment()
    settings = [settings_of(plan, environment) for plan in plans]
    journal = Journal.begin(settings) if resume is None else Journal.resume(resume, settings)
    if verbose:
        show_log()
    progress = BenchProgress(bar=not verbose)
    for note in notes:
        progress.note(note)
    if resume is not None:
        progress.note(f"{journal.n_done} samples are from {journal.path}.")
        if plans[0].base.device != "none":
            progress.note("An expert cache begins anew: hits of the first prompts are lower than without the break.")
    rows: list[BenchRow] = []
    finished = True
    with journal, Interrupt() as interrupt:
        try:
            for part, plan in enumerate(plans):
                with Bench(plan, progress, journal, part) as run:
                    interrupt.arm()
                    with progress:
                        finished = run.run(cancel=interrupt)
                    interrupt.disarm()
                    rows += run.rows()
                    if finished and recorded is not None and trace_out is not None:
                        _record(run, recorded, progress, trace_out)
                if not finished:
                    break
        finally:  # the measured rows come out, whatever happens
            for line in difference_lines(rows):
                progress.note(line)
            typer.echo(render(rows, output.value), nl=False)
    if plot is not None and plans[0].compares_speculation:
        if not draw_quality(rows, plot):
            progress.note("No mode was measured next to stock-ar: there is nothing to draw.")
    elif plot is not None and not draw_sweep(rows, plot):
        progress.note("No mode had an expert cache: there is nothing to draw.")
    for line in quiet_lines(rows):
        progress.note(line)
    if not finished:
        where = "" if journal.path is None else f" Go on with the same command and --resume {journal.path}"
        progress.note(f"Interrupted: the rows hold what every mode had done.{where}")
        return interrupt.exit_code
    journal.drop()
    return exit_code(rows)


def _recorded_mode(plan: BenchPlan, trace_out: Path | None) -> BenchMode | None:
    """The mode whose routing is written to `trace_out`, None without it.

    Raises InputError, before the measurement, where there is none to record.
    """
    from moeedge.bench.harness import recorded_mode
    from moeedge.ui.console import check_output

    if trace_out is None:
        return None
    if plan.dataset is None:
        raise InputError("--trace-out records answers, and synthetic tests have none.", "Name prompts with --dataset.")
    check_output(trace_out)
    return recorded_mode(plan.modes)


def _record(run: Bench, recorded: BenchMode, progress: BenchProgress, trace_out: Path) -> None:
    """Answers the prompts once more, and writes their routing."""
    from moeedge.bench.harness import record_answers
    from moeedge.engine.recording import unseen_layers

    progress.note(f"Recording the routing of {recorded.label}.")
    with run.arms.recorder(recorded) as arm:
        trace = record_answers(arm, run.prompts, run.plan)
        if unseen := unseen_layers(arm.session):
            progress.note(unseen)
    trace.save(trace_out)
