"""What starting takes: `moeedge --help`, and the first token of the bundled chat, after Enter.

    python -m tests.benchmarks.start_up --out RECORD.json

The commands take turns, each in a process of its own; the first round warms the page cache, measures the machine where
this was not done before (the first chat on it) and is not counted. The first token is the first byte of the answer on
standard output. Medians of wall time: a quiet machine is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from moeedge.bench.records import read_environment

SCHEMA = "moeedge-start-up-1"
COMMANDS = {
    "help": ("--help",),
    "chat_help": ("chat", "--help"),
    "first_token": ("chat", "-p", "What is 3 + 4?", "-n", "4", "--temp", "0"),
    "first_token_plain": ("chat", "-p", "What is 3 + 4?", "-n", "4", "--temp", "0", "-dev", "none", "-md", "none"),
}


def first_output_s(arguments: tuple[str, ...]) -> float:
    """Seconds from starting `moeedge` to the first byte on standard output. Raises RuntimeError if it fails."""
    start_s = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "moeedge", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        taken_s = time.perf_counter() - start_s
        process.stdout.read()
    if process.returncode != 0:
        raise RuntimeError(f"moeedge {' '.join(arguments)} failed with {process.returncode}")
    return taken_s


def main() -> None:
    """Measures and prints the medians; --out keeps the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-r", "--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(options.rounds + 1):
        for name, arguments in COMMANDS.items():
            taken_s = first_output_s(arguments)
            if number > 0:
                samples[name].append(round(taken_s, 4))
    medians = {name: statistics.median(of_name) for name, of_name in samples.items()}
    print(json.dumps(medians))
    if options.out:
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_environment()),
            "commands": {name: " ".join(("moeedge", *arguments)) for name, arguments in COMMANDS.items()},
            "medians_s": medians,
            "samples_s": samples,
        }
        options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
