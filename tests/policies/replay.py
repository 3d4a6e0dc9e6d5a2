"""Drives a policy over recorded routing, with transfers that take no time: what a policy foresees, and nothing else.

    MOEEDGE_DATA=FOLDER python -m tests.policies.replay

prints every policy's hits and uploads on the data folder's traces (of gpt-oss-20b the first 60 texts), as docs/log.md
has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeedge.paths import data_dir
from moeedge.policies import POLICIES, make_policy
from moeedge.scheduler.policy import CacheShape, Observation, Plan, Policy, check_plan
from moeedge.trace import PREFILL, Trace


@dataclass(frozen=True, eq=False)
class Step:
    """One batch: its experts, its tokens where they are known, and whether a text begins."""

    ids: NDArray[np.int32]  # [n_layers, n_tokens, k], -1: not recorded
    tokens: NDArray[np.int32] | None  # [n_tokens]
    n_accepted: int
    prefill: bool
    fresh: bool


@dataclass(frozen=True)
class Replayed:
    """Shares are of what all verifications used; uploads are per layer with experts and verification."""

    pair_hit: float
    unique_hit: float
    uploads: float
    schedule_us: float  # median per verification: observe and all plans

    def __str__(self) -> str:
        return (
            f"pair hit {self.pair_hit:.3f}, unique hit {self.unique_hit:.3f}, "
            f"{self.uploads:.2f} uploads per layer and step, {self.schedule_us:.0f} us per step"
        )


def count(ids: NDArray[np.int32], n_experts: int) -> NDArray[np.uint32]:
    """Activations [n_layers, n_experts] of ids [n_layers, n_tokens, k]."""
    cells = np.arange(ids.shape[0])[:, None, None] * n_experts + ids
    counted = np.bincount(cells[ids >= 0], minlength=ids.shape[0] * n_experts)
    return counted.reshape(ids.shape[0], n_experts).astype(np.uint32)


class Slots:
    """The device's memory: carries a plan out as the mover does, at once."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.resident = np.zeros((shape.n_layers, shape.n_experts), dtype=np.uint8)
        self.n_uploads = 0

    def execute(self, plan: Plan) -> None:
        """Uploads in order, each into a free slot or over the group's lowest victim."""
        victims: list[list[tuple[int, int]]] = [[] for _ in range(self.shape.n_groups)]
        for layer, expert in plan.victims.tolist():
            victims[self.shape.group[layer]].append((layer, expert))
        waiting = [iter(group) for group in victims]
        free = [
            int(capacity) - int(np.count_nonzero(self.resident[self.shape.group == group]))
            for group, capacity in enumerate(self.shape.capacity)
        ]
        for layer, expert in plan.uploads.tolist():
            group = self.shape.group[layer]
            if free[group] > 0:
                free[group] -= 1
            else:
                victim = next(waiting[group], None)
                if victim is None:
                    continue
                self.resident[victim] = 0
            self.resident[layer, expert] = 1
            self.n_uploads += 1


def replay(policy: Policy, steps: Sequence[Step], shape: CacheShape, *, checked_cap: int | None = None) -> Replayed:
    """Plan after every step and, where tokens are known, again before the next; `checked_cap` checks every plan."""
    slots = Slots(shape)
    pairs = pairs_hit = unique = unique_hit = n_steps = 0
    times_us: list[float] = []
    spent_s = 0.0

    def plan(upcoming: list[int]) -> None:
        nonlocal spent_s
        start_s = time.perf_counter()
        made = policy.plan(slots.resident, upcoming)
        spent_s += time.perf_counter() - start_s
        if checked_cap is not None:
            check_plan(made, shape, slots.resident, checked_cap)
        slots.execute(made)

    for step in steps:
        if step.fresh:
            policy.reset()
        counts = count(step.ids, shape.n_experts)
        if not step.prefill:
            tokens = [] if step.tokens is None else step.tokens.tolist()
            plan(tokens[:1])
            if len(tokens) > 1:
                plan(tokens)
            there = slots.resident > 0
            pairs += int(counts.sum())
            pairs_hit += int(counts[there].sum())
            unique += int(np.count_nonzero(counts))
            unique_hit += int(np.count_nonzero(counts[there]))
            n_steps += 1
        observation = Observation(
            counts, step.ids.shape[1], step.n_accepted, step.tokens, step.ids, None, prefill=step.prefill
        )
        start_s = time.perf_counter()
        policy.observe(observation)
        spent_s += time.perf_counter() - start_s
        if not step.prefill:
            times_us.append(spent_s * 1e6)
        spent_s = 0.0
    n_layers = int(np.count_nonzero(shape.group >= 0))
    return Replayed(
        pairs_hit / max(pairs, 1),
        unique_hit / max(unique, 1),
        slots.n_uploads / max(n_steps * n_layers, 1),
        float(np.median(times_us)) if times_us else 0.0,
    )


def oracle(steps: Sequence[Step], shape: CacheShape) -> float:
    """Pair hit of the best residency for every single step, known from the step itself, with any number of uploads."""
    pairs = hits = 0
    for step in steps:
        if not step.prefill:
            counts = count(step.ids, shape.n_experts)
            pairs += int(counts.sum())
            for group, capacity in enumerate(shape.capacity):
                best = np.sort(counts[shape.group == group].reshape(-1))[::-1]
                hits += int(best[:capacity].sum())
    return hits / max(pairs, 1)


def recorded(trace: Trace) -> list[Step]:
    """The steps of a trace as they were computed, prefills included."""
    ids = trace.ids.astype(np.int32)
    ids[trace.ids == trace.sentinel] = -1
    key = trace.sequence.astype(np.int64) << 32 | trace.step
    starts = np.flatnonzero(np.r_[True, np.diff(key) != 0])
    steps = []
    for start, stop in zip(starts, np.r_[starts[1:], len(key)], strict=True):
        prefill = bool(trace.phase[start] == PREFILL)
        fresh = start == 0 or trace.sequence[start] != trace.sequence[start - 1]
        tokens = np.ascontiguousarray(trace.token[start:stop])
        n_accepted = 0 if prefill else int(trace.accepted[start:stop].sum()) - 1
        block = np.ascontiguousarray(ids[start:stop].transpose(1, 0, 2))
        steps.append(Step(block, tokens, n_accepted, prefill, bool(fresh)))
    return steps


def windows(
    ids: NDArray[np.integer], gamma: int, acceptance: float, rng: np.random.Generator, *, pessimistic: bool
) -> Iterator[Step]:
    """Verification windows cut from plain text, ids [T, n_layers, k]; refused drafts routed like the true continuation,
    or, pessimistic, like unrelated tokens of the text."""
    start, fresh = 0, True
    while start + gamma + 1 <= len(ids):
        refused = np.flatnonzero(rng.random(gamma) >= acceptance)
        n_accepted = int(refused[0]) if refused.size else gamma
        window = ids[start : start + gamma + 1].astype(np.int32)
        if pessimistic:
            window[n_accepted + 1 :] = ids[rng.integers(0, len(ids), gamma - n_accepted)]
        yield Step(np.ascontiguousarray(window.transpose(1, 0, 2)), None, n_accepted, False, fresh)
        start += n_accepted + 1
        fresh = False


def one_prompt(folder: Path, name: str, *, pessimistic: bool) -> list[Step]:
    """The decoded tokens of a trace of one prompt as windows of 9 with acceptance 0.8."""
    with np.load(folder / "traces" / f"{name}.npz") as arrays:
        ids = arrays["ids"][arrays["phase"] == 1]
    return list(windows(ids, 8, 0.8, np.random.default_rng(0), pessimistic=pessimistic))


def gptoss_windows(folder: Path, n_sequences: int, *, pessimistic: bool) -> list[Step]:
    """The first sequences of the gpt-oss-20b trace as windows of 9 tokens with acceptance 0.8."""
    with np.load(folder / "traces" / "gptoss20b_decode.npz") as arrays:
        ids, lengths = arrays["ids"], arrays["lengths"]
    ends = np.cumsum(lengths)
    rng = np.random.default_rng(0)
    steps: list[Step] = []
    for end, length in list(zip(ends, lengths, strict=True))[:n_sequences]:
        steps += windows(ids[end - length : end], 8, 0.8, rng, pessimistic=pessimistic)
    return steps


def main() -> None:
    folder = data_dir()
    assert folder is not None, "MOEEDGE_DATA names no folder"
    for pessimistic in (False, True):
        texts = (
            ("gpt-oss-20b", 32, gptoss_windows(folder, 60, pessimistic=pessimistic)),
            ("Gemma-4-26B-A4B", 128, one_prompt(folder, "bigmoeonedge_gemma", pessimistic=pessimistic)),
            ("gpt-oss-120b", 128, one_prompt(folder, "bigmoeonedge_gptoss", pessimistic=pessimistic)),
        )
        for model, n_experts, steps in texts:
            n_layers = len(steps[0].ids)
            shape = CacheShape.uniform(n_layers, n_experts, int(0.17 * n_layers * n_experts))
            tail = "pessimistic" if pessimistic else "optimistic"
            print(f"{model}, {tail}, {len(steps)} steps: oracle {oracle(steps, shape):.3f}")
            for name in POLICIES:
                print(f"  {name:10s} {replay(make_policy(name, shape), steps, shape)}")


if __name__ == "__main__":
    main()
