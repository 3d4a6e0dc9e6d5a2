"""`moeedge bench`: stock llama.cpp, the same with drafts, and moeedge, side by side in one process."""

from __future__ import annotations

import typer

from moeedge.cli.bench_options import BenchOptions
from moeedge.cli.options import flatten


@flatten
def bench(options: BenchOptions) -> None:
    """Measure speed next to stock llama.cpp, and check that the answers are the same.

    Without --dataset the tests are llama-bench's: pp512 (a prompt of 512 random tokens) and tg128 (128 tokens, one by
    one). With it, prompts are answered. Modes by default: stock-ar (llama.cpp, one token at a time), stock-sd (the
    same with drafts) and moeedge. They take turns, so that a slow moment of the machine affects all alike. A ratio
    is a mode's speed over that of the stock-ar run next to it; the median is shown.

    --policy and --cache-ratio compare expert caches, --expert-budget and --draft-max speed with quality, --parallel
    several texts at once. Ctrl-C prints what is measured; --resume goes on. Exit code 1: an answer differs from
    stock-ar's where the scores of the two tokens are not almost equal.
    """
    options.engine.limit_openmp_spin(emulate_bundled=options.compares_caches)
    from moeedge.cli.bench_run import run_bench  # from here on llama.cpp is loaded

    raise typer.Exit(run_bench(options))
