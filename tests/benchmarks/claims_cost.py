"""What our backend costs: decode time by claims, interleaved in one process, and the share that sensing takes.

    python -m tests.benchmarks.claims_cost -m FILE.gguf --tokens 1,5,9,256 --repeats 60 --out RECORD.json

Every repetition decodes the same tokens in every mode, in random order, after the same prefix; logits must be equal
bit for bit. "sensing" is what the native sensor spends plus one read of the counts, as a speculative step does. One
line per batch size goes to standard output, the record with all raw samples to --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from moeedge.bench.environment import read_environment
from moeedge.engine.context import Context
from moeedge.engine.model import Model
from moeedge.engine.types import Phase
from moeedge.native import Claims

N_PREFIX = 64  # tokens in the KV cache before each measured decode


def measure(model: Model, n_tokens: int, repeats: int, n_threads: int, seed: int) -> dict[str, object]:
    """Raw samples in seconds by claims for batches of `n_tokens`, and the sensing share of WHOLE."""
    rng = np.random.default_rng(seed)
    n_vocab = model.info.n_vocab
    contexts = {}
    for claims in Claims:
        context = Context(model, n_ctx=N_PREFIX + n_tokens + 8, n_threads=n_threads, mode="stock")
        assert context.sensor is not None, "the model has no experts"
        context.sensor.set_claims(claims)
        context.decode(list(range(N_PREFIX)), phase=Phase.PREFILL, logits="none")
        contexts[claims] = context
    samples: dict[Claims, list[float]] = {claims: [] for claims in Claims}
    reading_s: list[float] = []
    sensor = contexts[Claims.WHOLE].sensor
    assert sensor is not None
    for repeat in range(-2, repeats):  # two rounds of warm-up
        tokens = rng.integers(0, n_vocab, n_tokens).tolist()
        logits = {}
        if repeat == 0:
            before = sensor.stats()
        for claims in rng.permutation(list(Claims)):
            context = contexts[Claims(claims)]
            context.trim(N_PREFIX)
            start_s = time.perf_counter()
            logits[claims] = context.decode(tokens, phase=Phase.VERIFY, logits="all")
            end_s = time.perf_counter()
            if repeat >= 0:
                samples[Claims(claims)].append(end_s - start_s)
            if claims == Claims.WHOLE:
                sensor.read_counts()
                if repeat >= 0:
                    reading_s.append(time.perf_counter() - end_s)
        assert all(np.array_equal(logits[Claims.NONE], other) for other in logits.values()), "logits differ"
    after = sensor.stats()
    for context in contexts.values():
        context.close()
    stock_s = samples[Claims.NONE]
    step_s = statistics.median(samples[Claims.WHOLE])
    sensing_s = (after.sense_s - before.sense_s) / repeats + statistics.median(reading_s)
    return {
        "n_tokens": n_tokens,
        "median_s": {claims.name: statistics.median(times) for claims, times in samples.items()},
        "speed_to_stock": {
            claims.name: statistics.median([a / b for a, b in zip(stock_s, times, strict=True)])
            for claims, times in samples.items()
        },
        "sensing_s": sensing_s,
        "sensing_share": sensing_s / step_s,
        "samples_s": {claims.name: times for claims, times in samples.items()},
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
            "schema": "moeedge-claims-cost-1",
            "environment": asdict(read_environment()),
            "model": {"file": model.path.name, **asdict(model.info)},
            "repeats": options.repeats,
            "results": results,
        }
    for row in results:
        speeds = " ".join(f"{name} {speed:.3f}" for name, speed in row["speed_to_stock"].items())
        step_ms = row["median_s"]["WHOLE"] * 1e3
        sensing_us = row["sensing_s"] * 1e6
        print(
            f"{row['n_tokens']:4d} tokens: {step_ms:.3f} ms; speed to stock: {speeds}; "
            f"sensing {sensing_us:.1f} us = {row['sensing_share']:.2%} of a step"
        )
    if options.out:
        options.out.write_text(json.dumps(record, default=str) + "\n")


if __name__ == "__main__":
    main()
