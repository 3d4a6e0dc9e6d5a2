"""Runs what `moeedge bench` measures, prints its rows and draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moeedge.cli.common import EXIT_FAILURE, print_error, show_log
from moeedge.cli.declare import Output

if TYPE_CHECKING:
    from moeedge.bench.config import BenchPlan
    from moeedge.bench.journal import Journal
    from moeedge.bench.parallel import ParallelBench
    from moeedge.bench.records import BenchRow
    from moeedge.bench.runner import Bench
    from moeedge.ui.progress import BenchProgress


def measure_parallel(plan: BenchPlan, notes: list[str], output: Output, *, verbose: bool, plot: Path | None) -> int:
    """Runs the plan, prints the rows and draws the curve. Returns the exit code."""
    from moeedge.bench.journal import Journal
    from moeedge.bench.parallel import ParallelBench

    progress = _progress(notes, verbose=verbose)
    return _measure([partial(ParallelBench, plan, progress)], plan, progress, Journal(None, ()), output, plot)


def measure(
    plans: Sequence[BenchPlan],
    notes: list[str],
    output: Output,
    *,
    verbose: bool,
    plot: Path | None,
    resume: str | None,
) -> int:
    """Runs the plans, prints the rows and draws. Returns the exit code."""
    from moeedge.bench.journal import Journal, settings_of
    from moeedge.bench.records import read_environment
    from moeedge.bench.runner import Bench

    environment = read_environment()
    settings = [settings_of(plan, environment) for plan in plans]
    journal = Journal.begin(settings) if resume is None else Journal.resume(resume, settings)
    progress = _progress(notes, verbose=verbose)
    if resume is not None:
        progress.note(f"{journal.n_done} samples are from {journal.path}.")
        if plans[0].base.device != "none":
            progress.note("An expert cache begins anew: hits of the first prompts are lower than without the break.")
    runs = [partial(Bench, plan, progress, journal, part) for part, plan in enumerate(plans)]
    return _measure(runs, plans[0], progress, journal, output, plot)


def _progress(notes: Sequence[str], *, verbose: bool) -> BenchProgress:
    from moeedge.ui.progress import BenchProgress

    if verbose:
        show_log()
    progress = BenchProgress(bar=not verbose)
    for note in notes:
        progress.note(note)
    return progress


def _measure(
    runs: Sequence[Callable[[], Bench | ParallelBench]],
    plan: BenchPlan,
    progress: BenchProgress,
    journal: Journal,
    output: Output,
    plot: Path | None,
) -> int:
    """Runs one after the other, and tells what they found. plan: of the first. Returns the exit code."""
    from moeedge.ui.bench_views import difference_lines, quiet_lines, render
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.plots import draw

    rows: list[BenchRow] = []
    finished = True
    with journal, Interrupt() as interrupt:
        try:
            for begin in runs:
                with begin() as run:
                    interrupt.arm()
                    try:
                        with progress:
                            finished = run.run(cancel=interrupt)
                    finally:
                        interrupt.disarm()
                        rows += run.rows()
                if not finished:
                    break
        finally:  # the measured rows come out, whatever happens
            for line in difference_lines(rows):
                progress.note(line)
            typer.echo(render(rows, output.value), nl=False)
    if plot is not None and not draw(rows, plot):
        reason = "No mode had an expert cache"
        if plan.modes[0].n_parallel is not None:
            reason = "No mode with drafts was measured next to plain decoding"
        elif plan.compares_speculation:
            reason = "No mode was measured next to stock-ar"
        progress.note(f"{reason}: there is nothing to draw.")
    for line in quiet_lines(rows):
        progress.note(line)
    if not finished:
        where = "" if journal.path is None else f" Go on with the same command and --resume {journal.path}"
        progress.note(f"Interrupted: the rows hold what every mode had done.{where}")
        return interrupt.exit_code
    journal.drop()
    return exit_code(rows)


def exit_code(rows: Sequence[BenchRow]) -> int:
    """1, and a message on standard error, if a mode's output differs from the reference by more than a near-tie."""
    wrong = [(row.label, row.output) for row in rows if row.output is not None and not row.output.passed]
    if not wrong:
        return 0
    names = ", ".join(dict.fromkeys(label for label, _ in wrong))
    n = sum(len(output.different) for _, output in wrong)
    print_error(f"The output of {names} differs from stock-ar's at {n} position(s) by more than a near-tie.")
    return EXIT_FAILURE
