"""Blocks whose experts are loaded on demand while plans come and reads fail: run by the sanitizer tests.

MOEEDGE_LIBRARY=libmoeedge.so LD_PRELOAD=libtsan.so python -m tests.support.ram_driver MODEL...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase, PrefillPath, ReadFault
from moeedge.native.cache import ExpertCache
from tests.support.experts import fail_reads, model_experts
from tests.support.hybrid_driver import churn

TOKENS = np.random.default_rng(3).integers(0, 256, 60).tolist()
BATCHES = (TOKENS[:1], TOKENS[1:6], TOKENS[6:50], TOKENS[50:51], TOKENS[51:])


@contextmanager
def ram_context(
    path: Path, ratio: float, layout: dict[str, Any] | None = None, **changes: Any
) -> Iterator[tuple[Context, ExpertCache]]:
    """A context whose experts are loaded on demand into slots for that share of them. layout: of the context."""
    layout = layout or {"n_ctx": 512, "n_threads": 1}
    with (
        Model.load(path, storage="on demand") as model,
        Context(model, **layout) as context,
        ExpertCache(model_experts(path).config(ratio, device="ram", **changes)) as cache,
    ):
        assert context.sensor is not None
        cache.attach(context.sensor)
        yield context, cache
        cache.detach()


@contextmanager
def file_context(path: Path, *, n_threads: int = 1) -> Iterator[Context]:
    """Stock's, on the mapped file, with the kernels of a file that does not fit."""
    with (
        Model.load(path, storage="mapped", device="none") as model,
        Context(model, n_ctx=512, n_threads=n_threads, mode="stock") as context,
    ):
        yield context


def decode(context: Context) -> list[np.ndarray]:
    """Logits of all batches, from an empty KV cache."""
    context.clear()
    return [context.decode(batch, phase=Phase.AUTO, logits="all").copy() for batch in BATCHES]


def next_to_a_device(path: Path) -> None:
    """Decodes with a second cache, whose uploads read the slots in RAM, while plans for both come."""
    with ram_context(path, 0.2) as (context, ram):
        expected = decode(context)
        config = replace(ram._config, device="emulated", ratio=0.3, n_stage=8)
        with ExpertCache(config) as cache:
            assert context.sensor is not None
            cache.attach(context.sensor)
            cache.read_from(ram)
            with churn(cache, seed=4), churn(ram, seed=5):
                for prefill in (PrefillPath.CPU, PrefillPath.RESIDENT, PrefillPath.STREAM):
                    cache.set_prefill(prefill, 16)
                    assert all(map(np.array_equal, decode(context), expected))
            cache.detach()


def main(arguments: list[str]) -> None:
    """Decode each model several times; every answer is the first one."""
    for path in map(Path, arguments):
        with ram_context(path, 0.2) as (context, cache):
            expected = decode(context)
            with churn(cache, seed=3):
                for fault in (ReadFault.EIO, ReadFault.SHORT, ReadFault.END, ReadFault.DELAY):
                    fail_reads(cache, fault, 20, 0.001)
                    cache.set_readers(1 + fault, 4096)
                    cache.limit(cache.info.n_slots - 2)
                    assert all(map(np.array_equal, decode(context), expected))
        next_to_a_device(path)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
