"""`moeedge lab ablate`: the parts of a published system, one after the other, in the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import EXIT_FAILURE, emit, integers, print_error, show_log
from moeedge.cli.declare import Output, derive, option
from moeedge.cli.engine_options import EngineOptions, PlacementOptions
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.lab.experiments.ablation import AblationRow


class System(str, Enum):
    """Systems that can be ablated."""

    SP_MOE = "sp-moe"


SystemName = Annotated[System, typer.Argument(metavar="SYSTEM", help="System to ablate; sp-moe is the only one.")]
SameWidthDraft = Annotated[
    str | None,
    derive(
        options.ModelDraft,
        metavar="FILE",
        help="Draft model with the target's hidden size. Default: the target's own quantization, which is made first.",
    ),
]
DraftType = Annotated[
    str,
    option(
        options.MODEL,
        "--draft-type TYPE",
        "Type of the target's quantization that drafts without -md: q2_k, q3_k, q4_0, q4_k, iq4_nl, q5_0, q8_0.",
    ),
]
Cutoff = Annotated[
    str | None,
    option(
        options.PLACEMENT,
        "--cutoff LIST",
        "Last layer whose experts are loaded ahead while drafting; each of several, separated by commas, is a row of "
        "the complete system (Figure 14). Default: computed from measured times.",
    ),
]


def ablate(
    system: SystemName = System.SP_MOE,
    model: options.Model = None,
    offline: options.Offline = False,
    model_draft: SameWidthDraft = None,
    draft_type: DraftType = "q4_0",
    draft_max: options.DraftMax = 4,
    n_predict: options.NPredict = 64,
    limit: options.Limit = 4,
    dataset: options.Dataset = None,
    repetitions: options.Repetitions = 2,
    cutoff: Cutoff = None,
    ctx_size: options.CtxSize = 1024,
    threads: options.Threads = 0,
    device: options.Device = "auto",
    backend: options.Backend = None,
    cache_ratio: options.CacheRatio = 0.3,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Measure what each part of SP-MoE gains: loading on demand, prefetch, a worker, batched transfers.

    SP-MoE is a published system (its Figure 12 is repeated here): the device computes all experts, and a missing one is
    loaded when its layer comes. Prefetch moves experts that the draft model's hidden states predict, up to the cutoff
    layer. The variants take turns; exit code 1 if an answer differs from stock llama.cpp's by more than a near-tie (two
    tokens of almost equal score).
    """
    engine = EngineOptions(
        model=model,
        model_draft=model_draft,
        draft_max=str(draft_max),
        ctx_size=ctx_size,
        threads=threads,
        device=device,
    )
    engine.limit_openmp_spin(emulate_bundled=True)
    from moeedge.lab.experiments.ablation import figure_12, figure_14, run_ablation, solved_cutoff
    from moeedge.lab.experiments.quantized_draft import quantized
    from moeedge.ui.console import notifier, say, stderr_console

    cutoffs = None if cutoff is None else integers(cutoff, "--cutoff")
    if limit < 0 or repetitions < 1 or n_predict < 2:
        raise InputError("There is nothing to measure.", "Give --limit of 0 or more, -r of 1 or more, -n of 2 or more.")
    if verbose:
        show_log()
    placement = PlacementOptions(cache_ratio=cache_ratio, policy=system.value)
    config = engine.config(placement.config(), emulate_bundled=True)
    name = dataset or ("toy" if paths.is_bundled(config.model) else "sample")
    from moeedge.data.datasets import load_dataset

    prompts = load_dataset(name).limited(limit or None).prompts
    _check(config.model, cutoffs, cache_ratio)
    err = stderr_console()
    if model_draft is None:  # may take long and fills the disk: last before the work
        config = replace(config, draft=quantized(config.model, draft_type))
        say(err, f"Draft: {config.draft}")
    if cutoffs is None:
        solved, sentence = solved_cutoff(config, notifier(err))
        say(err, sentence)
        cutoffs = [solved]
    rows = run_ablation(
        config,
        figure_12(cutoffs[0]) if len(cutoffs) == 1 else figure_14(cutoffs),
        prompts,
        n_predict=n_predict,
        repetitions=repetitions,
        notify=notifier(err),
    )
    about = {"model": config.model.name, "device": device, "gamma": draft_max, "cache_ratio": cache_ratio}
    _report(rows, about, output)


def _check(target: Path, cutoffs: list[int] | None, cache_ratio: float | None) -> None:
    """Raises InputError for options that cannot have a result."""
    from moeedge.llama.gguf_file import read_summary

    layers = read_summary(target).expert_layers
    if not layers:
        raise InputError(
            f"{target.name} has no experts: there is nothing to ablate.", "Give a Mixture-of-Experts model with -m."
        )
    if not cache_ratio:
        raise InputError("--cache-ratio must be more than 0.", "The default is 0.3.")
    n_layers = layers[-1] + 1
    for cutoff in cutoffs or ():
        if not 0 <= cutoff <= n_layers:
            raise InputError(f"{target.name} has no layer for --cutoff {cutoff}.", f"Give 0 to {n_layers}.")


def _report(rows: list[AblationRow], about: Mapping[str, object], output: Output) -> None:
    """Print the rows; exit code 1 if an answer differs from stock's."""
    from moeedge.lab.views.tables import print_ablation

    emit(output, lambda rows: json.dumps([{**about, **asdict(row)} for row in rows], indent=1), print_ablation, rows)
    different = sum(row.answers - row.equal for row in rows)
    if different:
        print_error(f"{different} answers differ from stock llama.cpp's by more than a near-tie.")
        raise typer.Exit(EXIT_FAILURE)
