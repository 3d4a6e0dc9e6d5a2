"""`moeedge lab pair` once its options are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import typer
from rich.console import Console

from moeedge import paths
from moeedge.analysis.model_profile import profile_model
from moeedge.analysis.routing_curves import mean_or_none
from moeedge.cli.common import emit
from moeedge.cli.engine_options import LlamaOptions, PlacementOptions
from moeedge.cli.options import Output
from moeedge.cli.profile_options import TextOptions
from moeedge.engine.recording import record_routing
from moeedge.engine.session import Session
from moeedge.errors import EngineError, InputError
from moeedge.hardware.provenance import read_provenance
from moeedge.lab.analysis.pair_similarity import MAX_TOKENS, PairSimilarity, compare_pair
from moeedge.records import as_dict
from moeedge.run import Run
from moeedge.ui.chat.interrupt import Interrupt
from moeedge.ui.console import notifier, stderr_console, visible
from moeedge.ui.progress import count_bar
from moeedge.ui.tables import Column, print_table

_SHOWN_LAYERS = 8


def run_pair(texts: TextOptions, engine: LlamaOptions, placement: PlacementOptions, output: Output) -> None:
    """Answers the prompts, compares draft and target, and prints the figures."""
    config = engine.config(placement.config())
    prompts, source = texts.load(bundled=paths.is_bundled(config.model))
    err, provenance = stderr_console(), as_dict(read_provenance(config.model))
    with Session.open(config, run=Run(notifier(err))) as session, Interrupt() as interrupt:
        if session.draft_context is None:
            raise InputError("There is no draft model to compare.", "Give one with -md.")
        interrupt.arm()
        with count_bar(err, "profiling", "prompts", len(prompts)) as bar:
            recording = record_routing(
                session,
                prompts,
                n_predict=texts.n_predict,
                sampling=texts.sampling(),
                raw=texts.raw,
                source=source,
                run=Run(cancelled=interrupt, progress=bar),
            )
        n_tokens = min(sum(map(len, recording.conversations)), MAX_TOKENS)
        with count_bar(err, "comparing draft and target", "tokens", n_tokens) as bar:
            similarity, reason = compare_pair(session, recording.conversations, Run(cancelled=interrupt, progress=bar))
    if similarity is None:
        raise (
            typer.Exit(interrupt.exit_code)
            if interrupt.exit_code
            else EngineError(f"Draft and target cannot be compared: {reason.rstrip('.')}.")
        )
    popularity = {
        curves.layer: curves.skew.entropy_bits
        for curves in profile_model(recording.trace, []).curves
        if curves.layer in similarity.layers
    }
    record = asdict(similarity) | {"entropy_popularity_bits": [popularity.get(each) for each in similarity.layers]}
    record["provenance"] = provenance
    emit(output, lambda *_: json.dumps(record), print_pair, similarity, popularity, recording.trace.meta.n_experts)
    if interrupt.exit_code:
        raise typer.Exit(interrupt.exit_code)


def print_pair(pair: PairSimilarity, popularity: Mapping[int, float], n_experts: int, console: Console) -> None:
    """Layers at equal distances, and the mean of all. popularity: bits of each layer's popularity as a predictor."""
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
