"""Raw samples of a benchmark and the figures that are computed from them: speeds, ratios, rates of the expert cache."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import psutil

from moeedge.engine.types import GenerationStats, StopReason
from moeedge.hardware.machine_load import takes_cores
from moeedge.scheduler.stats import PlacementStats

# the counters of PlacementStats that a sample keeps; all of them can be added
COUNTERS = (
    "steps", "pairs", "pairs_hit", "unique", "unique_hit", "uploads", "evictions", "cancelled", "bytes_moved",
    "transfer_s", "cpu_s", "device_s", "wait_s", "partition_s", "schedule_s", "plan_s", "draft_s", "decode_s",
)  # fmt: skip

Counters = dict[str, float]
Disturbance = Literal["load", "scatter"]
RATIO_SCATTER = 0.5  # between repetitions; in records of quiet machines it is below 0.25


def disk_bytes_read() -> int | None:
    """Bytes that this process has read from disks, mapped files included; None where the system does not count them."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, psutil.Error):  # macOS; a container without /proc/PID/io
        return None


def named(source: object, *names: str, prefix: str = "") -> dict[str, Any]:
    """Returns attributes of `source` as keys of a record, with `prefix` before their names; null where it is None."""
    return {f"{prefix}{name}": None if source is None else getattr(source, name) for name in names}


@dataclass(frozen=True)
class Sample:
    """One timed answer, one timed run of decodes in a synthetic test, or all answers decoded together.

    All figures are computed from samples.
    """

    mode: str  # BenchMode.label
    prompt: str  # the prompt's id; "" in a synthetic test
    category: str = field(default="", kw_only=True)  # the prompt's
    turn: int  # from 0
    repetition: int  # from 0
    order: int  # position of this mode among the modes that took turns, from 0
    prompt_tokens: int = 0  # of the entire conversation
    prefill_tokens: int = 0  # of these, decoded now; the others were in the KV cache from the previous turn
    prefill_s: float = 0.0
    generated_tokens: int = 0
    decode_tokens: int = 0  # decoded in decode_s: without the first token, which ends the prefill; with a stop token
    decode_s: float = 0.0
    ttft_s: float = 0.0
    drain_s: float = 0.0  # after the answer: transfers that it planned end, or are dropped; not in decode_s
    all_decode_s: float = 0.0  # of answers decoded together: with the steps of fewer texts, which decode_s leaves out
    steps: int = 0  # of answers decoded together: of each text
    drafted: int = 0
    accepted: int = 0
    experts_sum: float = 0.0  # over steps: distinct experts per layer and verification
    experts_natural_sum: float = 0.0  # the same before an expert budget
    experts_max: int = 0  # the most that a layer used in a verification
    kept_probability_sum: float = 0.0  # over budgeted steps: share of the natural picks' routing probability that stays
    budgeted_steps: int = 0  # verifications under an expert budget
    draft_s: float = 0.0
    verify_s: float = 0.0
    observe_s: float = 0.0
    cpu_s: float = 0.0  # of all threads of this process; far below wall time x threads where other programs were busy
    others_s: float = 0.0  # processor time of other programs; may be below 0 by the clocks' resolution
    prefill_read_bytes: int | None = None  # by this process from disks, up to the first token
    decode_read_bytes: int | None = None  # the same from the first token on
    stop_reason: StopReason | None = None
    warm: bool = True  # this mode had run before, in the warm-up or in an earlier repetition
    prefill_placement: Counters | None = None  # the expert cache's counters up to the first token; None: no cache
    placement: Counters | None = None  # the same from the first token on
    answer: str | None = None  # the text; only with scores
    score: float | None = None  # 0 to 1; None: not scored
    score_reason: str = ""  # why the score is not 1, in one line
    # for the output check, not in the record
    tokens: list[int] = field(default_factory=list)  # the answer, without the stop token
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int, int]:
        """Identifies the same work in other modes."""
        return (self.prompt, self.turn, self.repetition)

    @property
    def pp_ts(self) -> float | None:
        """Prefill speed in tokens/s."""
        return self.prefill_tokens / self.prefill_s if self.prefill_tokens and self.prefill_s > 0 else None

    @property
    def tg_ts(self) -> float | None:
        """Decode speed in tokens/s."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None

    @property
    def timed_s(self) -> float:
        """Seconds of prompt and decoding."""
        return self.prefill_s + (self.all_decode_s or self.decode_s)

    @property
    def total_ts(self) -> float | None:
        """Tokens/s of prompt and decoding together."""
        seconds = self.prefill_s + self.decode_s
        return (self.prefill_tokens + self.decode_tokens) / seconds if seconds > 0 else None

    @property
    def tg_drained_ts(self) -> float | None:
        """Decode speed in tokens/s, the drain after the answer included."""
        seconds = self.decode_s + self.drain_s
        return self.decode_tokens / seconds if self.decode_tokens and seconds > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the sample for the record: without tokens, and without the mode, which the row has."""
        record = asdict(self)
        del record["tokens"], record["prompt_ids"], record["mode"]
        return record


def from_stats(stats: GenerationStats, *, stop_reason: StopReason | None, **others: Any) -> Sample:
    """Returns a sample of an answer; `others` are the fields that are not in `stats`."""
    shared = {item.name for item in fields(Sample)} & {item.name for item in fields(stats)}
    return Sample(
        stop_reason=stop_reason,
        # the engine leaves a stop token out of the answer, but it was decoded
        decode_tokens=max(stats.generated_tokens - 1 + (stop_reason == "eos"), 0),
        **{name: getattr(stats, name) for name in shared},
        **others,
    )


def counted(older: PlacementStats | None, newer: PlacementStats | None) -> Counters | None:
    """Returns the counts between two readings of a session; None without an expert cache."""
    if older is None or newer is None:
        return None
    interval = newer - older
    return {name: getattr(interval, name) for name in COUNTERS}


def common_samples(samples: Iterable[Sample], modes: Sequence[str], expected: int | None = None) -> list[Sample]:
    """Returns the samples of the work that all of `modes` have done; drops the rest of an interrupted run.

    expected: samples per mode and repetition; an unfinished repetition is dropped if there is a finished one.
    """
    by_key: defaultdict[tuple[str, int, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        by_key[sample.key].append(sample)
    complete = {key: group for key, group in by_key.items() if {s.mode for s in group} >= set(modes)}
    per_repetition = Counter(repetition for _, _, repetition in complete)
    full = {repetition for repetition, n in per_repetition.items() if expected is None or n >= expected}
    return [s for key, group in complete.items() if not full or key[2] in full for s in group]


def finished_work(
    samples: Iterable[Sample], n_expected: Callable[[str], int], *, by_mode: bool = False
) -> list[Sample]:
    """Returns the samples of conversations and repetitions that are complete, in order.

    n_expected: samples of one repetition, by prompt. by_mode: of each mode alone, not of all together.
    """
    groups: defaultdict[tuple[str, str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.mode if by_mode else "", sample.prompt, sample.repetition].append(sample)
    return [s for (_, prompt, _), group in groups.items() if len(group) == n_expected(prompt) for s in group]


@dataclass(frozen=True)
class Spread:
    """A quantity over the repetitions."""

    mean: float
    stddev: float | None  # of the sample (n - 1); None for a single value
    median: float
    values: tuple[float, ...]  # one per repetition

    @property
    def scatter(self) -> float | None:
        """How much the fastest repetition is faster than the slowest, 0.1: a tenth; None for a single one."""
        return max(self.values) / min(self.values) - 1 if len(self.values) > 1 else None


def spread(values: Sequence[float]) -> Spread | None:
    """Returns mean, deviation and median of `values`; None for none."""
    if not values:
        return None
    stddev = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), stddev, statistics.median(values), tuple(values))


def speed(samples: Sequence[Sample], *phases: Literal["prefill", "decode"]) -> Spread | None:
    """Returns tokens/s of a phase, or of several together; of each repetition all tokens over all seconds."""
    values = []
    for repetition in sorted({sample.repetition for sample in samples}):
        own = [sample for sample in samples if sample.repetition == repetition]
        n_tokens = sum(getattr(sample, f"{phase}_tokens") for sample in own for phase in phases)
        seconds = sum(getattr(sample, f"{phase}_s") for sample in own for phase in phases)
        if n_tokens and seconds > 0:
            values.append(n_tokens / seconds)
    return spread(values)


def paired_ratios(
    samples: Sequence[Sample], reference: Sequence[Sample], speed_of: Callable[[Sample], float | None]
) -> list[float]:
    """Returns the speed over the reference's speed at the same work, for each (prompt, turn, repetition) of both."""
    base = {sample.key: speed_of(sample) for sample in reference}
    ratios = []
    for sample in samples:
        ours, theirs = speed_of(sample), base.get(sample.key)
        if ours is not None and theirs:
            ratios.append(ours / theirs)
    return ratios


def paired_ratio(
    samples: Sequence[Sample], reference: Sequence[Sample], speed_of: Callable[[Sample], float | None]
) -> float | None:
    """Returns the median of `paired_ratios`.

    The two were measured within seconds of each other, so that slow drift cancels; a median ignores single outliers.
    """
    ratios = paired_ratios(samples, reference, speed_of)
    return statistics.median(ratios) if ratios else None


def disturbance(samples: Sequence[Sample], reference: Sequence[Sample], n_threads: int) -> Disturbance | None:
    """Returns why a ratio of the two is not to be trusted; None where it is, and without a reference.

    "load": other programs took cores while one of them was measured. "scatter": over the same work, the ratio of one
    repetition is more than RATIO_SCATTER above that of another.
    """
    if not reference:
        return None
    for each in (samples, reference):
        others = quotient(sum(sample.others_s for sample in each), sum(sample.timed_s for sample in each))
        if others is not None and takes_cores(others, n_threads):
            return "load"
    own, base = speed(samples, "prefill", "decode"), speed(reference, "prefill", "decode")
    if own is None or base is None or len(own.values) != len(base.values):
        return None
    ratios = spread([a / b for a, b in zip(own.values, base.values, strict=True)])
    is_wide = ratios is not None and ratios.scatter is not None and ratios.scatter > RATIO_SCATTER
    return "scatter" if is_wide else None


def quotient(numerator: float, denominator: float) -> float | None:
    """Returns numerator / denominator; None for a denominator of 0."""
    return numerator / denominator if denominator else None


@dataclass(frozen=True)
class CacheFigures:
    """The expert cache's figures of a row; None where nothing was counted."""

    hit_rate_pairs: float | None = None
    hit_rate_experts: float | None = None
    uploads_per_layer_step: float | None = None
    bytes_moved: int | None = None
    link_bytes_per_s: float | None = None  # while a transfer, or a read of an expert, was under way
    wait_share: float | None = None  # of decoding: waiting for the device, or for the disk


def cache_figures(samples: Iterable[Counters | None], n_layers: int) -> CacheFigures:
    """Returns rates of sums, never means of rates: every pair, expert and step has the same weight.

    n_layers: whose experts share the slots.
    """
    known = [counters for counters in samples if counters is not None]
    if not known:
        return CacheFigures()
    sums = {name: sum(counters[name] for counters in known) for name in COUNTERS}
    return CacheFigures(
        hit_rate_pairs=quotient(sums["pairs_hit"], sums["pairs"]),
        hit_rate_experts=quotient(sums["unique_hit"], sums["unique"]),
        uploads_per_layer_step=quotient(sums["uploads"], sums["steps"] * n_layers),
        bytes_moved=int(sums["bytes_moved"]),
        link_bytes_per_s=quotient(sums["bytes_moved"], sums["transfer_s"]),
        wait_share=quotient(sums["wait_s"], sums["decode_s"]),
    )
