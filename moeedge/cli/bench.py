"""`moeedge bench`: stock llama.cpp, the same with drafts, and moeedge, side by side in one process."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge.cli.common import EXIT_FAILURE, cli_errors, print_error
from moeedge.cli.device import check_device
from moeedge.cli.pair import resolve_pair
from moeedge.engine.types import EngineConfig

if TYPE_CHECKING:
    from moeedge.bench.plan import BenchPlan
    from moeedge.bench.record import BenchRow
    from moeedge.data import Dataset

_MODEL = "Model"
_WORK = "What is measured"
_HARDWARE = "Hardware"
# llama-bench's
_SYNTHETIC_PROMPT = 512
_SYNTHETIC_ANSWER = 128


class Output(str, Enum):
    """How the rows are printed."""

    MD = "md"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"


def bench(
    model: Annotated[
        Path | None,
        typer.Option("-m", "--model", help="Model file (GGUF); the bundled one without it.", rich_help_panel=_MODEL),
    ] = None,
    model_draft: Annotated[
        str | None,
        typer.Option(
            "-md",
            "--model-draft",
            metavar="FILE|ngram|none",
            help="Where drafts come from. Without it the bundled model gets the bundled draft and any other model "
            "none; without a draft, stock-sd is left out and moeedge decodes one token at a time.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    draft_max: Annotated[
        int, typer.Option("--draft-max", help="Tokens per draft (gamma); 0: none.", rich_help_panel=_MODEL)
    ] = 4,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="NAME|FILE.jsonl",
            help="Prompts to answer: mtbench, humaneval, gsm8k, mmlu-pro, alpaca, cnndm, qa, sample, or a file whose "
            'lines are objects with "prompt", "turns" or "messages". Looked for in $MOEEDGE_DATA, then in the cache, '
            "then on the hub. Without it: llama-bench's synthetic tests.",
            rich_help_panel=_WORK,
        ),
    ] = None,
    offline_sample: Annotated[
        bool,
        typer.Option(
            "--offline-sample",
            help="Do not ask the hub; where the dataset is not on this machine, take moeedge's own few prompts of the "
            "same kind. Their rows are named sample.",
            rich_help_panel=_WORK,
        ),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", help="Only so many prompts, spread evenly over the dataset.", rich_help_panel=_WORK),
    ] = None,
    n_prompt: Annotated[
        int | None,
        typer.Option(
            "-p",
            "--n-prompt",
            help="Synthetic prefill of so many random tokens (row ppN); 0: none. Default: 512 without --dataset, "
            "else none.",
            rich_help_panel=_WORK,
        ),
    ] = None,
    n_predict: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--n-predict",
            help="With --dataset: tokens of an answer at most. Without: synthetic decoding of so many random tokens "
            "(row tgN); 0: none. Default: 128.",
            rich_help_panel=_WORK,
        ),
    ] = None,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", help="How often everything is measured.", rich_help_panel=_WORK)
    ] = 3,
    modes: Annotated[
        str,
        typer.Option(
            "--modes",
            help="What is compared, separated by commas: stock-ar (llama.cpp, one token at a time; the others are "
            "checked against it), stock-sd (the same with the draft), moeedge, moeedge-ar (moeedge without the draft).",
            rich_help_panel=_WORK,
        ),
    ] = "stock-ar,stock-sd,moeedge",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers go on to -n tokens.", rich_help_panel=_WORK)
    ] = False,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="Format of the rows on standard output.")
    ] = Output.MD,
    ctx_size: Annotated[
        int,
        typer.Option(
            "-c",
            "--ctx-size",
            help="Context in tokens; 0: what the longest prompt and its answers need, at most what the model was "
            "trained with. Prompts that do not fit are left out.",
            rich_help_panel=_HARDWARE,
        ),
    ] = 0,
    threads: Annotated[
        int, typer.Option("-t", "--threads", help="CPU threads; 0: one per physical core.", rich_help_panel=_HARDWARE)
    ] = 0,
    n_gpu_layers: Annotated[
        int,
        typer.Option(
            "-ngl", "--n-gpu-layers", help="Layers that llama.cpp keeps on the GPU.", rich_help_panel=_HARDWARE
        ),
    ] = 0,
    device: Annotated[
        str,
        typer.Option(
            "-dev",
            "--device",
            metavar="auto|none|NAME",
            help="Device to use; moeedge devices lists the names.",
            rich_help_panel=_HARDWARE,
        ),
    ] = "auto",
) -> None:
    """Measure speed, acceptance and equality of the output: one row per test and mode.

    Answers are greedy. The modes take turns at every prompt, so that a drift of the machine falls on all alike; ratios
    are medians over pairs of neighbours. Exit code 1 when a mode's answers differ from stock-ar's by more than a
    near-tie.
    """
    with cli_errors():
        from moeedge.data import load_dataset, load_sample

        check_device(device)
        pair = resolve_pair(model, model_draft)
        base = EngineConfig(
            model=pair.target,
            draft=pair.draft,
            n_ctx=ctx_size,
            n_threads=threads,
            gamma=draft_max,
            n_gpu_layers=0 if device == "none" else n_gpu_layers,
            device=device,
        )
        prompts = None
        if dataset is not None:
            prompts = load_dataset(dataset, offline_sample=offline_sample)
        elif offline_sample:
            prompts = load_sample()
        plan, notes = make_plan(
            base,
            modes,
            prompts,
            limit=limit,
            n_prompt=n_prompt,
            n_predict=n_predict,
            repetitions=repetitions,
            ignore_eos=ignore_eos,
        )
        code = _measure(plan, notes, output.value)
        if code:
            raise typer.Exit(code)


def make_plan(
    base: EngineConfig,
    modes: str,
    dataset: Dataset | None,
    *,
    limit: int | None,
    n_prompt: int | None,
    n_predict: int | None,
    repetitions: int,
    ignore_eos: bool,
) -> tuple[BenchPlan, list[str]]:
    """What the options mean together, and a sentence for each mode that was left out.

    -p and -n are llama-bench's sizes without a dataset; with one, -n is the length of an answer.
    """
    from moeedge.bench.modes import applicable_modes, parse_modes
    from moeedge.bench.plan import BenchPlan

    chosen, notes = applicable_modes(parse_modes(modes), has_draft=base.draft is not None and base.gamma > 0)
    with_data = dataset is not None
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, not {limit}")
    length = _SYNTHETIC_ANSWER if n_predict is None else n_predict
    plan = BenchPlan(
        base=base,
        modes=chosen,
        dataset=dataset.limited(limit) if dataset is not None else None,
        limit=limit,
        n_predict=length if with_data else _SYNTHETIC_ANSWER,
        n_prompt=n_prompt if n_prompt is not None else 0 if with_data else _SYNTHETIC_PROMPT,
        n_gen=0 if with_data else length,
        repetitions=repetitions,
        ignore_eos=ignore_eos,
    )
    return plan, notes


def _measure(plan: BenchPlan, notes: list[str], form: str) -> int:
    """Runs the plan, prints the rows, returns the exit code."""
    from moeedge.bench.runner import Bench
    from moeedge.ui.bench_progress import BenchProgress
    from moeedge.ui.bench_table import difference_lines, render
    from moeedge.ui.interrupt import Interrupt

    progress = BenchProgress()
    for note in notes:
        progress.note(note)
    with Bench(plan, progress) as run, Interrupt() as interrupt:
        interrupt.arm()
        with progress:
            finished = run.run(cancel=interrupt)
        interrupt.disarm()
        rows = run.rows()
    for line in difference_lines(rows):
        progress.note(line)
    typer.echo(render(rows, form), nl=False)
    if not finished:
        progress.note("Interrupted: the rows hold what every mode had done.")
        return interrupt.exit_code
    return _judge(rows)


def _judge(rows: list[BenchRow]) -> int:
    wrong = [row for row in rows if row.output is not None and not row.output.passed]
    if not wrong:
        return 0
    names = ", ".join(dict.fromkeys(row.mode for row in wrong))
    n = sum(len(row.output.different) for row in wrong if row.output is not None)
    print_error(f"The output of {names} differs from stock-ar's in {n} places that are no near-ties.")
    return EXIT_FAILURE
