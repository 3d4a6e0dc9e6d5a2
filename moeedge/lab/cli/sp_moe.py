"""`moeedge lab ablate` and `pair`: SP-MoE's parts, one after the other, and its predictor for a draft and a target."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge import paths
from moeedge.cli.common import EXIT_FAILURE, emit, integers, print_error
from moeedge.cli.engine_options import EngineOptions, LlamaOptions, PlacementOptions, TextOptions
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError
from moeedge.records import as_dict
from moeedge.run import Run
from moeedge.ui.chat.interrupt import Interrupt
from moeedge.ui.tables import Column, print_table, text_column
from moeedge.units import visible

if TYPE_CHECKING:
    from rich.console import Console

    from moeedge.lab.experiments.sp_moe import AblationRow, PairSimilarity


class System(str, Enum):
    SP_MOE = "sp-moe"


SystemName = Annotated[System, typer.Argument(metavar="SYSTEM", help="System to ablate; sp-moe is the only one.")]
declare(
    """
    --model-draft FILE  Draft model with the target's hidden size. Default: the target's own quantization, which is
        made first.
    --draft-max N  Tokens per draft (gamma).
    [Model]
    --draft-type TYPE  Type of the target's quantization that drafts without -md: q2_k, q3_k, q4_0, q4_k, iq4_nl, q5_0,
        q8_0.
    [Expert placement]
    --cutoff LIST  Last layer whose experts are loaded ahead while drafting; each of several, separated by commas, is a
        row of the complete system (Figure 14). Default: computed from measured times.
    """,
    "ablate",
    read={integers: "cutoff"},
)


@partial(flatten, ctx_size=1024)
def ablate(
    system: SystemName = System.SP_MOE,
    draft_type: str = "q4_0",
    draft_max: int = 4,
    n_predict: int = 64,
    limit: int = 4,
    dataset: str | None = None,
    repetitions: int = 2,
    cutoff: list[int] | None = None,
    *,
    engine: EngineOptions,
    cache_ratio: float | None = 0.3,
    output: Output = Output.TEXT,
    verbose: bool = False,
) -> None:
    """Measure what each part of SP-MoE gains: loading on demand, prefetch, a worker, batched transfers.

    SP-MoE is a published system (its Figure 12 is repeated here): the device computes all experts, and a missing one is
    loaded when its layer comes. Prefetch moves experts that the draft model's hidden states predict, up to the cutoff
    layer. The variants take turns; exit code 1 if an answer differs from stock llama.cpp's by more than a near-tie (two
    tokens of almost equal score).
    """
    engine = replace(engine, draft_max=draft_max)
    engine.limit_openmp_spin(emulate_bundled=True)
    from moeedge.data.datasets import load_dataset
    from moeedge.hardware.provenance import read_provenance
    from moeedge.lab.experiments.sp_moe import POLICY, figure_12, figure_14, quantized, run_ablation, solved_cutoff
    from moeedge.ui.console import notifier, say, stderr_console

    if repetitions < 1 or n_predict < 2:
        raise InputError("There is nothing to measure.", "Give -r of 1 or more, -n of 2 or more.")
    placement = PlacementOptions(cache_ratio=cache_ratio, policy=POLICY)
    config = engine.config(placement.config(), emulate_bundled=True)
    name = dataset or ("toy" if paths.is_bundled(config.model) else "sample")
    prompts = load_dataset(name).limited(limit or None).prompts
    _check(config.model, cutoff, cache_ratio)
    err = stderr_console()
    if engine.model_draft is None:  # may take long and fills the disk: last before the work
        config = replace(config, draft=quantized(config.model, draft_type))
        say(err, f"Draft: {config.draft}")
    if cutoff is None:
        solved, sentence = solved_cutoff(config, Run(notifier(err)))
        say(err, sentence)
        cutoff = [solved]
    rows = run_ablation(
        config,
        figure_12(cutoff[0]) if len(cutoff) == 1 else figure_14(cutoff),
        prompts,
        n_predict=n_predict,
        repetitions=repetitions,
        run=Run(notifier(err)),
    )
    about = {"model": config.model.name, "device": engine.device, "gamma": draft_max, "cache_ratio": cache_ratio}
    source = as_dict(read_provenance(config.model))
    objects = [{**about, **asdict(row), **source} for row in rows]
    emit(output, lambda _: json.dumps(objects, indent=1), print_ablation, rows)
    different = sum(row.answers - row.equal for row in rows)
    if different:
        print_error(f"{different} answers differ from stock llama.cpp's by more than a near-tie.")
        raise typer.Exit(EXIT_FAILURE)


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


_ABLATION_COLUMNS = (
    text_column("variant", "variant"),
    Column("cutoff", "cutoff_layer"),
    Column("ms/token", "tpot_s", ".2f", 1e3),
    Column("speed", lambda row: f"{row.speedup:.2f}x"),
    Column("expert hits", "hit_rate_experts", ".0%"),
    Column("waits", lambda row: row.loaded_per_step + row.late_per_step, ".1f"),
    Column("ahead", "ahead_per_step", ".1f"),
    Column("MB", "bytes_per_step", ".1f", 1e-6),
    Column("sends", "transfers_per_step", ".1f"),
    Column("stops", "draft_stops_per_step", ".1f"),
    Column("right", "predicted_right", ".0%"),
    Column("equal", lambda row: f"{row.equal}/{row.answers}"),
)


def print_ablation(rows: Sequence[AblationRow], console: Console) -> None:
    """One line per variant, and the meaning of the columns."""
    print_table(console, _ABLATION_COLUMNS, rows)
    console.print(
        "expert hits: experts that were resident when their layer started; right: predicted experts that were used; "
        "equal: answers equal to stock llama.cpp's. Per step: waits: experts that a layer waited for; ahead: experts "
        "moved before their layer; MB: bytes of both, in so many sends; stops: draft layers that waited."
    )


_SHOWN_LAYERS = 8


@flatten
def pair(
    *, texts: TextOptions, engine: LlamaOptions, placement: PlacementOptions, output: Output = Output.TEXT
) -> None:
    """Measure how well a draft model's hidden states predict the target's experts, layer by layer.

    The target answers a few prompts; then both models read the texts (SP-MoE, Figures 2(c) and 7).
    """
    engine.limit_openmp_spin()
    from moeedge.analysis.profile import layer_curves
    from moeedge.engine.recording import record_routing
    from moeedge.engine.session import Session
    from moeedge.hardware.provenance import read_provenance
    from moeedge.lab.experiments.sp_moe import MAX_TOKENS, compare_pair
    from moeedge.ui.console import count_bar, notifier, stderr_console

    config = engine.config(placement.config())
    prompts, source = texts.load(bundled=paths.is_bundled(config.model))
    err, provenance = stderr_console(), as_dict(read_provenance(config.model))
    with Session.open(config, run=Run(notifier(err))) as session, Interrupt(armed=True) as interrupt:
        if session.draft_context is None:
            raise InputError("There is no draft model to compare.", "Give one with -md.")
        with count_bar(err, "profiling", "prompts", len(prompts)) as bar:
            run = Run(cancelled=interrupt, progress=bar)
            recording = record_routing(session, prompts, **texts.answers(), source=source, run=run)
        n_tokens = min(sum(map(len, recording.conversations)), MAX_TOKENS)
        with count_bar(err, "comparing draft and target", "tokens", n_tokens) as bar:
            similarity = compare_pair(session, recording.conversations, Run(cancelled=interrupt, progress=bar))
    if similarity is None:
        raise typer.Exit(interrupt.exit_code)
    trace, rows = recording.trace, recording.trace.text_rows()
    recorded = set(similarity.layers) & set(trace.expert_layers())
    popularity = {layer: layer_curves(trace, layer, rows).skew.entropy_bits for layer in recorded}
    record = asdict(similarity) | {"entropy_popularity_bits": [popularity.get(layer) for layer in similarity.layers]}
    record["provenance"] = provenance
    emit(output, lambda *_: json.dumps(record), print_pair, similarity, popularity, trace.meta.n_experts)
    if interrupt.exit_code:
        raise typer.Exit(interrupt.exit_code)


def print_pair(pair: PairSimilarity, popularity: Mapping[int, float], n_experts: int, console: Console) -> None:
    """Layers at equal distances, and the mean of all. popularity: bits of each layer's popularity as a predictor."""
    import numpy as np

    from moeedge.analysis.routing_curves import mean_or_none

    k = len(pair.top_n[0])
    shown = sorted({1, 2, 4, k} & set(range(1, k + 1)))
    rows: list[tuple[object, ...]] = [
        (layer, cosine, *(used[n - 1] for n in shown), draft, own, popularity.get(layer))
        for layer, cosine, used, draft, own in zip(
            pair.layers, pair.cosine, pair.top_n, pair.entropy_draft_bits, pair.entropy_target_bits, strict=True
        )
    ]
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _SHOWN_LAYERS)).astype(int))
    mean = [mean_or_none(values) for values in list(zip(*rows, strict=True))[1:]]
    titles = ("cosine", *(f"top {n}" for n in shown), "bits: draft", "router", "popularity")
    columns = [Column("layer", 0, left=True)]
    columns += [Column(title, i, ".3f" if i <= len(shown) + 1 else ".2f") for i, title in enumerate(titles, start=1)]
    title = f"draft {visible(pair.draft)} and target on {pair.tokens:,} tokens"
    print_table(console, columns, [*(rows[place] for place in places), ("mean", *mean)], title=title)
    console.print(
        "cosine: similarity of what both routers' layers read; top n: share of the n experts ranked first from the "
        "draft's layer that the token uses; bits: entropy of the experts' probabilities from the draft's layer, of the "
        f"router's own, and of popularity (random: {math.log2(n_experts):.2f}).",
        style="dim",
    )
