"""`moeedge lab rivals`: moeedge next to llama.cpp's and ik_llama.cpp's own programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from moeedge.cli.bench_options import sizes
from moeedge.cli.common import emit, integers
from moeedge.cli.model_files import resolve_models
from moeedge.cli.options import Output, declare, flatten
from moeedge.lab.experiments.rivals import OURS, RIVALS, RivalPlan, RivalRow, RivalSample
from moeedge.records import as_dict
from moeedge.ui.tables import Column, csv_text, json_text, markdown, print_table, text_column

if TYPE_CHECKING:
    from rich.console import Console

_PROGRAM = {"exists": True, "dir_okay": False}
declare(
    """
    [Programs]
    --llama-bench FILE  llama-bench of llama.cpp: weights repacked, and as in the file.
    --ik-llama-bench FILE  llama-bench of ik_llama.cpp: with and without flash attention, and repacking at run time.
    --llama-speculative-simple FILE  llama-speculative-simple of llama.cpp, with -md.
    --ik-speculative FILE  llama-spec-bench of ik_llama.cpp, with -md.
    [Model]
    --model-draft FILE|NAME|none  Draft model of the test "drafts", a greedy answer of -n tokens. Default: none.
    --draft-max LIST  Tokens per draft, of which each program's fastest counts; moeedge chooses its own.
    [Workload]
    -p, --n-prompt LIST  Prompts of N random tokens: a row ppN for each N.
    --n-predict N  Tokens decoded one by one: a row tgN.
    --repetitions N  Processes of each program and setting, of which the median counts.
    --samples N  Samples of each test of random tokens in a process: more for tests that take little time.
    --no-warmup  Measure at once: otherwise each process runs each test once more, which takes long with long prompts.
    --resume FILE  Go on with an interrupted run: the same command, and the file that it named.
    []
    --output text|md|csv|json  Format of the table.
    """,
    "rivals",
    read={sizes: "n_prompt", integers: "draft_max"},
    **dict.fromkeys(("llama_bench", "ik_llama_bench", "llama_speculative_simple", "ik_speculative"), _PROGRAM),
    n_predict={"least": 1},
    repetitions={"least": 1},
    samples={"least": 1},
)


@flatten
def rivals(*, plan: RivalPlan, resume: str | None = None, output: Output = Output.TEXT) -> None:
    """Measure moeedge next to llama.cpp's and ik_llama.cpp's own programs, in turns.

    Every program is a process of its own in each repetition, with the same file and number of threads. The table has
    the median speed of each with its fastest settings, in tokens/s; -o json keeps all samples.
    """
    from moeedge.bench.journal import Journal
    from moeedge.data.datasets import load_toy
    from moeedge.hardware.host import others_now, physical_cores
    from moeedge.hardware.provenance import read_provenance
    from moeedge.lab.experiments.rivals import make_rows, measure, settings_of
    from moeedge.llama.model import Model
    from moeedge.run import Run
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import Bar, stderr_console

    files = resolve_models(plan.model, plan.model_draft or "none")
    plan = replace(plan, target=files.target, threads=plan.threads or physical_cores())
    if isinstance(files.draft, Path):
        question = load_toy().prompts[0].turns[0][-1].content
        with Model.load(files.target, header_only=True) as header:
            rendered = header.render_chat([{"role": "user", "content": question}])
        plan = replace(plan, draft_file=files.draft, question=question, rendered=rendered)
    source, others = read_provenance(plan.target), others_now()
    settings, samples = [settings_of(plan, source)], list[RivalSample]()
    journal = Journal.begin(settings) if resume is None else Journal.resume(resume, settings, RivalSample)
    with TemporaryDirectory() as folder, Bar(stderr_console(), "processes") as bar, Interrupt(armed=True) as interrupt:
        run = Run(bar.note, cancelled=interrupt, progress=bar)
        if journal.path is None:
            run.say("No file can be written to the cache folder, or its disk is full: this run cannot be resumed.")
        with journal:
            samples.extend(measure(plan, list(plan.variants(Path(folder), run)), journal, run))
    rows = make_rows(plan, samples, source=source, other_load_before=others)
    if output is Output.MD:
        typer.echo(markdown(columns(rows), rows), nl=False)
    elif output is Output.CSV:
        records = [as_dict(row) for row in rows]
        typer.echo(csv_text([row | row.pop("speeds") | {"samples": len(row["samples"])} for row in records]), nl=False)
    else:
        emit(output, lambda _: json_text([as_dict(row) for row in rows]), print_rivals, rows)
    if interrupt.exit_code:
        where = "" if journal.path is None else f" Go on with the same command and --resume {journal.path}"
        bar.note(f"Interrupted.{where}")
        raise typer.Exit(interrupt.exit_code)
    journal.drop()


def columns(rows: Sequence[RivalRow]) -> list[Column]:
    """A column for each program's speed."""
    measured = [name for name in RIVALS if any(name in row.speeds for row in rows)]
    speeds = [Column(f"{name} t/s", partial(_speed_ts, name), ".2f") for name in measured]
    # of the speed at which memory delivers the weights, or the processor multiplies them
    limits = [Column("of limit", _limit_share, ".2f")] if any(map(_limit_share, rows)) else []
    last = [Column(f"{OURS} / fastest", _ratio_text, str), text_column("fastest", lambda row: row.fastest or "")]
    return [text_column("test", "test"), *speeds, *limits, *last]


def _speed_ts(name: str, row: RivalRow) -> float | None:
    return row.speeds.get(name)


def _ratio_text(row: RivalRow) -> str | None:
    """The ratio with its interval, which records before 0.31.0 do not have."""
    if row.ratio is None or getattr(row, "low", None) is None:
        return None if row.ratio is None else f"{row.ratio:.2f}"
    return f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})"


def _limit_share(row: RivalRow) -> float | None:
    limit_ts = getattr(row, "limit_ts", None)  # records before 0.20.0 have none
    return row.speeds[OURS] / limit_ts if limit_ts and OURS in row.speeds else None


def print_rivals(rows: Sequence[RivalRow], console: Console) -> None:
    builds = {sample.rival: sample.build for row in rows for sample in row.samples if sample.build}
    for row in rows[:1]:
        print_table(console, columns(rows), rows, title=f"{row.model}, {row.threads} threads, {row.cpu}")
    console.print("versions: " + ", ".join(f"{name} {build}" for name, build in builds.items()), soft_wrap=True)
