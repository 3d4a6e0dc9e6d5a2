"""`moeedge ablate`: a published system taken apart, part by part, in the engine."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import EXIT_FAILURE, cli_errors, print_error
from moeedge.cli.device import check_device
from moeedge.cli.log import show_log
from moeedge.cli.pair import Pair, resolve_pair
from moeedge.cli.placement import calm_idle_threads, placement_config
from moeedge.errors import InputError


class System(str, Enum):
    """What can be taken apart."""

    SP_MOE = "sp-moe"


class Output(str, Enum):
    """How the rows are printed."""

    TABLE = "table"
    JSON = "json"


def ablate(
    system: Annotated[System, typer.Argument(help="The system: sp-moe.")] = System.SP_MOE,
    model: options.Model = None,
    model_draft: Annotated[
        str | None,
        typer.Option(
            "-md",
            "--model-draft",
            metavar="FILE",
            help="Draft of the target's hidden size. Default: the target's own quantization, which is made first.",
        ),
    ] = None,
    draft_type: Annotated[
        str, typer.Option("--draft-type", help="Type of that quantization: q2_k, q3_k, q4_0, q4_k, iq4_nl, q5_0, q8_0.")
    ] = "q4_0",
    draft_max: options.DraftMax = 4,
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", help="Tokens of an answer.")] = 64,
    limit: Annotated[int, typer.Option("--limit", help="Prompts of the dataset.")] = 4,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", metavar="NAME|FILE.jsonl", help="As in bench. Default: toy for the bundled target."),
    ] = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="How often all is measured.")] = 2,
    cutoff: Annotated[
        str | None,
        typer.Option(
            "--cutoff",
            metavar="LIST",
            help="Cutoff layers: one, or several separated by commas, of which each gets a row of the whole system as "
            "in Figure 14. Default: solved from the measured unit times.",
        ),
    ] = None,
    ctx_size: options.CtxSize = 1024,
    threads: options.Threads = 0,
    device: options.Device = "auto",
    cache_ratio: Annotated[
        float, typer.Option("--cache-ratio", help="Share of all expert bytes that the device holds, 0 to 1.")
    ] = 0.3,
    output: Annotated[Output, typer.Option("-o", "--output", help="Print a table, or JSON rows.")] = Output.TABLE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show llama.cpp's log on standard error.")] = False,
) -> None:
    """Take SP-MoE apart as its Figure 12 does: on-demand loading, vanilla prefetch, worker, batched transfers.

    Every variant loads what is missing when its layer comes and runs on the device alone; what the draft's hidden
    states foretell is moved while it drafts, up to the cutoff layer. The variants take turns, and every greedy answer
    is compared with stock llama.cpp's: exit code 1 where one differs by more than a near-tie.
    """
    calm_idle_threads(device, may_emulate=model is None or paths.is_bundled(model))
    from moeedge.bench.ablation import figure_12, figure_14, run_ablation, solved_cutoff
    from moeedge.data import load_dataset
    from moeedge.engine.quantize import quantized
    from moeedge.ui.ablation_view import print_ablation
    from moeedge.ui.console import say, stderr_console, stdout_console

    with cli_errors():
        err = stderr_console()
        cutoffs = _cutoffs(cutoff)
        if limit < 1 or repetitions < 1:
            raise InputError("There is nothing to measure.", "--limit and -r are at least 1.")
        check_device(device)
        if verbose:
            show_log()
        pair = resolve_pair(model, model_draft)
        if model_draft is None:
            pair = Pair(pair.target, quantized(pair.target, draft_type))
            say(err, f"Draft: {pair.draft}")
        config = pair.engine_config(
            ctx_size=ctx_size,
            threads=threads,
            draft_max=draft_max,
            n_gpu_layers=None,
            device=device,
            emulate=True,
            placement=placement_config(cache_ratio=cache_ratio, policy=system.value),
        )
        if cutoffs is None:
            solved, sentence = solved_cutoff(config, tell=lambda line: say(err, line))
            say(err, sentence)
            variants = figure_12(solved)
        else:
            variants = figure_12(cutoffs[0]) if len(cutoffs) == 1 else figure_14(cutoffs)
        name = dataset or ("toy" if pair.bundled else "sample")
        prompts = [
            [message.as_dict() for message in prompt.turns[0]] for prompt in load_dataset(name).limited(limit).prompts
        ]
        rows = run_ablation(
            config,
            variants,
            prompts,
            n_predict=n_predict,
            repetitions=repetitions,
            progress=lambda line: say(err, line),
        )
        if output is Output.JSON:
            about = {"model": pair.target.name, "device": device, "gamma": draft_max, "cache_ratio": cache_ratio}
            typer.echo(json.dumps([about | row.to_dict() for row in rows], indent=1))
        else:
            print_ablation(rows, stdout_console())
        different = sum(row.answers - row.equal for row in rows)
        if different:
            print_error(f"{different} answers differ from stock llama.cpp's by more than a near-tie.")
            raise typer.Exit(EXIT_FAILURE)


def _cutoffs(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise InputError(f'"{text}" is no list of layers.', "Write for instance 12, or 0,8,16,24.")
    return found
