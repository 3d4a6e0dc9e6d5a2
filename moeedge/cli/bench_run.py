"""Runs what `moeedge bench` measures, prints its rows, draws and records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moeedge.cli.bench_exit import exit_code
from moeedge.cli.common import show_log
from moeedge.cli.declare import Output
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.bench.config import BenchMode, BenchPlan
    from moeedge.bench.records import BenchRow
    from moeedge.bench.runner import Bench
    from moeedge.ui.progress import BenchProgress


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
    replayed: list[BenchRow] = []
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
                    if finished and recorded is not None and (run.arms.replays or trace_out is not None):
                        replayed = _record(run, recorded, progress, trace_out)
                if not finished:
                    break
        finally:  # the measured rows come out, whatever happens
            for line in difference_lines(rows):
                progress.note(line)
            typer.echo(render([*rows, *replayed], output.value), nl=False)
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
    """The mode whose routing is written to `trace_out` or replayed, None if neither is asked for.

    Raises InputError, before the measurement, where there is none to record.
    """
    from moeedge.bench.harness import recorded_mode
    from moeedge.ui.console import check_output

    replays = [mode.name for mode in plan.modes if mode.method == "replay"]
    if trace_out is None and not replays:
        return None
    if plan.dataset is None:
        asked = "--trace-out records" if trace_out is not None else f"{replays[0]} replays"
        raise InputError(f"{asked} answers, and synthetic tests have none.", "Name prompts with --dataset.")
    if trace_out is not None:
        check_output(trace_out)
    return recorded_mode(plan.modes)


def _record(run: Bench, recorded: BenchMode, progress: BenchProgress, trace_out: Path | None) -> list[BenchRow]:
    """Answers the prompts once more, keeps their routing, and returns the rows that are replayed on it."""
    from moeedge.bench.harness import record_answers
    from moeedge.engine.recording import unseen_layers

    progress.note(f"Recording the routing of {recorded.label}.")
    with run.arms.recorder(recorded) as arm:
        trace = record_answers(arm, run.prompts, run.plan)
        if unseen := unseen_layers(arm.session):
            progress.note(unseen)
    replayed = run.replayed(recorded, trace)
    if trace_out is not None:
        trace.save(trace_out)
    return replayed
