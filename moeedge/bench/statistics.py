"""Samples to numbers: speeds over repetitions, ratios over pairs. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moeedge.bench.samples import Sample


@dataclass(frozen=True)
class Spread:
    """A quantity over the repetitions."""

    mean: float
    stddev: float  # of the sample (n - 1); 0 for one value
    median: float
    values: tuple[float, ...]  # one per repetition


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, deviation and median of `values`; None where there are none."""
    if not values:
        return None
    stddev = statistics.stdev(values) if len(values) > 1 else 0.0
    return Spread(statistics.fmean(values), stddev, statistics.median(values), tuple(values))


def common_samples(samples: Iterable[Sample], modes: Sequence[str], expected: int | None = None) -> list[Sample]:
    """The samples whose work was done in every one of `modes`: what is left of a run that was interrupted.

    With `expected` pieces of work per repetition, an unfinished repetition is dropped where a finished one exists.
    """
    by_key: dict[tuple[str, int, int], list[Sample]] = {}
    for sample in samples:
        by_key.setdefault(sample.key, []).append(sample)
    complete = {key: found for key, found in by_key.items() if {s.mode for s in found} >= set(modes)}
    per_repetition: dict[int, int] = {}
    for _, _, repetition in complete:
        per_repetition[repetition] = per_repetition.get(repetition, 0) + 1
    full = {repetition for repetition, n in per_repetition.items() if expected is None or n >= expected}
    return [s for key, found in complete.items() if not full or key[2] in full for s in found]


def prefill_speed(samples: Sequence[Sample]) -> Spread | None:
    """Tokens/s of prefill: per repetition all tokens over all seconds."""
    return _speed(samples, lambda s: s.prefill_tokens, lambda s: s.prefill_s)


def decode_speed(samples: Sequence[Sample]) -> Spread | None:
    """Tokens/s of decoding: per repetition all tokens over all seconds."""
    return _speed(samples, lambda s: s.decode_tokens, lambda s: s.decode_s)


def paired_ratio(
    samples: Sequence[Sample], reference: Sequence[Sample], speed: Callable[[Sample], float | None]
) -> float | None:
    """The median over (prompt, turn, repetition) of speed / the reference's speed at the same work.

    Both were measured within seconds of each other, so that slow drift cancels; the median ignores single disturbances.
    """
    base = {sample.key: speed(sample) for sample in reference}
    ratios = []
    for sample in samples:
        ours, theirs = speed(sample), base.get(sample.key)
        if ours is not None and theirs:
            ratios.append(ours / theirs)
    return statistics.median(ratios) if ratios else None


def quotient(above: float, below: float) -> float | None:
    """above / below; None where there is nothing to divide by."""
    return above / below if below else None


def _speed(
    samples: Sequence[Sample], tokens: Callable[[Sample], int], seconds: Callable[[Sample], float]
) -> Spread | None:
    sums: dict[int, tuple[int, float]] = {}
    for sample in samples:
        n, s = sums.get(sample.repetition, (0, 0.0))
        sums[sample.repetition] = (n + tokens(sample), s + seconds(sample))
    return spread([n / s for _, (n, s) in sorted(sums.items()) if n and s > 0])
