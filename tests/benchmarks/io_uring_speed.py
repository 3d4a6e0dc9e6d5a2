"""Whether io_uring reads random experts of a file faster than threads, or with less processor time.

    python -m tests.benchmarks.io_uring_speed FILE --depths 4,8,16 --rounds 9 --out OUT.json

Direct reads in pieces of 1 MiB into memory of their own, without any other work (io_uring_reads.cpp): the native reader
does the same with threads, and copies. Every round measures all ways once, in random order. Processor time is that of
the process, kernel included. Needs Linux and a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from moeedge.hardware.provenance import read_provenance

SOURCE = Path(__file__).with_suffix("").with_name("io_uring_reads.cpp")
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Sample:
    """Ranges that were read at once."""

    bytes_per_s: float
    cpu_s_per_gb: float


def main() -> None:
    """Measures all ways of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--depths", default="4,8,16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--expert-bytes", type=int, default=5 * PIECE_BYTES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    ways = list(product(("threads", "uring"), map(int, options.depths.split(","))))
    numbers = random.Random(options.seed)
    samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "io_uring_reads"
        subprocess.run(["c++", "-std=c++17", "-O2", "-pthread", SOURCE, "-o", program], check=True)
        for _ in range(options.rounds):
            for how, depth in numbers.sample(ways, len(ways)):
                arguments = [how, depth, options.experts, options.expert_bytes, PIECE_BYTES, numbers.getrandbits(60)]
                found = subprocess.run(
                    [program, options.file, *map(str, arguments)], check=True, capture_output=True, text=True
                )
                seconds, cpu_s, n_bytes = map(float, found.stdout.split())
                samples[how, depth].append(Sample(n_bytes / seconds, cpu_s / n_bytes * 1e9))
    for how, depth in ways:
        of_way = samples[how, depth]
        rates = [sample.bytes_per_s / 1e6 for sample in of_way]
        cpu_s = statistics.median(sample.cpu_s_per_gb for sample in of_way)
        print(
            f"{how:8} {depth:3} reads under way: {statistics.median(rates):5.0f} MB/s "
            f"({min(rates):.0f} to {max(rates):.0f}), {cpu_s:.3f} s of CPU per GB"
        )
    if options.out is not None:
        record = {
            "environment": asdict(read_provenance()),
            "file_bytes": options.file.stat().st_size,
            "rounds": options.rounds,
            "experts": options.experts,
            "expert_bytes": options.expert_bytes,
            "piece_bytes": PIECE_BYTES,
            "ways": [
                {"how": how, "depth": depth, "samples": [asdict(sample) for sample in samples[how, depth]]}
                for how, depth in ways
            ],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
