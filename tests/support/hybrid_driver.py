"""Blocks computed on two devices while their experts move: run by the sanitizer tests, see test_sanitizers.

MOEEDGE_LIBRARY=libmoeedge.so LD_PRELOAD=libtsan.so python -m tests.support.hybrid_driver MODEL...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from moeedge import native
from moeedge.native import ActivationCapture, Block
from moeedge.native.abi import PrefillPath
from moeedge.native.cache import ExpertCache
from tests.support.hybrid import RandomPlans, hybrid_context
from tests.support.stock import StockContext, transcript
from tests.support.threads import meanwhile

TOLERANCE = 5e-3  # of the largest logit, where the CPU's side computes with repacked weights
N_ROUNDS = 6


@contextmanager
def churn(cache: ExpertCache, seed: int) -> Iterator[None]:
    """Push random plans from another thread while the body runs; small ones, so that experts are evicted soon."""
    plans = RandomPlans(cache, seed)
    with meanwhile(lambda: plans.push(4)):
        yield


def load(cache: ExpertCache, block: Block) -> None:
    """Load on demand, as published systems do, while other experts move."""
    if block.ids is not None:
        victims = np.argwhere(cache.residency() == 1).astype(np.int32)
        cache.demand(block.layer, np.unique(block.ids), victims, np.zeros(len(victims), np.float32), 0.02)


def exercise(path: Path, n_threads: int) -> None:
    """Transcripts on every prefill path while experts move; the cache attached, taken away, attached again."""
    with StockContext(path, n_ubatch=32) as stock:
        expected = transcript(stock)
    limit = TOLERANCE * np.abs(expected).max()
    with hybrid_context(path, 0.5, n_stage=8, n_ubatch=32, n_threads=n_threads) as (context, cache):
        capture = ActivationCapture(native.library.newest_instance(), n_layers=1, n_embd=1, n_experts=1)
        with churn(cache, seed=n_threads):
            for i in range(N_ROUNDS):
                cache.set_prefill(list(PrefillPath)[i % 3], 20)
                capture.set_hook(partial(load, cache) if i % 2 else None)
                error = np.abs(transcript(context) - expected).max()
                assert error < limit, f"{path.name}: {error:.3g}"
                capture.raise_error()
                context.trim(0)
                cache.blocks()
        assert cache.stats().pairs_hit > 0
        RandomPlans(cache, 1).push(1000)
        cache.clear()
        RandomPlans(cache, 2).push(1000)  # the mover is at work while the cache is closed


def main(arguments: list[str]) -> None:
    """Exercises each model with one thread and with two."""
    for argument in arguments:
        for n_threads in (1, 2):
            exercise(Path(argument), n_threads)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
