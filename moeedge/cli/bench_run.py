"""`moeedge bench` once its options are read: measures, and shows the rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from moeedge.bench.config import (
    DEFAULT_MODES,
    DEFAULT_REPETITIONS,
    GPU_MODES,
    SYNTHETIC_ANSWER,
    BenchPlan,
    DraftLength,
    Sweep,
    applicable_modes,
    parse_modes,
    parse_policies,
    parse_ratios,
)
from moeedge.bench.journal import Journal, folder, settings_of
from moeedge.bench.records import BenchRow
from moeedge.bench.runner import Bench
from moeedge.cli.common import EXIT_FAILURE, print_error
from moeedge.cli.engine_options import layer_notes as layer_notes
from moeedge.cli.options import Output
from moeedge.data.datasets import load_datasets as load_datasets
from moeedge.data.prompts import Dataset
from moeedge.engine.loading import resolve_device as resolve_device
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.provenance import read_provenance
from moeedge.policies.registry import POLICIES
from moeedge.run import Run
from moeedge.ui.bench_plots import draw
from moeedge.ui.bench_views import difference_lines, quiet_lines, render
from moeedge.ui.chat.interrupt import Interrupt
from moeedge.ui.console import Bar, stderr_console, supports_panel
from moeedge.ui.console import check_picture as check_picture


def make_sweep(
    policy: str | None, cache_ratio: str | None, gammas: tuple[DraftLength, ...], counts: tuple[int, ...]
) -> Sweep:
    """The sweep of these options, without budgets. Raises InputError."""
    return Sweep(parse_policies(policy, POLICIES), parse_ratios(cache_ratio), gammas=gammas, counts=counts)


def default_modes(base: EngineConfig, *, together: bool) -> str:
    """The modes without --modes. together: several texts at once."""
    has_layers = not together and resolve_device(base).kind == "gpu"
    return f"{DEFAULT_MODES},{GPU_MODES}" if has_layers else DEFAULT_MODES


def make_bench_plan(
    base: EngineConfig,
    modes: str,
    dataset: Dataset | None,
    *,
    limit: int | None = None,
    n_predict: int | None = None,
    repetitions: int | None = None,
    score: bool = False,
    sweep: Sweep | None = None,
    **others: Any,
) -> tuple[BenchPlan, list[str]]:
    """The plan of the options (others: fields of it as they are), and a sentence for each mode that was left out."""
    columns, notes = applicable_modes(parse_modes(modes), has_draft=base.draft is not None and base.gamma > 0)
    if not columns:
        raise InputError("No mode is left to measure.", " ".join(notes))
    if n_predict is None:  # scores need complete answers, but no repetition: greedy answers are always the same
        n_predict = dataset.answer_tokens if dataset is not None and score else SYNTHETIC_ANSWER
    plan = BenchPlan(
        base=base,
        modes=(sweep or Sweep()).modes(columns),
        dataset=None if dataset is None else dataset.limited(limit),
        limit=limit,
        n_predict=n_predict,
        repetitions=repetitions if repetitions is not None else 1 if score else DEFAULT_REPETITIONS,
        score=score,
        **others,
    )
    return plan, notes


def has_axis(plans: Sequence[BenchPlan]) -> bool:
    """Whether there is something to draw over: threads, batches, or prompts and depths of one kind of test."""
    settings = {(plan.base.n_threads, plan.base.n_batch, plan.base.n_ubatch) for plan in plans}
    tests = plans[0].tests
    return len(settings) > 1 or len({(test.n_prompt, test.depth, test.n_gen) for test in tests}) > len(
        {test.n_gen for test in tests}
    )


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
    environment = read_provenance(plans[0].base.model, trace=plans[0].base.routing)
    settings = [settings_of(plan, environment) for plan in plans]
    journal = Journal.begin(settings) if resume is None else Journal.resume(resume, settings)
    console = stderr_console()
    progress = Bar(console, "samples", is_shown=not verbose and supports_panel(console))
    run = Run(progress.note, progress=progress)
    for note in notes:
        progress.note(note)
    if journal.path is None:
        progress.note(f"No file can be written to {folder()}, or its disk is full: this run cannot be resumed.")
    if resume is not None:
        progress.note(f"{journal.n_done} samples are from {journal.path}.")
        if plans[0].base.device != "none":
            progress.note("An expert cache begins anew: hits of the first prompts are lower than without the break.")
    rows: list[BenchRow] = []
    finished = True
    with journal, Interrupt() as interrupt:
        run.cancelled = interrupt
        try:
            for part, plan in enumerate(plans):
                with Bench(plan, run, journal, part) as bench:
                    interrupt.arm()
                    try:
                        with progress:
                            finished = bench.measure()
                    finally:
                        interrupt.disarm()
                        rows += bench.rows()
                if not finished:
                    break
        finally:  # the measured rows come out, whatever happens
            for line in difference_lines(rows):
                progress.note(line)
            typer.echo(render(rows, output.value), nl=False)
    if plot is not None and not draw(rows, plot):
        reason = "No two rows differ in what an axis shows"
        if any(mode.is_swept for mode in plans[0].modes):
            reason = "No mode had an expert cache"
        if plans[0].decodes_together:
            reason = "No mode with drafts was measured next to plain decoding"
        elif plans[0].compares_speculation:
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
