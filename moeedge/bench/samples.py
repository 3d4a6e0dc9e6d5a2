"""The raw samples of a run: one per mode, prompt, turn and repetition.

Samples to numbers: speeds over repetitions, ratios over pairs. Pure functions.

The expert cache's counters: what a sample keeps of them, and the rates of a row, which are sums over samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moeedge.engine.session import Session
from moeedge.engine.types import GenerationStats, StopReason
from moeedge.scheduler.stats import PlacementStats


@dataclass(frozen=True)
class Sample:
    """One timed answer (in a synthetic test: one timed run of decodes). All else is computed from these."""

    mode: str  # BenchMode.label
    prompt: str  # the prompt's id; "" in a synthetic test
    turn: int  # from 0
    repetition: int  # from 0
    order: int  # this mode ran as the order-th of the modes, from 0
    prompt_tokens: int = 0  # of the whole conversation
    prefill_tokens: int = 0  # of these, decoded now; the rest was in the KV cache from the turn before
    prefill_s: float = 0.0
    generated_tokens: int = 0
    decode_tokens: int = 0  # those that decode_s is for: without the first, which ends the prefill; with a stop token
    decode_s: float = 0.0
    ttft_s: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    experts_sum: float = 0.0  # over steps: distinct experts per layer and verification
    draft_s: float = 0.0
    verify_s: float = 0.0
    observe_s: float = 0.0
    cpu_s: float = (
        0.0  # processor seconds of this process, all threads: far below wall time x threads, others were busy
    )
    stop_reason: StopReason | None = None
    warm: bool = True  # this mode had run before, in the warm-up or in an earlier repetition
    prefill_placement: Counters | None = None  # the expert cache's counters up to the first token; None: no cache
    placement: Counters | None = None  # the same from the first token on
    answer: str | None = None  # the text; with scores only
    score: float | None = None  # 0 to 1; None: not scored
    score_reason: str = ""  # why it is not 1, in one line
    # kept for the output check, no part of the record
    tokens: list[int] = field(default_factory=list)  # the answer, without the stop token
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int, int]:
        """What the same work in another mode has in common with it."""
        return (self.prompt, self.turn, self.repetition)

    @property
    def pp_ts(self) -> float | None:
        """Prefill speed in tokens/s."""
        return self.prefill_tokens / self.prefill_s if self.prefill_tokens and self.prefill_s > 0 else None

    @property
    def tg_ts(self) -> float | None:
        """Decode speed in tokens/s."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """For the record: all but the tokens and the mode, which the row names."""
        fields = asdict(self)
        del fields["tokens"], fields["prompt_ids"], fields["mode"]
        return fields


def from_stats(stats: GenerationStats, *, stop_reason: StopReason | None, **others: Any) -> Sample:
    """A sample from what the engine counted; `others` are the fields that it does not know."""
    return Sample(
        stop_reason=stop_reason,
        prompt_tokens=stats.prompt_tokens,
        prefill_tokens=stats.prefill_tokens,
        prefill_s=stats.prefill_s,
        generated_tokens=stats.generated_tokens,
        # the engine leaves a stop token out of the answer; it was decoded all the same
        decode_tokens=max(stats.generated_tokens - 1 + (stop_reason == "eos"), 0),
        decode_s=stats.decode_s,
        ttft_s=stats.ttft_s,
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        experts_sum=stats.experts_sum,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        observe_s=stats.observe_s,
        **others,
    )


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


# what a user's pause between two turns gives the mover, at least
_REST_S = 0.5

# what a sample keeps of PlacementStats; counters all, so that they can be added
COUNTERS = (
    "steps", "pairs", "pairs_hit", "unique", "unique_hit", "uploads", "evictions", "cancelled", "bytes_moved",
    "transfer_s", "cpu_s", "device_s", "wait_s", "partition_s", "schedule_s", "draft_s", "decode_s",
)  # fmt: skip

Counters = dict[str, float]


def counted(older: PlacementStats | None, newer: PlacementStats | None) -> Counters | None:
    """What was counted between two looks at a session; None where it has no expert cache."""
    if older is None or newer is None:
        return None
    interval = newer - older
    return {name: getattr(interval, name) for name in COUNTERS}


def drain_transfers(session: Session) -> None:
    """Ends the transfers of a sample, untimed, so that they do not fall on the mode that is measured next."""
    if session.placement is not None:
        session.placement.rest(_REST_S)


@dataclass(frozen=True)
class CacheFigures:
    """The figures of a row; None where nothing was counted."""

    hit_rate_pairs: float | None = None
    hit_rate_unique: float | None = None
    uploads_per_step: float | None = None
    bytes_moved: int | None = None


def cache_figures(samples: Iterable[Counters | None]) -> CacheFigures:
    """Rates of the sums, never means of rates: every pair, expert and step weighs the same."""
    known = [counters for counters in samples if counters is not None]
    if not known:
        return CacheFigures()
    sums = {name: sum(counters[name] for counters in known) for name in COUNTERS}
    return CacheFigures(
        hit_rate_pairs=_share(sums["pairs_hit"], sums["pairs"]),
        hit_rate_unique=_share(sums["unique_hit"], sums["unique"]),
        uploads_per_step=_share(sums["uploads"], sums["steps"]),
        bytes_moved=int(sums["bytes_moved"]),
    )


def _share(above: float, below: float) -> float | None:
    return above / below if below else None
