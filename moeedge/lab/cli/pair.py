"""`moeedge lab pair`: how well a draft model's hidden states predict the target's experts (SP-MoE, Figures 2(c), 7)."""

from __future__ import annotations

from moeedge.cli.engine_options import LlamaOptions, PlacementOptions
from moeedge.cli.options import Output, flatten
from moeedge.cli.profile_options import TextOptions


@flatten
def pair(
    *,
    texts: TextOptions,
    engine: LlamaOptions,
    placement: PlacementOptions,
    output: Output = Output.TEXT,
) -> None:
    """Measure how well a draft model's hidden states predict the target's experts, layer by layer.

    The target answers a few prompts; then both models read the texts (SP-MoE, Figures 2(c) and 7).
    """
    engine.limit_openmp_spin()
    from moeedge.lab.cli.pair_run import run_pair

    run_pair(texts, engine, placement, output)
