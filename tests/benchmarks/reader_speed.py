"""How fast a cache in RAM reads random experts of a model: past the page cache or through it, threads, size of pieces.

    python -m tests.benchmarks.reader_speed -m FILE --threads 1,2,4,8 --pieces 256K,1M,whole --rounds 9 --out OUT.json

Every round measures all ways once, in random order. A way empties the slots, drops the file's pages from the page cache
(all pages of the system with --drop-caches, for which one must be root), asks for `--experts` random experts, all at
once or `--at-once` at a time as a computation does, and waits until they are there. Figures are bytes of experts per
second, and processor time of the process per GB. One line per way goes to standard output, best first; the record with
all raw samples to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from moeedge import native
from moeedge.hardware.provenance import read_provenance
from moeedge.llama.gguf_file import expert_tensors
from moeedge.native.cache import CacheConfig, ExpertCache

WHOLE_BYTES = 1 << 40  # no matrix is that large
WAIT_S = 600.0
SIZES_BYTES = {"K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class Way:
    """One way to read."""

    direct: bool
    n_threads: int
    piece: str  # as it was asked for


@dataclass(frozen=True)
class Sample:
    """Experts that were read at once."""

    bytes_per_s: float
    cpu_s_per_gb: float
    disk_bytes: int  # whole blocks


def piece_bytes(text: str) -> int:
    """Bytes of "256K", "1M" or "whole" (a matrix)."""
    return WHOLE_BYTES if text == "whole" else int(text[:-1]) * SIZES_BYTES[text[-1].upper()]


def drop_pages(files: list[Path], *, of_all: bool) -> None:
    """Drop what the system keeps of the files in memory, or of all files."""
    if of_all:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
        return
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(cache: ExpertCache, way: Way, experts: np.ndarray, at_once: int) -> Sample:
    """Read the experts [n, 2] (layer, expert) in that way, so many at a time."""
    cache.clear()
    cache.set_readers(way.n_threads, piece_bytes(way.piece))
    before, read_before = cache.stats(), cache.reader().bytes_read
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    nobody = np.zeros((0, 2), np.int32)
    for begin in range(0, len(experts), at_once):
        asked = experts[begin : begin + at_once]
        cache.plan(asked, np.ones(len(asked), np.uint8), nobody, np.zeros(0, np.float32))
        assert cache.drain(WAIT_S)
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    after = cache.stats()
    assert after.uploads - before.uploads == len(experts)
    n_bytes = after.bytes_moved - before.bytes_moved
    return Sample(n_bytes / seconds, cpu_s / n_bytes * 1e9, cache.reader().bytes_read - read_before)


def main() -> None:
    """Measures all ways of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--pieces", default="256K,1M,whole")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=0)
    parser.add_argument("--only-direct", action="store_true")
    parser.add_argument("--drop-caches", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    native.attach()
    tensors, files = expert_tensors(options.model)
    layers = sorted({tensor.layer for tensor in tensors})
    n_experts = tensors[0].n_experts
    places = np.array(list(product(layers, range(n_experts))), dtype=np.int32)
    ways = [
        Way(direct, int(n_threads), piece)
        for direct in ((True,) if options.only_direct else (True, False))
        for n_threads in options.threads.split(",")
        for piece in options.pieces.split(",")
    ]
    config = CacheConfig(
        device="ram",
        files=files,
        tensors=tensors,
        n_layers=layers[-1] + 1,
        n_experts=n_experts,
        ratio=min(1.0, 1.1 * options.experts / len(places)),
    )
    rng = np.random.default_rng(options.seed)
    samples: dict[Way, list[Sample]] = defaultdict(list)
    with ExpertCache(config) as past, ExpertCache(replace(config, disk_buffered=True)) as through:
        for number in range(-1, options.rounds):
            # the slots' pages are the system's zeros at first: what is read first, once in each cache, does not count
            for index in rng.permutation(len(ways)) if number >= 0 else (0, len(ways) - 1):
                way = ways[index]
                cache = past if way.direct else through
                chosen = rng.choice(places, min(options.experts, len(places)), replace=False)
                drop_pages(files, of_all=options.drop_caches)
                sample = measure(cache, way, chosen, options.at_once or len(chosen))
                assert cache.reader().is_direct == way.direct
                if number >= 0:
                    samples[way].append(sample)
    median = {way: statistics.median(sample.bytes_per_s for sample in found) for way, found in samples.items()}
    for way in sorted(samples, key=lambda way: -median[way]):
        found = samples[way]
        slowest, fastest = (bound(sample.bytes_per_s for sample in found) / 1e6 for bound in (min, max))
        cpu_s = statistics.median(sample.cpu_s_per_gb for sample in found)
        print(
            f"{'direct  ' if way.direct else 'buffered'} {way.n_threads} threads, pieces {way.piece:>5}: "
            f"{median[way] / 1e6:5.0f} MB/s ({slowest:.0f} to {fastest:.0f}), {cpu_s:.2f} s of CPU per GB"
        )
    if options.out is not None:
        record = {
            "environment": asdict(read_provenance()),
            "model": options.model.name,
            "rounds": options.rounds,
            "experts": options.experts,
            "at_once": options.at_once,
            "seed": options.seed,
            "file_bytes": sum(path.stat().st_size for path in files),
            "ways": [asdict(way) | {"samples": [asdict(sample) for sample in found]} for way, found in samples.items()],
        }
        options.out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
