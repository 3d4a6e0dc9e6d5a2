"""llama-bench's tests: prefill of N random tokens (ppN) and decoding of N random tokens one by one (tgN).

They time the target alone, as llama-bench does: no sampling, no drafts (nothing can guess random tokens). What is left
is the cost of our backend beside stock's path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moeedge.bench.lanes import Lane
from moeedge.bench.modes import rotated
from moeedge.bench.samples import Sample
from moeedge.engine.types import Phase

_SEED = 1
_WARM_UP_TOKENS = 4


def random_tokens(n: int, n_vocab: int) -> list[int]:
    """The same `n` token ids on every run and in every mode."""
    return [int(token) for token in np.random.default_rng(_SEED).integers(0, n_vocab, n)]


def synthetic_lanes(lanes: Sequence[Lane]) -> tuple[list[Lane], list[str]]:
    """One lane per engine mode, and one sentence for each lane that would only repeat another one's work."""
    kept: dict[str, Lane] = {}
    notes = []
    for lane in lanes:
        first = kept.setdefault(lane.mode.engine, lane)
        if first is not lane:
            notes.append(
                f"pp and tg tests use no drafts; {lane.mode.name} would be {first.mode.name} again and is left out."
            )
    return list(kept.values()), notes


def run_prefill(lanes: Sequence[Lane], n_tokens: int, repetitions: int, cancel: Callable[[], bool]) -> Iterator[Sample]:
    """ppN: one sample per mode and repetition. A round before them warms up."""
    tokens = random_tokens(n_tokens, lanes[0].session.model.info.n_vocab)
    for repetition, place, lane in _rounds(lanes, repetitions):
        if cancel():
            return
        lane.session.reset()
        cpu_before_s, start_s = time.process_time(), time.perf_counter()
        lane.session.target.decode(tokens, phase=Phase.PREFILL, logits="last")
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_before_s
        if repetition >= 0:
            yield Sample(
                lane.mode.name, "", 0, repetition, place,
                prompt_tokens=n_tokens, prefill_tokens=n_tokens, prefill_s=elapsed_s, cpu_s=cpu_s,
            )  # fmt: skip


def run_decode(lanes: Sequence[Lane], n_tokens: int, repetitions: int, cancel: Callable[[], bool]) -> Iterator[Sample]:
    """tgN: one sample per mode and repetition, from an empty KV cache. A few tokens before them warm up."""
    tokens = random_tokens(n_tokens, lanes[0].session.model.info.n_vocab)
    for repetition, place, lane in _rounds(lanes, repetitions):
        lane.session.reset()
        target = lane.session.target
        cpu_before_s, start_s = time.process_time(), time.perf_counter()
        for token in tokens if repetition >= 0 else tokens[:_WARM_UP_TOKENS]:
            if cancel():
                return
            target.decode([token], phase=Phase.DECODE, logits="last")
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_before_s
        if repetition >= 0:
            yield Sample(
                lane.mode.name, "", 0, repetition, place,
                generated_tokens=n_tokens, decode_tokens=n_tokens, decode_s=elapsed_s, steps=n_tokens, cpu_s=cpu_s,
            )  # fmt: skip


def _rounds(lanes: Sequence[Lane], repetitions: int) -> Iterator[tuple[int, int, Lane]]:
    """(repetition, place in the order, lane); repetition -1 warms up."""
    by_name = {lane.mode.name: lane for lane in lanes}
    for repetition in range(-1, repetitions):
        for place, mode in enumerate(rotated([lane.mode for lane in lanes], repetition + 1)):
            yield repetition, place, by_name[mode.name]
