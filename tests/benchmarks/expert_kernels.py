"""How near the experts' matmuls of small batches come to the memory's read speed, by ggml's kernels and by ours.

    python -m tests.benchmarks.expert_kernels --threads 2 --rounds 15 --out RECORD.json

Blocks (up, gate, SwiGLU, down) in the shape of Qwen3-30B-A3B on the CPU backend. A batch uses as many distinct experts
as that model's tokens do; consecutive batches use other experts, so that no cache has them. The figure is the bytes of
a batch's distinct experts per second, over the speed at which as many threads read the same memory without computing.
Every round measures the read and both kernels for all batches, in turns; the table has medians of rounds. Before that
both must give the same numbers. On a busy machine only --cpu-time tells something: one thread, bytes per second of its
own processor time, and no read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeedge.hardware.provenance import read_provenance
from moeedge.native.abi import KernelChoice
from moeedge.native.compute import kernels, read_speed, set_kernel_choice
from tests.support.expert_blocks import BlockShape, Engine, ExpertBlock, Experts, spread_experts

SCHEMA = "moeedge-expert-kernels-1"
# types that llama.cpp repacks for a CPU with AVX2, and those that stay plain or do so next to a GPU
PLAIN = ("q4_0", "q4_k", "q5_k", "q6_k", "q3_k", "q2_k", "iq4_xs", "mxfp4", "q8_0")
LAYOUTS = ("q4_0", "q4_k", "mxfp4", *(f"{name}-plain" for name in PLAIN))
# Of Qwen3-30B-A3B by tokens: the figures at 6 experts per token of the production study of MoE speculation
# (moeedge/lab/sim/data/models.json), times 8/6
DISTINCT = {1: 8, 2: 13, 3: 17, 5: 24, 9: 34, 16: 45}
NMSE_MAX = 1e-6  # of our kernels against ggml's


@dataclass(frozen=True)
class Sample:
    """One round of one batch size and layout. Bytes per second."""

    layout: str
    n_tokens: int
    n_distinct: int
    read: float | None  # None: not measured
    ggml: float
    ours: float


class Batches:
    """The batches of one size: one graph, and sets of experts that take turns."""

    def __init__(self, experts: Experts, n_tokens: int, rng: np.random.Generator, clock: Callable[[], float]) -> None:
        shape = experts.shape
        self.n_tokens, self.n_distinct = n_tokens, DISTINCT[n_tokens]
        self.bytes = self.n_distinct * shape.expert_bytes
        self.block = ExpertBlock(experts, n_tokens)
        self._input = rng.standard_normal((n_tokens, shape.n_embd)).astype(np.float32)
        order, n = rng.permutation(shape.n_experts), self.n_distinct
        sets = [order[i : i + n] for i in range(0, shape.n_experts - n + 1, n)]
        self._ids = [spread_experts(chosen, n_tokens, shape.n_used) for chosen in sets]
        self._next, self._clock = 0, clock

    def check(self, theirs: Engine, ours: Engine) -> float:
        """Returns the NMSE of our outputs; raises AssertionError if it is too large."""
        found: list[NDArray[np.float32]] = [
            self.block.run(engine, self._input, self._ids[0]) for engine in (ours, theirs)
        ]
        error = float(np.mean((found[0] - found[1]) ** 2) / np.mean(found[1] ** 2))
        assert error < NMSE_MAX, f"{self.n_tokens} tokens: {error}"
        return error

    def speed(self, engine: Engine) -> float:
        """Bytes per second of a batch."""
        self.block.ids[:] = self._ids[self._next % len(self._ids)]
        self._next += 1
        start_s = self._clock()
        engine.compute(self.block.graph)
        return self.bytes / (self._clock() - start_s)


def measure(layout: str, rounds: int, n_threads: int, sizes: list[int], *, cpu_time: bool) -> Iterator[Sample]:
    type_, _, plain = layout.upper().partition("-")
    shape = BlockShape(type_)
    rng = np.random.default_rng(0)
    clock = time.thread_time if cpu_time else time.perf_counter
    theirs, ours = Engine("CPU", n_threads), Engine("MOEEDGE", n_threads)
    with Experts(shape, repacked=not plain) as experts:
        n_bytes = shape.expert_bytes // 3 * shape.n_experts
        batches = [Batches(experts, n_tokens, rng, clock) for n_tokens in sizes]
        for each in batches:
            each.check(theirs, ours)
        for round_ in range(rounds):
            for each in batches:
                read = None
                if not cpu_time:
                    read = read_speed(n_bytes, n_threads, address=experts.up_address, repetitions=1)
                speeds = {}
                for engine in (theirs, ours) if round_ % 2 else (ours, theirs):
                    speeds[engine] = each.speed(engine)
                yield Sample(layout, each.n_tokens, each.n_distinct, read, speeds[theirs], speeds[ours])
        for each in batches:
            each.block.close()
    theirs.close()
    ours.close()


def print_table(samples: list[Sample]) -> None:
    print("layout      tokens experts   read GB/s   ggml GB/s  share   ours GB/s  share   ours / ggml")
    for layout, n_tokens in dict.fromkeys((sample.layout, sample.n_tokens) for sample in samples):
        own = [sample for sample in samples if (sample.layout, sample.n_tokens) == (layout, n_tokens)]
        reads = [sample.read for sample in own if sample.read is not None]
        read = f"{statistics.median(reads) / 1e9:.1f}" if reads else "-"
        ggml, ours = (statistics.median(getattr(sample, name) for sample in own) for name in ("ggml", "ours"))
        shares = [
            f"{statistics.median(getattr(s, name) / s.read for s in own if s.read):.2f}" if reads else "-"
            for name in ("ggml", "ours")
        ]
        ratio = statistics.median(sample.ours / sample.ggml for sample in own)
        print(
            f"{layout:11} {n_tokens:6} {own[0].n_distinct:7} {read:>11} {ggml / 1e9:11.1f} {shares[0]:>6}"
            f" {ours / 1e9:11.1f} {shares[1]:>6} {ratio:13.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--tokens", default=",".join(map(str, DISTINCT)))
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true")
    choices = [choice.name.lower() for choice in KernelChoice]
    parser.add_argument("--choice", choices=choices, default="all", help="which kernels are ours")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = 1
    set_kernel_choice(KernelChoice[options.choice.upper()])
    for kernel in kernels():
        bits = "equal bits" if kernel.is_equal else "DIFFERENT"
        print(
            f"{kernel.layout} {kernel.instructions}: {bits}, ggml's time over ours from memory: "
            f"{kernel.single_speed:.2f} with one column, {kernel.several_speed:.2f} with two, "
            f"{kernel.many_speed:.2f} with sixteen"
        )
    sizes = [int(size) for size in options.tokens.split(",")]
    samples = [
        sample
        for layout in options.layouts.split(",")
        for sample in measure(layout, options.rounds, options.threads, sizes, cpu_time=options.cpu_time)
    ]
    print_table(samples)
    if options.out is not None:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_provenance()),
            "shape": asdict(BlockShape("")),
            "threads": options.threads,
            "cpu_time": options.cpu_time,
            "choice": options.choice,
            "kernels": [asdict(kernel) for kernel in kernels()],
            "samples": [asdict(sample) for sample in samples],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
