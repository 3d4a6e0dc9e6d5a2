"""The cost of our backend: decode time by offload scope, interleaved in one process, and the share of sensing.

    python -m tests.benchmarks.offload_cost -m FILE.gguf --tokens 1,5,9,256 --repeats 60 --out RECORD.json

Every repetition decodes the same tokens in every scope, in random order, in one context and after the same prefix;
logits must be equal bit for bit. "sensing" is the native sensor's time plus one read of the counts, as in a
speculative step. One line per batch size goes to standard output, the record with all raw samples to --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from moeedge.hardware.provenance import read_provenance
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native import OffloadScope
from moeedge.native.abi import Phase

N_PREFIX = 64  # tokens in the KV cache before each measured decode


def plan_with(context: Context, scope: OffloadScope) -> None:
    """Makes llama.cpp plan its next graph with this offload scope."""
    assert context.sensor is not None, "the model has no experts"
    context.set_mode("stock")
    context.set_mode("moeedge")
    context.sensor.set_offload_scope(scope)


def measure(model: Model, n_tokens: int, repeats: int, n_threads: int, seed: int) -> dict[str, object]:
    """Returns samples in seconds by scope for batches of `n_tokens`, and the share of sensing with scope ALL.

    One context serves all scopes: two contexts differ by several per cent, because their buffers have other addresses.
    """
    rng = np.random.default_rng(seed)
    samples: dict[OffloadScope, list[float]] = {scope: [] for scope in OffloadScope}
    sensing_s: list[float] = []
    with Context(model, n_ctx=N_PREFIX + n_tokens + 8, n_threads=n_threads, mode="stock") as context:
        sensor = context.sensor
        assert sensor is not None, "the model has no experts"
        context.decode(list(range(N_PREFIX)), phase=Phase.PREFILL, logits="none")

        def decode(tokens: list[int]) -> tuple[float, np.ndarray]:
            context.trim(N_PREFIX)
            start_s = time.perf_counter()
            logits = context.decode(tokens, phase=Phase.VERIFY, logits="all")
            return time.perf_counter() - start_s, logits

        for repeat in range(-2, repeats):  # two rounds of warm-up
            tokens = rng.integers(0, model.info.n_vocab, n_tokens).tolist()
            stock_logits = None
            for scope in (OffloadScope(value) for value in rng.permutation(list(OffloadScope))):
                plan_with(context, scope)
                decode(tokens)  # plans and allocates
                before_s = sensor.stats().sense_s
                decode_s, logits = decode(tokens)
                sensed_s = sensor.stats().sense_s - before_s
                start_s = time.perf_counter()
                sensor.read_counts()
                read_s = time.perf_counter() - start_s
                stock_logits = logits.copy() if stock_logits is None else stock_logits
                assert np.array_equal(logits, stock_logits), "logits differ"
                if repeat >= 0:
                    samples[scope].append(decode_s)
                    if scope == OffloadScope.ALL:
                        sensing_s.append(sensed_s + read_s)
    stock_s = samples[OffloadScope.NONE]
    step_s = statistics.median(samples[OffloadScope.ALL])
    sensed_s = statistics.median(sensing_s)
    return {
        "n_tokens": n_tokens,
        "median_s": {scope.name: statistics.median(times) for scope, times in samples.items()},
        "speed_to_stock": {
            scope.name: statistics.median([a / b for a, b in zip(stock_s, times, strict=True)])
            for scope, times in samples.items()
        },
        "sensing_s": sensed_s,
        "sensing_share": sensed_s / step_s,
        "samples_s": {scope.name: times for scope, times in samples.items()},
        "sensing_samples_s": sensing_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--tokens", default="1,5,9")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    with Model.load(options.model) as model:
        sizes = map(int, options.tokens.split(","))
        results = [measure(model, n, options.repeats, options.threads, options.seed) for n in sizes]
        record = {
            "schema": "moeedge-offload-cost-1",
            "environment": asdict(read_provenance()),
            "model": {"file": model.path.name, **asdict(model.info)},
            "repeats": options.repeats,
            "results": results,
        }
    for row in results:
        speeds = " ".join(f"{name} {speed:.3f}" for name, speed in row["speed_to_stock"].items())
        step_ms = row["median_s"]["ALL"] * 1e3
        sensing_us = row["sensing_s"] * 1e6
        print(
            f"{row['n_tokens']:4d} tokens: {step_ms:.3f} ms; speed to stock: {speeds}; "
            f"sensing {sensing_us:.1f} us = {row['sensing_share']:.2%} of a step"
        )
    if options.out:
        options.out.write_text(json.dumps(record, default=str) + "\n")


if __name__ == "__main__":
    main()
