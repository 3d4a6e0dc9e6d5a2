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
_SLICE_TOKENS = 16


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
    """tgN: N tokens per mode and repetition, from an empty KV cache; some tokens before them warm up.

    The modes take turns every _SLICE_TOKENS tokens, each going on in its own KV cache, and each slice is a sample:
    pairs of neighbours stay close in time however large N is.
    """
    tokens = random_tokens(n_tokens, lanes[0].session.model.info.n_vocab)
    by_name = {lane.mode.name: lane for lane in lanes}
    rotation = 0
    for repetition in range(-1, repetitions):
        for lane in lanes:
            lane.session.reset()
        for index, first in enumerate(range(0, n_tokens, _SLICE_TOKENS)):
            part = tokens[first : first + _SLICE_TOKENS]
            for place, mode in enumerate(rotated([lane.mode for lane in lanes], rotation)):
                sample = _decode_slice(by_name[mode.name], part, index, repetition, place, cancel)
                if sample is None:
                    return
                if repetition >= 0:
                    yield sample
            rotation += 1
            if repetition < 0:
                break  # one slice is enough to warm up


def _decode_slice(
    lane: Lane, tokens: Sequence[int], index: int, repetition: int, place: int, cancel: Callable[[], bool]
) -> Sample | None:
    """Decodes `tokens` one by one; None when `cancel` says so."""
    target = lane.session.target
    cpu_before_s, start_s = time.process_time(), time.perf_counter()
    for token in tokens:
        if cancel():
            return None
        target.decode([token], phase=Phase.DECODE, logits="last")
    elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_before_s
    n = len(tokens)
    return Sample(
        lane.mode.name, "", index, repetition, place,
        generated_tokens=n, decode_tokens=n, decode_s=elapsed_s, steps=n, cpu_s=cpu_s,
    )  # fmt: skip


def n_slices(n_tokens: int) -> int:
    """Samples per mode and repetition of tgN."""
    return -(-n_tokens // _SLICE_TOKENS)


def _rounds(lanes: Sequence[Lane], repetitions: int) -> Iterator[tuple[int, int, Lane]]:
    """(repetition, place in the order, lane); repetition -1 warms up."""
    by_name = {lane.mode.name: lane for lane in lanes}
    for repetition in range(-1, repetitions):
        for place, mode in enumerate(rotated([lane.mode for lane in lanes], repetition + 1)):
            yield repetition, place, by_name[mode.name]
