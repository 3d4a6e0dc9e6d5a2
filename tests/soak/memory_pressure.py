"""Soak test: answers of a model with its experts in RAM while another program takes memory and gives it back.

    moeedge lab widen BIG.gguf --embd 1024 --ff 384 --type q8_0
    python -m tests.soak.memory_pressure -m BIG.gguf --free 6GiB --out docs/benchmarks/memory-pressure.json

First stock llama.cpp answers the prompts of the data set `toy` on the mapped file. Then a ballast of locked memory
leaves `--free` bytes, a session with `--ram auto` fills them with slots and answers the same prompts in random order,
with pauses, while the ballast grows and shrinks: it takes up to `--share` of the slots' memory and gives it back. No
answer may differ, and the process must live. The record (schema moeedge-memory-pressure-1) has every answer's slots and
free memory, and all warnings.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from moeedge.data.datasets import load_toy
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.hardware.provenance import read_provenance
from moeedge.run import Notification
from moeedge.scheduler.config import PlacementConfig
from moeedge.units import parse_size
from tests.support.ballast import Ballast
from tests.support.hybrid import greedy_answer

SCHEMA = "moeedge-memory-pressure-1"
PERIOD_S = (5.0, 30.0)  # between two sizes of the ballast
STEP_BYTES = 64 << 20
PAUSE_S = 0.1  # after each: a program that takes 0.6 GB/s
IDLE_CHANCE, IDLE_S = 0.25, 10.0  # of a pause after an answer, and its longest time


def prompts() -> list[str]:
    """All first turns of the data set."""
    return [prompt.turns[0][-1].content for prompt in load_toy().prompts]


def answer(session: Session, text: str, n_predict: int) -> list[int]:
    """Greedy tokens, in an empty context."""
    return greedy_answer(session, session.model.chat_tokens([{"role": "user", "content": text}]), n_predict)


def references(options: argparse.Namespace) -> list[list[int]]:
    """The answers of stock llama.cpp on the mapped file, without drafts."""
    config = EngineConfig(model=options.model, draft=None, gamma=0, n_ctx=2048, device="none", ram="off", mode="stock")
    with Session.open(config) as session:
        return [answer(session, text, options.n_predict) for text in prompts()]


def press(ballast: Ballast, limits: tuple[int, int], seed: int, stop: threading.Event) -> None:
    """Changes the ballast to random sizes between the limits until `stop` is set."""
    rng = random.Random(seed)
    held_bytes = limits[0]
    while not stop.is_set():
        wanted_bytes = rng.randint(*limits)
        while held_bytes < wanted_bytes and not stop.is_set():
            held_bytes = min(held_bytes + STEP_BYTES, wanted_bytes)
            ballast.hold(held_bytes)
            time.sleep(PAUSE_S)
        held_bytes = wanted_bytes
        ballast.hold(held_bytes)
        stop.wait(rng.uniform(*PERIOD_S))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Both parts."""
    expected = references(options)
    print(f"{len(expected)} reference answers", file=sys.stderr, flush=True)
    config = EngineConfig(
        model=options.model,
        n_ctx=2048,
        device="none",
        ram=options.ram,
        placement=PlacementConfig(policy="lfu", calibrate=False),
    )
    rows: list[dict[str, Any]] = []
    warnings: list[dict[str, Any]] = []
    stop = threading.Event()
    held_bytes = max(0, psutil.virtual_memory().available - options.free) if options.free else 0
    with Ballast(held_bytes) as ballast, Session.open(config) as session:
        placement = session.placement
        assert placement is not None, session.info.notes
        start_s = time.monotonic()

        def warn(text: str) -> None:
            level = str(text.level) if isinstance(text, Notification) else ""
            warnings.append({"time_s": time.monotonic() - start_s, "level": level, "text": str(text)})

        placement.run.show = warn
        slots_bytes = placement.cache.info.pool_bytes
        limits = (held_bytes, held_bytes + int(options.share * slots_bytes))
        pressing = threading.Thread(target=press, args=(ballast, limits, options.seed, stop), daemon=True)
        pressing.start()
        rng = random.Random(options.seed)
        try:
            while time.monotonic() - start_s < 60 * options.minutes:
                index = rng.randrange(len(expected))
                begin_s = time.monotonic()
                tokens = answer(session, prompts()[index], options.n_predict)
                rows.append(
                    {
                        "time_s": begin_s - start_s,
                        "answer_s": time.monotonic() - begin_s,
                        "prompt": index,
                        "equal": tokens == expected[index],
                        "slots": placement.cache.info.n_slots,
                        "free_bytes": psutil.virtual_memory().available,
                    }
                )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                if rng.random() < IDLE_CHANCE:
                    time.sleep(rng.uniform(0.0, IDLE_S))
        finally:
            stop.set()
            pressing.join(60.0)
    return {
        "schema": SCHEMA,
        "environment": asdict(read_provenance()),
        "model_bytes": options.model.stat().st_size,
        "minutes": options.minutes,
        "answers": len(rows),
        "different_answers": sum(not row["equal"] for row in rows),
        "slots": [min(row["slots"] for row in rows), max(row["slots"] for row in rows)],
        "warnings": warnings,
        "rows": rows,
    }


def main() -> None:
    """Runs the test; exit code 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--ram", type=lambda text: text if text == "auto" else parse_size(text), default="auto")
    parser.add_argument("--free", type=parse_size, default=0, help="memory that is left at the start; 0: all of it")
    parser.add_argument("--share", type=float, default=0.7, help="of the slots that the ballast takes at most")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("-n", "--n-predict", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = run(options)
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    record["command"] = f"python -m tests.soak.memory_pressure {' '.join(words)}"
    if options.out:
        options.out.write_text(json.dumps(record), encoding="utf-8")
    print(json.dumps({key: record[key] for key in ("answers", "different_answers", "slots", "warnings")}, indent=2))
    raise SystemExit(1 if record["different_answers"] else 0)


if __name__ == "__main__":
    main()
