"""`moeedge ablate`: a published system taken apart, part by part, in the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import EXIT_FAILURE, Output, cli_errors, print_error, show_log
from moeedge.cli.pair import Pair, check_device, limit_openmp_spin, placement_config, resolve_pair
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.bench.ablation import AblationRow
    from moeedge.data import Prompt


class System(str, Enum):
    """What can be taken apart."""

    SP_MOE = "sp-moe"


_Draft = Annotated[
    str | None,
    typer.Option(
        "-md",
        "--model-draft",
        metavar="FILE",
        help="Draft of the target's hidden size. Default: the target's own quantization, which is made first.",
    ),
]
_DraftType = Annotated[
    str, typer.Option("--draft-type", help="Type of that quantization: q2_k, q3_k, q4_0, q4_k, iq4_nl, q5_0, q8_0.")
]
_DatasetName = Annotated[
    str | None,
    typer.Option("--dataset", metavar="NAME|FILE.jsonl", help="As in bench. Default: toy for the bundled target."),
]
_Cutoff = Annotated[
    str | None,
    typer.Option(
        "--cutoff",
        metavar="LIST",
        help="Cutoff layers: one, or several separated by commas, of which each gets a row of the whole system as in "
        "Figure 14. Default: solved from the measured unit times.",
    ),
]
_CacheRatio = Annotated[
    float, typer.Option("--cache-ratio", help="Share of all expert bytes that the device holds, 0 to 1.")
]


def ablate(
    system: Annotated[System, typer.Argument(metavar="SYSTEM", help="The system: sp-moe.")] = System.SP_MOE,
    model: options.Model = None,
    model_draft: _Draft = None,
    draft_type: _DraftType = "q4_0",
    draft_max: options.DraftMax = 4,
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", help="Tokens of an answer.")] = 64,
    limit: Annotated[int, typer.Option("--limit", help="Prompts of the dataset.")] = 4,
    dataset: _DatasetName = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="How often all is measured.")] = 2,
    cutoff: _Cutoff = None,
    ctx_size: options.CtxSize = 1024,
    threads: options.Threads = 0,
    device: options.Device = "auto",
    cache_ratio: _CacheRatio = 0.3,
    output: Annotated[Output, typer.Option("-o", "--output", help="Print a table, or JSON rows.")] = Output.TABLE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show llama.cpp's log on standard error.")] = False,
) -> None:
    """Take SP-MoE apart as its Figure 12 does: on-demand loading, vanilla prefetch, worker, batched transfers.

    Every variant loads what is missing when its layer comes and runs on the device alone; what the draft's hidden
    states foretell is moved while it drafts, up to the cutoff layer. The variants take turns, and every greedy answer
    is compared with stock llama.cpp's: exit code 1 where one differs by more than a near-tie.
    """
    limit_openmp_spin(device, may_emulate=model is None or paths.is_bundled(model))
    with cli_errors():
        cutoffs = _cutoffs(cutoff)
        if limit < 1 or repetitions < 1 or n_predict < 2:
            raise InputError("There is nothing to measure.", "--limit and -r are at least 1, and -n at least 2.")
        check_device(device)
        if verbose:
            show_log()
        target = resolve_pair(model, model_draft)
        name = dataset or ("toy" if target.bundled else "sample")
        from moeedge.data import load_dataset

        prompts = load_dataset(name).limited(limit).prompts
        _check(target.target, cutoffs, cache_ratio)
        pair = _pair(model, model_draft, draft_type)  # may take long and fills the disk: last before the work
        config = pair.engine_config(
            ctx_size=ctx_size,
            threads=threads,
            draft_max=draft_max,
            n_gpu_layers=None,
            device=device,
            emulate=True,
            placement=placement_config(cache_ratio=cache_ratio, policy=system.value),
        )
        rows = _measure(config, cutoffs, prompts, n_predict, repetitions)
        _show(
            rows, {"model": pair.target.name, "device": device, "gamma": draft_max, "cache_ratio": cache_ratio}, output
        )


def _check(target: Path, cutoffs: list[int] | None, cache_ratio: float) -> None:
    """Raises InputError where nothing could come out."""
    from moeedge.llama.gguf_file import summarize

    layers = summarize(target).expert_layers
    if not layers:
        raise InputError(f"{target.name} has no experts: there is nothing to take apart.", "Name a MoE model with -m.")
    if not 0 < cache_ratio <= 1:
        raise InputError(f"--cache-ratio must be above 0 and at most 1, not {cache_ratio:g}.", "The default is 0.3.")
    n_layers = layers[-1] + 1
    if cutoffs and max(cutoffs) > n_layers:
        raise InputError(f"--cutoff {max(cutoffs)} is beyond the {n_layers} layers of {target.name}.", "Name fewer.")


def _pair(model: Path | None, draft: str | None, draft_type: str) -> Pair:
    from moeedge.llama.draft_model import quantized
    from moeedge.ui.console import say, stderr_console

    pair = resolve_pair(model, draft)
    if draft is None:
        pair = Pair(pair.target, quantized(pair.target, draft_type))
        say(stderr_console(), f"Draft: {pair.draft}")
    return pair


def _measure(
    config: EngineConfig,
    cutoffs: list[int] | None,
    prompts: Sequence[Prompt],
    n_predict: int,
    repetitions: int,
) -> list[AblationRow]:
    from moeedge.bench.ablation import figure_12, figure_14, run_ablation, solved_cutoff
    from moeedge.ui.console import notifier, say, stderr_console

    err = stderr_console()
    if cutoffs is None:
        solved, sentence = solved_cutoff(config, notifier(err))
        say(err, sentence)
        cutoffs = [solved]
    variants = figure_12(cutoffs[0]) if len(cutoffs) == 1 else figure_14(cutoffs)
    return run_ablation(
        config,
        variants,
        prompts,
        n_predict=n_predict,
        repetitions=repetitions,
        notify=notifier(err),
    )


def _show(rows: list[AblationRow], about: dict[str, Any], output: Output) -> None:
    """Prints the rows; exit code 1 where an answer is not stock's."""
    from moeedge.ui.bench_views import print_ablation
    from moeedge.ui.console import stdout_console

    if output is Output.JSON:
        typer.echo(json.dumps([about | asdict(row) for row in rows], indent=1))
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
