"""Loading a mapped file that does not fit the memory next to its repacked weights: pages that leave it, and all kept.

    python -m tests.benchmarks.load_time -m FILE --rounds 3 --out RECORD.json

A process per arm loads the model and computes a prompt. "kept" leaves the file's pages to the kernel, as llama.cpp
does. Arms take turns, rotated; each runs twice in a row, first with nothing of the file in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from moeedge.hardware.host import text_of
from moeedge.hardware.provenance import read_provenance
from moeedge.run import rotated

SCHEMA = "moeedge-load-time-1"
ARMS = ("released", "kept")
_TIMEOUT_S = 600


def load(path: Path, arm: str, n_prompt: int, n_threads: int) -> dict[str, float]:
    """Loads the model in this process and computes a prompt: seconds, bytes read, and free bytes afterwards."""
    import moeedge.llama.model
    from moeedge.llama.context import Context
    from moeedge.native.abi import Phase

    if arm == "kept":
        moeedge.llama.model.room_beside = lambda n_bytes: 1 << 62
    start_s = time.perf_counter()
    with moeedge.llama.model.Model.load(path) as model:
        load_s = time.perf_counter() - start_s
        with Context(model, n_ctx=max(512, n_prompt), n_threads=n_threads) as context:
            context.decode(list(range(1000, 1000 + n_prompt)), phase=Phase.PREFILL, logits="last")
        prompt_s = time.perf_counter() - start_s - load_s
        read_bytes = int(_value(Path("/proc/self/io"), "read_bytes"))
        free_bytes = 1024 * int(_value(Path("/proc/meminfo"), "MemFree"))
    return {"load_s": load_s, "prompt_s": prompt_s, "read_bytes": read_bytes, "free_bytes": free_bytes}


def _value(file: Path, key: str) -> str:
    return next(line.split()[1] for line in text_of(file).splitlines() if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--disk", default="", help="words about the disk, for the record")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(load(options.model, options.child, options.prompt_tokens, options.threads)))
        return
    samples = []
    for round_ in range(options.rounds):
        for arm in rotated(ARMS, round_):
            with options.model.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for again in (False, True):
                words = [f"-m={options.model}", f"--prompt-tokens={options.prompt_tokens}", f"-t={options.threads}"]
                command = [sys.executable, "-m", "tests.benchmarks.load_time", *words, f"--child={arm}"]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=_TIMEOUT_S)
                sample = {"arm": arm, "round": round_, "again": again} | json.loads(done.stdout.splitlines()[-1])
                samples.append(sample)
                print(json.dumps(sample), file=sys.stderr, flush=True)
    record = {"schema": SCHEMA, "model": options.model.name, "model_bytes": options.model.stat().st_size}
    record |= {"disk": options.disk, "threads": options.threads, "prompt_tokens": options.prompt_tokens}
    record = asdict(read_provenance(options.model)) | record | {"samples": samples}
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
