"""At what rate ggml's dense matmuls take a matrix's bytes from memory, by columns.

    python -m tests.benchmarks.dense_matmuls --rounds 7 --out RECORD.json

Attention's query matrix and the output matrix in the shape of Qwen3-30B-A3B. Consecutive matmuls of the small one use
other matrices, so that no cache has them. One thread, bytes per second of its own processor time, medians of rounds.
`equal`: whether a column has the same bits alone and with the others. Engine CPU is ggml's; MOEEDGE has our kernels
where they were measured faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from moeedge.hardware.provenance import read_provenance
from tests.support.expert_blocks import BlockShape, DenseMatmul, Engine, Experts

SCHEMA = "moeedge-dense-matmuls-2"
N_IN, N_OUT = 2048, {"query": 4096, "output": 151936}  # Qwen3-30B-A3B
N_COPIES = {"query": 24, "output": 1}  # at least 100 MB in all
CASES = (
    ("query", "Q4_0", True),
    ("query", "Q4_K", True),
    ("query", "Q6_K", False),
    ("query", "Q8_0", False),
    ("output", "Q4_0", True),
    ("output", "Q6_K", False),
)
ENGINES = ("CPU", "MOEEDGE")
SIZES = (1, 2, 3, 4, 5, 9, 16)


@dataclass(frozen=True)
class Sample:
    """One round: a matmul with each of the copies of a matrix."""

    matrix: str
    type: str
    repacked: bool
    engine: str
    n_tokens: int
    bytes_per_s: float
    equal: bool  # to the bits of single columns


def measure(matrix: str, type_: str, repacked: bool, rounds: int) -> Iterator[Sample]:
    """Measures all batch sizes in turns."""
    engines = {name: Engine(name, 1) for name in ENGINES}
    shape = BlockShape(type_, n_embd=N_IN, n_ff=N_OUT[matrix], n_experts=1, n_used=1)
    copies = [Experts(shape, repacked=repacked, roles=("up",)) for _ in range(N_COPIES[matrix])]
    n_bytes = shape.expert_bytes // 3 * len(copies)
    matmuls = {n: [DenseMatmul(copy.tensors["up"], N_IN, N_OUT[matrix], n) for copy in copies] for n in SIZES}
    for round_ in range(rounds + 1):
        for name, engine in engines.items():
            for n_tokens, own in matmuls.items():
                start_s = time.thread_time()
                for each in own:
                    engine.compute(each.graph)
                rate = n_bytes / (time.thread_time() - start_s)
                if round_ > 0:  # the first one warms up
                    equal = np.array_equal(own[0].out[0], matmuls[1][0].out[0])
                    yield Sample(matrix, type_, repacked, name, n_tokens, rate, equal)
    for copy in copies:
        copy.close()
    for engine in engines.values():
        engine.close()


def main() -> None:
    """Measures all cases, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    samples: list[Sample] = []
    print("GB/s by columns              " + "".join(f"{n:7}" for n in SIZES))
    for matrix, type_, repacked in CASES:
        own = list(measure(matrix, type_, repacked, options.rounds))
        samples += own
        for engine in ENGINES:
            by_size = {n: [s for s in own if s.engine == engine and s.n_tokens == n] for n in SIZES}
            rates = [statistics.median(s.bytes_per_s for s in found) for found in by_size.values()]
            name = f"{matrix} {type_}{' repacked' if repacked else ''} {engine}"
            equal = [str(n) for n, found in by_size.items() if all(s.equal for s in found)]
            print(f"{name:29}" + "".join(f"{rate / 1e9:7.1f}" for rate in rates) + f"  equal: {','.join(equal)}")
    if options.out is not None:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_provenance()),
            "samples": [asdict(sample) for sample in samples],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
