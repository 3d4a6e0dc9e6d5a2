"""The cost of scheduling outside of an engine: time per step of every part that the decoding thread pays.

    python -m tests.benchmarks.scheduler_cost --layers 48 --experts 128 --used 8 --embd 1024 --out RECORD.json

One step is what the engine does: observe, plan and push after a verification, plan and push again when the draft's
tokens and hidden states are known. The store is a native expert cache on the emulated device, with experts of a few
bytes; its transfers end, untimed, before the next call, so that every run makes the same plans. Routing is synthetic,
token-determined in part, drawn from a fixed seed. Before the first timed step the policy has seen every token of the
vocabulary, and so many verifications with hidden states that its memories are full.

Between two verifications a model's weights pass through the CPU's caches. So before each of a step's two halves a
buffer larger than these caches is read and written ("cold"); the same steps without it are "warm". Every plan of the
warm run is checked against the mover's rules, outside the timed calls.

Figures are medians over steps, of wall time and of the calling thread's processor time. The latter holds on a busy
machine too; the former includes waiting, for other programs and for the mover's lock.
tests/benchmarks/engine_cost.py measures the same in an engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import count_ids
from moeedge.hardware.provenance import read_provenance
from moeedge.native.cache import ExpertCache
from moeedge.policies.base import Observation, Plan, PolicyConfig, check_plan
from moeedge.policies.cost_model import CostModel
from moeedge.policies.registry import make_policy
from moeedge.scheduler.driver import StepDriver
from moeedge.scheduler.native_io import CacheStore, cache_shape
from tests.support.experts import write_experts

SCHEMA = "moeedge-scheduler-cost-2"
PARTS = ("observe", "plan_next", "push_next", "plan_draft", "push_draft", "residency")
SHARE_OF_TOKEN = 0.8  # share of a token's experts that it uses every time
NOISE = 0.7  # of a hidden state, in lengths of its token's own part
WARM_UP_STEPS = 460  # verifications of 9 tokens: more than the 4,096 hidden states that spac keeps
VOCABULARY = 12_000  # tokens: more than rows in spac's table at 48 x 128
CAP = 4
_PREFILL_TOKENS = 500
_DRAIN_S = 30.0
_CACHE_BYTES_MIN = 32 << 20

# a 24 GB card and a desktop CPU, with Qwen3-30B-A3B's experts: only proportions matter here
COST_MODEL = CostModel(
    cpu_expert_s=np.r_[0.0, np.linspace(80e-6, 160e-6, 9)],
    device_expert_s=np.r_[0.0, np.linspace(8e-6, 12e-6, 9)],
    transfer_expert_s=110e-6,
    draft_token_s=4e-3,
    block_overhead_s=20e-6,
    r_c=np.linspace(0.2, 0.9, CAP + 1),
    r_g=np.linspace(0.9, 0.1, CAP + 1),
)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is measured; all verifications have gamma + 1 tokens."""

    n_layers: int = 48
    n_experts: int = 128
    n_used: int = 8
    gamma: int = 8
    n_embd: int = 1024  # values of a hidden state
    n_vocabulary: int = VOCABULARY
    warm_up: int = WARM_UP_STEPS
    steps: int = 200
    seed: int = 1


@dataclass(frozen=True, eq=False)
class Batch:
    """One verification, or one part of a prompt."""

    tokens: NDArray[np.int32]  # [n_tokens]
    ids: NDArray[np.int32]  # [n_layers, n_tokens, k]
    counts: NDArray[np.uint32]  # [n_layers, n_experts]
    n_accepted: int
    hidden_states: NDArray[np.float32]  # [n_tokens - 1, n_embd], the last draft has none; [0] for a prompt


class Text:
    """Tokens by Zipf's law with experts and hidden states of their own.

    prompt: every token of the vocabulary once, the most frequent ones last. verifications: those of the warm-up first.
    """

    def __init__(self, load: Workload) -> None:
        self.load = load
        self._rng = np.random.default_rng(load.seed)
        shape = (load.n_vocabulary, load.n_layers)
        self._first = self._rng.integers(0, load.n_experts, shape, dtype=np.int32)
        self._stride = 2 * self._rng.integers(0, max(load.n_experts // 2, 1), shape, dtype=np.int32) + 1
        popularity = 1.0 / np.arange(1, load.n_vocabulary + 1)
        popularity /= popularity.sum()
        every = np.arange(load.n_vocabulary)[::-1]
        self.prompt = [
            self._batch(part) for part in np.split(every, range(_PREFILL_TOKENS, len(every), _PREFILL_TOKENS))
        ]
        self.verifications = [
            self._batch(self._rng.choice(load.n_vocabulary, load.gamma + 1, p=popularity))
            for _ in range(load.warm_up + load.steps)
        ]

    def _batch(self, tokens: NDArray[np.intp]) -> Batch:
        load, rng = self.load, self._rng
        # distinct experts of a token: odd strides through a power of two
        own = self._first[tokens][..., None] + self._stride[tokens][..., None] * np.arange(load.n_used, dtype=np.int32)
        score = rng.random((len(tokens), load.n_layers, load.n_experts), dtype=np.float32)
        stays = rng.random(own.shape) < SHARE_OF_TOKEN
        np.put_along_axis(score, own % load.n_experts, np.where(stays, np.float32(2.0), np.float32(0.0)), axis=2)
        ids = score.argpartition(load.n_experts - load.n_used, axis=2)[:, :, -load.n_used :].transpose(1, 0, 2)
        is_draft = len(tokens) == load.gamma + 1
        states = [self._state(token) for token in tokens[:-1].tolist()] if is_draft else []
        return Batch(
            tokens.astype(np.int32),
            np.ascontiguousarray(ids, dtype=np.int32),
            count_ids(ids, load.n_experts).astype(np.uint32),
            int(rng.integers(0, len(tokens))),
            np.asarray(states, dtype=np.float32),
        )

    def _state(self, token: int) -> NDArray[np.float32]:
        n_embd = self.load.n_embd
        own = np.random.default_rng([self.load.seed, token]).standard_normal(n_embd, dtype=np.float32)
        return own + np.float32(NOISE) * self._rng.standard_normal(n_embd, dtype=np.float32)


class Stopwatch:
    """Wall and processor time of the parts of a step; a part inside of another one is not counted twice."""

    def __init__(self) -> None:
        self._spent = np.zeros((len(PARTS), 2))  # seconds: wall, processor
        self._inner = np.zeros(2)  # of parts inside of the one that runs

    def time(self, part: str, call: Callable[[], Result]) -> Result:
        """Calls, and adds the time to `part`."""
        outer, self._inner = self._inner, np.zeros(2)
        start = (time.perf_counter(), time.thread_time())
        result = call()
        end = (time.perf_counter(), time.thread_time())
        taken = np.subtract(end, start)
        self._spent[PARTS.index(part)] += taken - self._inner
        self._inner = outer + taken
        return result

    def read_us(self) -> NDArray[np.float64]:
        """Microseconds [parts, 2] since the last reading."""
        spent, self._spent = self._spent, np.zeros((len(PARTS), 2))
        return spent * 1e6


class TimedStore(CacheStore):
    """The native cache as a store, with the time of reading the residency."""

    def __init__(self, cache: ExpertCache, watch: Stopwatch) -> None:
        super().__init__(cache)
        self.residency = lambda: watch.time("residency", cache.residency)


@dataclass(frozen=True)
class Times:
    """Medians over steps, in microseconds."""

    wall_us: float  # a step
    cpu_us: float
    parts_wall_us: dict[str, float]  # by PARTS; reading the residency is a part of its own
    parts_cpu_us: dict[str, float]
    samples_wall_us: list[float]  # one per step
    samples_cpu_us: list[float]

    @classmethod
    def of(cls, times_us: NDArray[np.float64]) -> Times:
        """times_us: [steps, parts, 2]."""
        wall_us, cpu_us = times_us[..., 0], times_us[..., 1]
        return cls(
            wall_us=_median(wall_us.sum(axis=1)),
            cpu_us=_median(cpu_us.sum(axis=1)),
            parts_wall_us=dict(zip(PARTS, map(_median, wall_us.T), strict=True)),
            parts_cpu_us=dict(zip(PARTS, map(_median, cpu_us.T), strict=True)),
            samples_wall_us=wall_us.sum(axis=1).round(1).tolist(),
            samples_cpu_us=cpu_us.sum(axis=1).round(1).tolist(),
        )


@dataclass(frozen=True)
class Cost:
    """The result of one policy."""

    policy: str
    cold: Times
    warm: Times
    pair_hit: float
    uploads_per_step: float


def cache_buffer() -> NDArray[np.uint8]:
    """A buffer of twice the CPU's largest cache."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return np.ones(2 * max(*sizes, 32 << 20), dtype=np.uint8)


@contextmanager
def open_cache(load: Workload, ratio: float) -> Iterator[ExpertCache]:
    """A native cache of `ratio` of the experts, on the emulated device."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts.bin"
        experts = write_experts(path, n_layers=load.n_layers, n_experts=load.n_experts, width=1)
        with ExpertCache(experts.config(ratio)) as cache:
            yield cache


def measure(
    name: str,
    text: Text,
    *,
    ratio: float = 0.17,
    cost_model: CostModel | None = COST_MODEL,
    n_buffer: int | None = None,
) -> Cost:
    """Replays the same steps warm, with every plan checked, and cold.

    n_buffer: bytes that are read and written; None: twice the largest cache.
    """
    buffer = np.ones(_cache_bytes() * 2 if n_buffer is None else n_buffer, dtype=np.uint8)
    gc.collect()
    gc.disable()
    try:
        warm_us, pair_hit, uploads = _run(name, text, ratio, cost_model, evict=None)
        cold_us, *others = _run(name, text, ratio, cost_model, evict=lambda: np.add(buffer, 1, out=buffer))
    finally:
        gc.enable()
    assert [pair_hit, uploads] == others, "other plans"
    return Cost(name, Times.of(cold_us), Times.of(warm_us), pair_hit, uploads)


def _cache_bytes() -> int:
    """The size of the CPU's largest cache."""
    sizes = [_CACHE_BYTES_MIN]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        size = path.read_text().strip()
        sizes.append(int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0))
    return max(sizes)


def _run(
    name: str, text: Text, ratio: float, cost_model: CostModel | None, *, evict: Callable[[], object] | None
) -> tuple[NDArray[np.float64], float, float]:
    """Microseconds [steps, parts, 2], the share of pairs that were resident, uploads per step."""
    load, watch = text.load, Stopwatch()
    with open_cache(load, ratio) as cache:
        shape = cache_shape(cache)
        policy = make_policy(name, shape, PolicyConfig(gamma=load.gamma, cap=CAP, cost_model=cost_model))
        driver = StepDriver(policy, TimedStore(cache, watch))

        def push(part: str, plan: Plan) -> None:
            if evict is None:
                check_plan(plan, shape, cache.residency(), CAP)
            watch.time(part, driver.push)
            assert cache.drain(_DRAIN_S), "the transfers did not end"

        for part in text.prompt:
            driver.observe(Observation(part.counts, len(part.tokens), 0, part.tokens, part.ids, prefill=True))
        times_us = []
        pairs = hits = uploads = 0
        for step, batch in enumerate(text.verifications):
            tokens, states = batch.tokens.tolist(), batch.hidden_states
            is_timed = step >= load.warm_up
            if step == load.warm_up:
                pairs, hits, uploads = 0, 0, cache.stats().uploads
            if is_timed and evict is not None:
                evict()
            push("push_draft", watch.time("plan_draft", partial(driver.plan_draft, tokens, hidden_states=states)))
            pairs += int(batch.counts.sum())
            hits += int(batch.counts[cache.residency() > 0].sum())
            if is_timed and evict is not None:
                evict()
            observation = Observation(batch.counts, len(tokens), batch.n_accepted, batch.tokens, batch.ids)
            watch.time("observe", partial(driver.observe, observation))
            coming = text.verifications[(step + 1) % len(text.verifications)]
            push("push_next", watch.time("plan_next", partial(driver.plan_next, coming.tokens[:1].tolist())))
            spent_us = watch.read_us()
            if is_timed:
                times_us.append(spent_us)
        return np.array(times_us), hits / pairs, (cache.stats().uploads - uploads) / load.steps


def _median(values: NDArray[np.float64]) -> float:
    return round(float(np.median(values)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="spac,spac-paper,lfu,lru,static")
    for name, default in (("layers", 48), ("experts", 128), ("used", 8), ("gamma", 8), ("embd", 1024), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ratio", type=float, default=0.17)
    parser.add_argument("--unbalanced", action="store_true", help="without a cost model, so without the balancer")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    load = Workload(
        n_layers=options.layers,
        n_experts=options.experts,
        n_used=options.used,
        gamma=options.gamma,
        n_embd=options.embd,
        steps=options.steps,
        seed=options.seed,
    )
    text = Text(load)
    cost_model = None if options.unbalanced else COST_MODEL
    costs = []
    for policy in options.policies.split(","):
        cost = measure(policy, text, ratio=options.ratio, cost_model=cost_model)
        costs.append(cost)
        for state, times in (("cold", cost.cold), ("warm", cost.warm)):
            parts = ", ".join(f"{part} {value:.0f}" for part, value in times.parts_cpu_us.items())
            print(
                f"{policy:11s} {state}, us per step: {times.cpu_us:.0f} processor ({parts}), {times.wall_us:.0f} wall"
            )
        print(f"{policy:11s} pair hit {cost.pair_hit:.3f}, {cost.uploads_per_step:.1f} uploads per step", flush=True)
    if options.out:
        settings = {**asdict(load), "ratio": options.ratio, "balanced": not options.unbalanced}
        record = {
            "schema": SCHEMA,
            "environment": asdict(read_provenance()),
            "settings": settings,
            "results": [asdict(cost) for cost in costs],
        }
        options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
