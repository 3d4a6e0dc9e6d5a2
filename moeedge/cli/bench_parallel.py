"""`moeedge bench --parallel`: texts that are decoded together, and the batch-size curve of speculation."""

from __future__ import annotations

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
    from moeedge.bench.config import BenchPlan

Parallel = Annotated[
    str | None,
    option(
        options.WORK,
        "--parallel LIST",
        "Decode N prompts of the dataset together, each with its own drafts, once per N: throughput, and what "
        "speculation gains over plain decoding with the same N. First turns only.",
    ),
]
Fit = Annotated[
    Path | None,
    option(
        options.WORK,
        "--fit FILE",
        "With --parallel: the JSON of moeedge fit for the same pair; its predicted speed-ups stand next to the "
        "measured ones.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How many texts are decoded together, and what predicts their speed-up."""

    parallel: Parallel = None
    fit: Fit = None

    def counts(self) -> tuple[int, ...]:
        """Numbers of texts, ascending; () without --parallel. Raises InputError."""
        from moeedge.bench.config import parse_numbers
        from moeedge.engine.types import MAX_N_PARALLEL

        if self.parallel is None:
            if self.fit is not None:
                raise InputError("--fit predicts the batch-size curve.", "Add --parallel 1,2,4,8.")
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


def measure_parallel(
    plan: BenchPlan, fit: Path | None, notes: list[str], output: Output, *, verbose: bool, plot: Path | None
) -> int:
    """Runs the plan, prints the rows and draws the curve. Returns the exit code."""
    from moeedge.bench.fit_report import read_fit
    from moeedge.bench.parallel import ParallelBench
    from moeedge.engine.loading import resolve_device
    from moeedge.ui.bench_views import difference_lines, render
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.parallel_plots import draw_batch_curves
    from moeedge.ui.progress import BenchProgress

    pair = None if fit is None else read_fit(fit)
    if pair is not None:
        notes = notes + pair.differences(plan.base, resolve_device(plan.base).label)
    if verbose:
        show_log()
    progress = BenchProgress(bar=not verbose)
    for note in notes:
        progress.note(note)
    with ParallelBench(plan, pair, progress) as run, Interrupt() as interrupt:
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
