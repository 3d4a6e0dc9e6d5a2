"""How long Ctrl-C takes in a long prompt, and what the question about it costs.

    python -m tests.benchmarks.stop_prompt MODEL.gguf [-t 2] [--stops 12] [--pairs 6] [--device none] [--mode moeedge]

Prints one JSON object. late_s: from the signal to the end of the answer, at random times of prompts of 3,000 tokens.
speed_ratios: the speed of a prompt that may be stopped over that of one that may not, by processor time, in pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path

from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.run import Run
from moeedge.ui.chat.interrupt import Interrupt

N_PROMPT, N_PAIR = 3000, 512  # tokens
FIRST_S, LAST_S = 0.3, 3.0  # of a signal, after the start of an answer
GREEDY = SamplingConfig(temperature=0)


def late(session: Session, tokens: list[int], wait_s: float) -> float | None:
    """Seconds from SIGINT to the end of the answer; None where the answer was faster than the signal."""
    sent_s = 0.0

    def send() -> None:
        nonlocal sent_s
        sent_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    session.reset()
    with Interrupt() as interrupt:
        interrupt.arm()
        timer = threading.Timer(wait_s, send)
        timer.start()
        answer = session.generate(tokens, n_predict=2, sampling=GREEDY, run=Run(cancelled=interrupt))
        list(answer)
        ended_s = time.monotonic()
        timer.cancel()
        timer.join()
    return ended_s - sent_s if answer.stop_reason == "interrupted" else None


def speed_ratio(session: Session, tokens: list[int], *, first: bool) -> float:
    """Processor time of a prompt without the question over that with it; first: the one with it comes first."""
    spent_s = {}
    for asks in (first, not first):
        session.reset()
        start_s = time.process_time()
        session.target.sequences[0].prefill(tokens, logits="last", run=Run() if asks else None)
        spent_s[asks] = time.process_time() - start_s
    return spent_s[False] / spent_s[True]


def measure(config: EngineConfig, *, n_stops: int, n_pairs: int, seed: int = 1) -> dict[str, object]:
    rng = random.Random(seed)
    tokens = [rng.randrange(256) for _ in range(N_PROMPT)]
    with Session.open(config) as session:
        speed_ratio(session, tokens[:N_PAIR], first=True)  # a warm-up
        ratios = [speed_ratio(session, tokens[:N_PAIR], first=pair % 2 == 0) for pair in range(n_pairs)]
        stops = [late(session, tokens, rng.uniform(FIRST_S, LAST_S)) for _ in range(n_stops)]
    late_s = [found for found in stops if found is not None]
    return {
        "model": config.model.name,
        "device": config.device,
        "mode": config.mode,
        "threads": config.n_threads,
        "n_prompt": N_PROMPT,
        "late_s": late_s,
        "late_s_median": statistics.median(late_s) if late_s else None,
        "late_s_max": max(late_s, default=None),
        "speed_ratios": ratios,
        "speed_ratio_median": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--stops", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--device", default="none")
    parser.add_argument("--mode", choices=("moeedge", "stock"), default="moeedge")
    given = parser.parse_args()
    config = EngineConfig(
        model=given.model, n_ctx=4096, n_threads=given.threads, gamma=0, device=given.device, mode=given.mode
    )
    print(json.dumps(measure(config, n_stops=given.stops, n_pairs=given.pairs), indent=1))


if __name__ == "__main__":
    main()
