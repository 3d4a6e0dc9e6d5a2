"""Soak test: chat turns of random length for a long time, experts on the emulated device; no growth, no lost slots.

    python -m tests.soak.chat_soak --minutes 30

After every turn the process's memory, threads and open files and the native counters are sampled: none may grow over
the last two thirds, and the counters must add up each time.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import psutil

from moeedge import native, paths
from moeedge.data.datasets import load_sample, load_toy
from moeedge.engine.conversation import Conversation, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama import library
from moeedge.native.cache import ExpertCache
from moeedge.scheduler.config import PlacementConfig

N_CTX = 2048
MAX_TURNS_PER_S = 100
WARM_UP = 1 / 3  # of the run: caches of graphs and Python's own pools fill
# permitted growth over the 20 minutes and 5,000 turns after the warm-up of a long run: 1.6 KiB per turn, because some
# pools fill late; a smaller leak is not found
RSS_LIMIT_BYTES = 8 << 20
COUNTERS = ("uploads", "evictions", "failed", "slots_used", "in_flight", "pinned")  # of the cache


@dataclass(frozen=True)
class Sample:
    """The process after one turn."""

    time_s: float
    turns: int
    tokens: int  # generated so far
    rss_bytes: int
    threads: int
    fds: int
    instances: int  # of our backend
    uploads: int
    evictions: int
    failed: int
    slots_used: int
    resident: int
    in_flight: int
    pinned: int

    @property
    def balanced(self) -> bool:
        """Whether uploads minus evictions are the used slots, and no slot is in use between two turns."""
        return (
            self.uploads - self.evictions == self.slots_used
            and 0 <= self.slots_used - self.resident <= self.in_flight
            and self.pinned == 0
            and self.failed == 0
        )


class Samples:
    """Samples as rows of an array that is allocated and touched beforehand, so that they do not count as growth."""

    def __init__(self, n_max: int) -> None:
        self._rows = np.full((n_max, len(fields(Sample))), -1.0)
        self._n = 0

    def append(self, sample: Sample) -> None:
        self._rows[self._n] = astuple(sample)
        self._n += 1

    def take(self) -> list[Sample]:
        """Returns the samples in the order in which they were appended."""
        return [Sample(float(row[0]), *(int(value) for value in row[1:])) for row in self._rows[: self._n]]


def questions(seed: int) -> Iterator[str]:
    """Yields bundled prompts in random order, sometimes several joined: prompts of 10 to 1000 tokens."""
    rng = random.Random(seed)
    prompts = (*load_toy().prompts, *load_sample().prompts)
    texts = [message.content for prompt in prompts for turn in prompt.turns for message in turn]
    while True:
        n_texts = rng.choice((1, 1, 1, 2, 8))
        yield "\n".join(rng.choice(texts) for _ in range(n_texts))


def take(
    session: Session, cache: ExpertCache, process: psutil.Process, start_s: float, turns: int, tokens: int
) -> Sample:
    """Waits until no plan is being made and no transfer is in flight, then returns a sample."""
    assert session.placement is not None
    session.placement.wait()  # a plan that is pushed later would start transfers while the sample is taken
    cache.drain(10.0)
    gc.collect()
    stats = cache.stats()
    return Sample(
        time_s=time.monotonic() - start_s,
        turns=turns,
        tokens=tokens,
        rss_bytes=process.memory_info().rss,
        threads=process.num_threads(),
        fds=process.num_fds(),
        instances=native.load().moeedge_live_instances(),
        resident=int((cache.residency() == 1).sum()),
        **{name: getattr(stats, name) for name in COUNTERS},
    )


def chat(session: Session, seconds: float, seed: int) -> list[Sample]:
    """Conversations of one to six turns until the time is up; a sample after every turn."""
    assert session.placement is not None, session.info.notes
    cache = session.placement.cache  # type: ignore[attr-defined]
    process = psutil.Process()
    rng = random.Random(seed)
    asked = questions(seed)
    samples = Samples(int(seconds * MAX_TURNS_PER_S) + 100)
    tokens = turns = 0
    start_s = time.monotonic()
    while time.monotonic() - start_s < seconds:
        conversation = Conversation(system=rng.choice(("", "Answer briefly.")))
        for _ in range(rng.randint(1, 6)):
            conversation.ask(next(asked))
            prompt = prompt_tokens(session.model, conversation)
            if len(prompt) + 64 > N_CTX or time.monotonic() - start_s >= seconds:
                break
            session.gamma = rng.choice((0, 1, 4, 8, 8, 8))
            sampling = SamplingConfig(temperature=rng.choice((0.0, 0.8)), seed=rng.randrange(1 << 30))
            answer = session.generate(prompt, n_predict=round(2 ** rng.uniform(0, 8)), sampling=sampling)
            for piece in answer.pieces():
                if rng.random() < 1e-3:  # Ctrl-C during an answer
                    answer.close()
                    break
                assert isinstance(piece, str)
            conversation.answer(answer.text)
            turns += 1
            tokens += len(answer.tokens)
            samples.append(take(session, cache, process, start_s, turns, tokens))
        session.reset()
    return samples.take()


def conclude(samples: list[Sample]) -> dict[str, Any]:
    """Returns the growth after the warm-up, along a line whose slope is robust against outliers."""
    warm = [sample for sample in samples if sample.time_s >= WARM_UP * samples[-1].time_s]
    span_s = warm[-1].time_s - warm[0].time_s
    limits = {"rss_bytes": RSS_LIMIT_BYTES, "threads": 0, "fds": 0, "instances": 0}
    slopes = {}
    for name, limit in limits.items():
        values = np.array([getattr(sample, name) for sample in warm], dtype=float)
        growth = slope([sample.time_s for sample in warm], values) * span_s
        slopes[name] = {"growth": growth, "limit": limit, "grows": bool(growth > limit)}
    return {
        "slopes": slopes,
        "unbalanced": [sample.turns for sample in samples if not sample.balanced],
        "slots_used_max": max(sample.slots_used for sample in samples),
        **{name: getattr(samples[-1], name) for name in ("uploads", "evictions", "turns", "tokens")},
    }


def slope(times_s: list[float], values: np.ndarray) -> float:
    """Returns the median slope over pairs that are half the series apart, in units per second."""
    half = len(values) // 2
    if half == 0:
        return 0.0
    pairs = range(len(values) - half)
    return statistics.median((values[i + half] - values[i]) / (times_s[i + half] - times_s[i]) for i in pairs)


def faults(conclusion: dict[str, Any]) -> list[str]:
    """Returns the failures, one sentence each."""
    found = [
        f"{name} grew by {row['growth']:.0f} (limit {row['limit']})"
        for name, row in conclusion["slopes"].items()
        if row["grows"]
    ]
    if conclusion["unbalanced"]:
        found.append(f"the counters do not balance after turns {conclusion['unbalanced'][:10]}")
    return found


def run(minutes: float, *, seed: int = 1) -> dict[str, Any]:
    """Runs the soak on the bundled pair and returns what `conclude` finds, and the instances that are left."""
    config = EngineConfig(
        model=paths.bundled_target(),
        draft=paths.bundled_draft(),
        gamma=8,
        n_ctx=N_CTX,
        n_threads=1,
        device="emulated:threads=1",
        placement=PlacementConfig(cache_ratio=0.17, calibrate=False),
    )
    library.start()
    before = native.load().moeedge_live_instances()  # contexts that other tests have abandoned
    with Session.open(config) as session:
        samples = chat(session, minutes * 60, seed)
    return {**conclude(samples), "instances_left": native.load().moeedge_live_instances() - before}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    record = run(options.minutes, seed=options.seed)
    for name, row in record["slopes"].items():
        print(f"{name}: trend {row['growth']:+.0f} (limit {row['limit']})")
    print(", ".join(f"{record[name]} {name}" for name in ("turns", "tokens", "uploads", "evictions")))
    wrong = faults(record)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
