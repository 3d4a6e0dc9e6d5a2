"""Soak test: greedy answers under random settings, each compared with stock llama.cpp's of the same tokens.

    python -m tests.soak.greedy --tokens 1000000 --out RECORD.jsonl

A case is a tiny model with random weights (an architecture and a quantization of the exactness tests), a session with
random settings, and answers of 64 tokens to random prompts, a new one for each. Stock has the session's layout of
weights. Without drafts, and without a device next to repacked weights, bits are equal (docs/structure.md), and so must
be the answers; where another one differs, a stock context that is forced along it must find near-ties alone. A case is
given by its seed, so that it can be run again (--seed S --cases 1). The record has a line for each case, and the same
command goes on with those that lack. Cases run in processes of their own: one that crashes is a failure. --minutes ends
the run earlier; exit code 1 after a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.provenance import read_provenance
from moeedge.llama import library
from moeedge.llama.gguf_file import expert_bytes, expert_tensors
from moeedge.native.abi import DevicePath, PrefillPath
from moeedge.policies.registry import POLICIES
from moeedge.records import as_dict
from tests.support.cases import MOE_CASES, RARE_CASES, case_model
from tests.support.hybrid import AlternatingCache, assert_greedy, greedy_answer, hybrid_config, random_prompt
from tests.support.stock import StockContext
from tests.support.tiny import tiny_factory

SCHEMA = "moeedge-greedy-soak-1"
N_CTX, N_PREDICT, N_ANSWERS = 512, 64, 16
PROMPT_TOKENS = (1, 300)
CASES_PER_PROCESS = 8
LIMIT_S = 300  # of a case
DEVICES = ("emulated:threads=1", "emulated:threads=2", "emulated:link=5MB/s,threads=1", "none")


def settings_of(seed: int, device: str | None) -> dict[str, Any]:
    """The random settings of a case. device: None: one of DEVICES."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    return {
        "model": pick(*MOE_CASES, *RARE_CASES),
        "weights": pick(0, 1, 2),  # seed of the random weights
        "device": device or pick(*DEVICES),
        "ratio": pick(0.0, 0.05, 0.17, 0.3, 0.5, 0.8, 1.0),
        "in_ram": pick(0.0, 0.0, 0.2, 0.5, 1.0),  # share of the experts with a slot in RAM; 0: the file is mapped
        "policy": pick(*POLICIES),
        "draft": pick("model", "model", "ngram", "none"),
        "gamma": pick(1, 2, 4, 8, 12),
        "auto": pick(False, True),
        "threads": pick(1, 2),
        "ubatch": pick(17, 64, 512),
        "prefill": pick(*PrefillPath).value,
        "path": pick(*DevicePath).name,
        "switched": pick(False, False, True),  # the cache goes off and on
    }


def config_of(settings: dict[str, Any], tiny: Callable[..., Path]) -> EngineConfig:
    """The session of a case."""
    path = case_model(tiny, settings["model"], seed=settings["weights"])
    own_draft = tiny("qwen3", seed=settings["weights"], layers=1)
    draft = {"model": own_draft, "none": None}.get(settings["draft"], settings["draft"])
    config = hybrid_config(
        path,
        draft,
        settings["ratio"],
        gamma=settings["gamma"],
        device=settings["device"],
        policy=settings["policy"],
        prefill=PrefillPath(settings["prefill"]),
        device_path=DevicePath[settings["path"]],
    )
    in_ram = settings["in_ram"]
    return replace(
        config,
        auto_gamma=settings["auto"],
        ram=int(in_ram * expert_bytes(expert_tensors(path)[0])) if in_ram else "off",
        n_threads=settings["threads"],
        n_ubatch=settings["ubatch"],
    )


def run_case(seed: int, device: str | None, tiny: Callable[..., Path]) -> dict[str, Any]:
    """The line of a case: its settings, how many tokens were compared, how many answers had near-ties, its failures."""
    settings = settings_of(seed, device)
    config = config_of(settings, tiny)
    found: dict[str, Any] = {"seed": seed, **settings, "tokens": 0, "tied": 0, "failures": []}
    rng, sizes = np.random.default_rng(seed), {"n_ctx": N_CTX, "n_batch": N_CTX, "n_ubatch": config.n_ubatch}
    is_plain = settings["in_ram"] > 0  # a file that is mapped is not repacked
    has_equal_bits = settings["draft"] == "none" and (is_plain or settings["device"] == "none")
    stock = StockContext(config.model, n_threads=config.n_threads, repack=not is_plain, **sizes)
    with stock, Session.open(config) as session:
        if settings["switched"] and session.placement is not None:
            session.placement.governor = AlternatingCache()
        for index in range(N_ANSWERS):
            length = round(float(np.exp(rng.uniform(*np.log(PROMPT_TOKENS)))))
            prompt = random_prompt(length, int(rng.integers(1 << 31)))
            answer, expected = greedy_answer(session, prompt, N_PREDICT), stock.greedy(prompt, N_PREDICT)[0]
            expected += _ended(stock, expected)
            found["tokens"] += len(answer)
            found["tied"] += answer != expected
            try:
                assert answer == expected or not has_equal_bits, f"answer {index}: other bits"
                assert_greedy(stock, prompt, answer, expected, f"answer {index}")
            except AssertionError as error:
                found["failures"].append(str(error))
        stats = session.placement_stats()
        if stats is not None and (stats.lost or stats.blocks_unknown):
            found["failures"].append(f"lost: {stats.lost}, unknown blocks: {stats.blocks_unknown}")
    return found


def _ended(stock: StockContext, tokens: list[int]) -> list[int]:
    """What stock says after a token that ends an answer, up to N_PREDICT: the sessions ignore it."""
    more: list[int] = []
    while len(tokens) + len(more) < N_PREDICT:
        more.append(int(stock.decode([(tokens + more)[-1]])[0].argmax()))
    return more


def run_cases(seeds: list[int], device: str | None) -> None:
    """In a process of its own: prints the lines of cases."""
    library.start()
    with tempfile.TemporaryDirectory(prefix="moeedge-soak-") as folder:
        tiny = tiny_factory(Path(folder))
        for seed in seeds:
            start_s = time.monotonic()
            signal.alarm(LIMIT_S)
            try:
                line = run_case(seed, device, tiny)
            except InputError as error:
                line = {"seed": seed, **settings_of(seed, device), "refused": error.message}
            print(json.dumps(line | {"seconds": round(time.monotonic() - start_s, 1)}), flush=True)


def in_a_process(seeds: list[int], device: str | None) -> list[dict[str, Any]]:
    """The lines of the cases; one whose process ends has a failure, and the others go on in another process."""
    lines: list[dict[str, Any]] = []
    while len(lines) < len(seeds):
        words = [sys.executable, "-m", "tests.soak.greedy", "--run", ",".join(map(str, seeds[len(lines) :]))]
        words += ["--device", device] if device else []
        environment = os.environ | {"GOMP_SPINCOUNT": "1000", "MOEEDGE_NO_PROBE": "1"}
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        lines += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        told = f"ended with {done.returncode}: {done.stderr[-500:]}"
        if len(lines) < len(seeds):
            seed = seeds[len(lines)]
            lines.append({"seed": seed, **settings_of(seed, device), "tokens": 0, "tied": 0, "failures": [told]})
        elif done.returncode:  # at its end
            lines[-1].setdefault("failures", []).append(told)
    return lines


def batches(first: int, most: int, done: Collection[int]) -> Iterator[list[int]]:
    """The seeds of the cases of each process, but those that are done."""
    seeds = (seed for seed in range(first, first + most) if seed not in done)
    while batch := list(islice(seeds, CASES_PER_PROCESS)):
        yield batch


def summary(lines: list[dict[str, Any]]) -> str:
    """The sums of a record."""
    compared = [line for line in lines if "tokens" in line]
    sums: Counter[str] = Counter()
    for line in compared:
        sums.update(tokens=line["tokens"], tied=line["tied"], failures=len(line["failures"]))
    models = len({line["model"] for line in compared})
    return (
        f"{sums['tokens']:,} tokens of {models} models in {len(compared):,} sessions: {sums['tied']:,} of "
        f"{sums['tokens'] // N_PREDICT:,} answers with near-ties, {sums['failures']:,} failures; "
        f"{len(lines) - len(compared):,} settings refused"
    )


def main() -> int:
    """Runs cases until so many tokens were compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--cases", type=int, default=1 << 40)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--device", help="of all cases, as -dev takes it")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_cases([int(seed) for seed in options.run.split(",")], options.device)
        return 0
    lines: list[dict[str, Any]] = []
    if options.out is not None and options.out.is_file():
        whole = options.out.read_text(encoding="utf-8").rpartition("\n")[0]
        options.out.write_text(whole + "\n", encoding="utf-8")
        lines = [json.loads(line) for line in whole.splitlines()][1:]
    elif options.out is not None:
        command = " ".join(Path(word).name for word in sys.argv[1:])
        head = {"schema": SCHEMA, "environment": as_dict(read_provenance()), "command": command}
        options.out.write_text(json.dumps(head) + "\n", encoding="utf-8")
    end_s = time.monotonic() + 60 * options.minutes
    asked = batches(options.seed, options.cases, {line["seed"] for line in lines})
    running: set[Future[list[dict[str, Any]]]] = set()
    with ThreadPoolExecutor(options.workers) as pool:
        while True:
            enough = sum(line.get("tokens", 0) for line in lines) >= options.tokens or time.monotonic() > end_s
            while not enough and len(running) < options.workers and (batch := next(asked, None)) is not None:
                running.add(pool.submit(in_a_process, batch, options.device))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for line in (line for future in done for line in future.result()):
                lines.append(line)
                for failure in line.get("failures", ()):
                    print(f"seed {line['seed']}, {line['model']}: {failure}", flush=True)
                if options.out is not None:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    print(summary(lines))
    return int(any(line.get("failures") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
