"""Figures of texts that are decoded together: throughput, and what speculation gains over plain decoding.

Both modes of a speed-up decode the same texts, with the same number of them at a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moeedge.bench.config import REFERENCE, BenchMode
from moeedge.bench.samples import Sample, paired_ratios, quotient


@dataclass(frozen=True)
class ParallelFigures:
    """What a row says about N texts that are decoded together."""

    n_parallel: int  # N
    curve: str  # the mode and what distinguishes it, as in its label, without N
    sequence_ts: float | None  # tokens/s of one of the texts
    plain_mode: str | None  # that speed_up is over: the same without drafts and with the same N
    speed_up: float | None  # throughput over that of plain_mode, median of pairs
    speed_up_samples: tuple[float, ...]  # one per repetition
    full_batch_share: float | None  # of the decoding time: steps with N texts, which alone count


def parallel_record(figures: ParallelFigures | None) -> dict[str, Any]:
    """Returns the keys of a row; one text at a time where there are no figures."""
    if figures is None:
        empty = dict.fromkeys(ParallelFigures.__dataclass_fields__)
        return {**empty, "n_parallel": 1, "speed_up_samples": []}
    return {**asdict(figures), "speed_up_samples": list(figures.speed_up_samples)}


def plain_mode(mode: BenchMode, modes: Sequence[BenchMode]) -> BenchMode | None:
    """Returns the mode that decodes as many texts without drafts: of the same engine if there is one, else stock-ar.

    Expert caches of both have the same policy and cache ratio. None for a mode without drafts.
    """
    if not mode.drafts:
        return None
    plain = [other for other in modes if not other.drafts and other.n_parallel == mode.n_parallel]
    same = [other for other in plain if _cache_of(other) == _cache_of(mode)]
    return next(iter([*same, *(other for other in plain if other.name == REFERENCE)]), None)


def _cache_of(mode: BenchMode) -> tuple[object, ...]:
    return mode.engine, mode.policy, mode.cache_ratio


def parallel_figures(
    mode: BenchMode,
    own: Sequence[Sample],
    plain: tuple[BenchMode, Sequence[Sample]] | None,
    gamma: int,
) -> ParallelFigures:
    """Returns the figures of a mode's samples.

    plain: the mode without drafts that it is compared with, and its samples. gamma: 0 for plain decoding.
    """
    n_parallel = mode.n_parallel or 1
    throughput_ts = quotient(sum(s.decode_tokens for s in own), sum(s.decode_s for s in own))
    ratios = [] if plain is None else paired_ratios(own, plain[1], lambda sample: sample.tg_ts)
    return ParallelFigures(
        n_parallel=n_parallel,
        curve=replace(mode, gamma=gamma or None, n_parallel=None).label,
        sequence_ts=None if throughput_ts is None else throughput_ts / n_parallel,
        plain_mode=plain[0].name if plain is not None and ratios else None,
        speed_up=statistics.median(ratios) if ratios else None,
        speed_up_samples=tuple(ratios),
        full_batch_share=quotient(sum(s.decode_s for s in own), sum(s.all_decode_s for s in own)),
    )
