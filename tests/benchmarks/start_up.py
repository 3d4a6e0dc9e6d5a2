"""What starting takes: --help of every command, a key press that completes, and the first token of the bundled chat.

    python -m tests.benchmarks.start_up --out RECORD.json

The commands take turns, each in a process of its own; the first round warms the page cache, measures the machine where
this was not done before (the first chat on it) and is not counted. The first token is the first byte of the answer on
standard output; the other rows are until all is printed. Medians of wall time need a quiet machine; the least of the
samples, and the least processor time, say more about one that does other work.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from moeedge.cli.app import COMMANDS
from moeedge.hardware.provenance import read_provenance

SCHEMA = "moeedge-start-up-1"
RUNS = {
    "help": ("--help",),
    **{f"{name.replace(' ', '_')}_help": (*name.split(), "--help") for name in COMMANDS},
    "first_token": ("chat", "-p", "What is 3 + 4?", "-n", "4", "--temp", "0"),
    "first_token_plain": ("chat", "-p", "What is 3 + 4?", "-n", "4", "--temp", "0", "-dev", "none", "-md", "none"),
}
LINES = {  # that a shell completes, by bash's protocol
    "complete_command": "moeedge ch",
    "complete_option": "moeedge chat --te",
    "complete_model": "moeedge chat -m gr",
    "complete_policy": "moeedge lab replay --policy l",
    "complete_hardware": "moeedge lab simulate --hardware h",
}


def output_s(arguments: tuple[str, ...], line: str | None = None) -> tuple[float, float]:
    """Seconds from starting `moeedge` to its answer, and of processor time until it ended.

    The answer is the first byte of a prompt's, and the end of what --help and completion print.

    line: what a shell completes. Raises RuntimeError if it fails.
    """
    environment = dict(os.environ)
    if line is not None:
        environment |= {"_MOEEDGE_COMPLETE": "complete_bash", "COMP_WORDS": line}
        environment["COMP_CWORD"] = str(line.count(" "))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "moeedge", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1 if "-p" in arguments else -1)
        taken_s = time.perf_counter() - start_s
        process.stdout.read()
    if process.returncode != 0:
        raise RuntimeError(f"moeedge {' '.join(arguments)} failed with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measures and prints the medians; --out keeps the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-r", "--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = {name: (arguments, None) for name, arguments in RUNS.items()} | {name: ((), LINES[name]) for name in LINES}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds + 1):
        for name, (arguments, line) in runs.items():
            taken_s, processor_s = output_s(arguments, line)
            if number > 0:
                samples[name].append(round(taken_s, 4))
                processor[name].append(round(processor_s, 4))
    medians = {name: statistics.median(of_name) for name, of_name in samples.items()}
    least = {name: min(of_name) for name, of_name in samples.items()}
    for name in runs:
        print(f"{name:20} median {medians[name]:.3f}  least {least[name]:.3f}  processor {min(processor[name]):.3f} s")
    if options.out:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_provenance()),
            "commands": {name: line or " ".join(("moeedge", *arguments)) for name, (arguments, line) in runs.items()},
            "medians_s": medians,
            "least_s": least,
            "samples_s": samples,
            "processor_s": processor,
        }
        options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
