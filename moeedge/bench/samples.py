"""Raw samples of a benchmark and the figures that are computed from them: speeds, ratios, rates of the expert cache."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, make_dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeVar

import psutil

from moeedge import records
from moeedge.engine.types import AnswerSums, GenerationStats, StopReason
from moeedge.hardware.host import takes_cores
from moeedge.records import counter, figure, filled, stored
from moeedge.scheduler.stats import PlacementStats

# the counters of PlacementStats that a sample keeps; all of them can be added
COUNTERS = (
    "steps", "pairs", "pairs_hit", "unique", "unique_hit", "uploads", "evictions", "cancelled", "bytes_moved",
    "transfer_s", "cpu_s", "device_s", "wait_s", "partition_s", "schedule_s", "plan_s", "draft_s", "decode_s",
)  # fmt: skip

T = TypeVar("T")
Counters = dict[str, float]
_COUNTERS_RECORD: Any = make_dataclass("Counters", [(name, float, stored(PlacementStats, name)) for name in COUNTERS])
_COUNTED: Any = {"default": None, "of": "sum", "kind": _COUNTERS_RECORD | None}
Disturbance = Literal["load", "scatter"]
Phase = Literal["prefill", "decode"]
RATIO_SCATTER = 0.5  # between repetitions; in records of quiet machines it is below 0.25


def disk_bytes_read() -> int | None:
    """Bytes that this process has read from disks, mapped files included; None where the system does not count them."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, psutil.Error):  # macOS; a container without /proc/PID/io
        return None


@dataclass
class Sample(AnswerSums):
    """One timed answer, one timed run of decodes in a synthetic test, or all answers decoded together."""

    is_raw: ClassVar[bool] = True  # rates are no part of its JSON

    mode: str  # BenchMode.label
    prompt: str = figure("Id of the prompt; empty in a synthetic test")
    turn: int = figure("Turn of the conversation, from 0; in tg tests the slice of 16 tokens")
    repetition: int = figure("Repetition, from 0")
    order: int = figure("Place of the mode among those that took turns, from 0")
    _: KW_ONLY
    category: str = figure("Category of the prompt", default="")
    decode_tokens: int = counter(
        "tokens decoded in decode_s: without the first, which ends the prefill, with a stop token"
    )
    drain_s: float = counter("after the answer: transfers that it planned end, or are dropped; not in decode_s", "s")
    all_decode_s: float = counter("of texts decoded together: decode_s with the steps of fewer texts, or 0", "s")
    cpu_s: float = counter("processor time of all threads of this process", "s")
    others_s: float = counter(
        "processor time of other programs; may be below 0 by the clocks' resolution", "s", least=None
    )
    prefill_read_bytes: int | None = counter(
        "read from disks by this process up to the first token", "bytes", default=None
    )
    decode_read_bytes: int | None = counter(
        "read from disks by this process from the first token on", "bytes", default=None
    )
    stop_reason: StopReason | None = figure("Why the answer ended; null in a synthetic test", default=None)
    warm: bool = figure("Whether the mode had run before, in the warm-up or an earlier repetition", default=True)
    prefill_placement: Counters | None = figure(
        "Counters of the expert cache up to the first token; null without a cache", **_COUNTED
    )
    placement: Counters | None = figure("The same from the first token on", **_COUNTED)
    answer: str | None = figure("Text of the answer; only with --score", default=None)
    score: float | None = figure("Score; null: not scored", default=None, most=1)
    score_reason: str = figure("Why the score is not 1, in one line", default="")
    # for the output check, not in the record
    tokens: list[int] = field(default_factory=list)  # the answer, without the stop token
    prompt_ids: list[int] = field(default_factory=list)
    texts: list[Sample] = field(default_factory=list)  # the answers, where several are decoded together

    def __post_init__(self) -> None:
        self.texts = [Sample(**text) if isinstance(text, dict) else text for text in self.texts]  # a journal's: dicts

    read_bytes_per_token = records.quotient(
        "decode_read_bytes", "decode_tokens", "Read from disks by this process per decoded token", "bytes"
    )

    @property
    def key(self) -> tuple[str, int, int]:
        """Identifies the same work in other modes."""
        return (self.prompt, self.turn, self.repetition)

    def rate_ts(self, *phases: Phase, drained: bool = False) -> float | None:
        """Tokens/s of these phases together, `drained` with the drain after the answer; None without tokens or time."""
        n_tokens = sum(getattr(self, f"{phase}_tokens") for phase in phases)
        seconds = sum(getattr(self, f"{phase}_s") for phase in phases) + drained * self.drain_s
        return n_tokens / seconds if n_tokens and seconds > 0 else None

    @property
    def pp_ts(self) -> float | None:
        return self.rate_ts("prefill")

    @property
    def tg_ts(self) -> float | None:
        return self.rate_ts("decode")


Samples = Sequence[Sample]
SpeedOf = Callable[[Sample], float | None]


def from_stats(stats: GenerationStats, *, stop_reason: StopReason | None, **others: Any) -> Sample:
    """Returns a sample of an answer; `others` are the fields that are not in `stats`."""
    # the engine leaves a stop token out of the answer, but it was decoded
    n_decoded = max(stats.generated_tokens - 1 + (stop_reason == "eos"), 0)
    return filled(Sample, stats, **others, stop_reason=stop_reason, decode_tokens=n_decoded)


def counted(older: PlacementStats | None, newer: PlacementStats | None) -> Counters | None:
    """Returns the counts between two readings of a session; None without an expert cache."""
    if older is None or newer is None:
        return None
    interval = newer - older
    return {name: getattr(interval, name) for name in COUNTERS}


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Returns the items by their keys, in order."""
    groups: defaultdict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def common_samples(samples: Iterable[Sample], modes: Sequence[str], expected: int) -> list[Sample]:
    """Returns the samples of the work that all of `modes` have done; drops the rest of an interrupted run.

    expected: samples per mode and repetition; an unfinished repetition is dropped if there is a finished one.
    """
    by_key = grouped(samples, attrgetter("key"))
    complete = {key: group for key, group in by_key.items() if {s.mode for s in group} >= set(modes)}
    per_repetition = Counter(repetition for _, _, repetition in complete)
    full = {repetition for repetition, n in per_repetition.items() if n >= expected}
    return [s for key, group in complete.items() if not full or key[2] in full for s in group]


@dataclass(frozen=True)
class Spread:
    """A quantity over the repetitions."""

    mean: float = figure("mean over repetitions", key="", axis="y")
    stddev: float | None = figure("standard deviation over repetitions (n - 1); null for a single one", key="_stddev")
    median: float = figure("median over repetitions", key="_median")
    values: tuple[float, ...] = figure("each repetition", key="_samples", absent=())

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


def speed(samples: Samples, *phases: Phase) -> Spread | None:
    """Returns tokens/s of a phase, or of several together; of each repetition all tokens over all seconds."""
    by_repetition = sorted(grouped(samples, attrgetter("repetition")).items())
    rates = (records.combine(own).rate_ts(*phases) for _, own in by_repetition)
    return spread([rate for rate in rates if rate is not None])


def mean_and_error(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Returns the mean, None for no values, and its standard error, None for fewer than two."""
    numbers = list(values)
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return statistics.fmean(numbers) if numbers else None, error


def answer_scores(samples: Iterable[Sample]) -> dict[tuple[str, int], float]:
    """Returns the score of each answer, by prompt and turn, the mean over repetitions; unscored ones are left out."""
    scored = grouped((sample for sample in samples if sample.score is not None), attrgetter("prompt", "turn"))
    return {key: statistics.fmean(sample.score or 0.0 for sample in own) for key, own in scored.items()}


def paired_ratios(samples: Samples, reference: Samples, speed_of: SpeedOf = attrgetter("tg_ts")) -> list[float]:
    """Returns the speed over the reference's speed at the same work, for each (prompt, turn, repetition) of both."""
    base = {sample.key: speed_of(sample) for sample in reference}
    pairs = ((speed_of(sample), base.get(sample.key)) for sample in samples)
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]


def paired_ratio(samples: Samples, reference: Samples, speed_of: SpeedOf = attrgetter("tg_ts")) -> float | None:
    """Returns the median of `paired_ratios`: slow drift cancels in pairs, and single outliers do not count."""
    ratios = paired_ratios(samples, reference, speed_of)
    return statistics.median(ratios) if ratios else None


def disturbance(samples: Samples, reference: Samples, n_threads: int) -> Disturbance | None:
    """Returns why a ratio of the two is not to be trusted; None where it is, and without a reference.

    "load": other programs took cores while one of them was measured. "scatter": over the same work, the ratio of one
    repetition is more than RATIO_SCATTER above that of another.
    """
    if not reference:
        return None
    for each in (samples, reference):
        sums = records.combine(each)
        others = quotient(sums.others_s, sums.prefill_s + (sums.all_decode_s or sums.decode_s))
        if others is not None and takes_cores(others, n_threads):
            return "load"
    own, base = speed(samples, "prefill", "decode"), speed(reference, "prefill", "decode")
    if own is None or base is None or len(own.values) != len(base.values):
        return None
    ratios = [a / b for a, b in zip(own.values, base.values, strict=True)]
    return "scatter" if max(ratios) / min(ratios) - 1 > RATIO_SCATTER else None


def quotient(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(frozen=True)
class CacheFigures:
    """The expert cache's figures of a row, while decoding; None where nothing was counted."""

    hit_rate_pairs: float | None = stored(PlacementStats, "hit_rate_pairs", title="pair hits", form=".3f")
    hit_rate_experts: float | None = stored(PlacementStats, "hit_rate_experts", title="expert hits", form=".3f")
    uploads_per_layer_step: float | None = stored(PlacementStats, "uploads_per_layer_step", title="uploads", form=".2f")
    bytes_moved: int | None = figure(
        "Experts moved", "bytes", default=None, title="MiB moved", form=".1f", scale=2**-20
    )
    link_bytes_per_s: float | None = stored(
        PlacementStats, "link_bytes_per_s", title="disk MB/s", form=".0f", scale=1e-6
    )
    wait_share: float | None = stored(PlacementStats, "wait_share", title="disk wait %", form=".0f", scale=100, most=1)


def cache_figures(counters: Counters | None, n_layers: int) -> CacheFigures:
    """The rates of counters, which may be sums of several samples'; n_layers: whose experts share the slots."""
    if counters is None:
        return CacheFigures()
    stats = PlacementStats(**counters, n_layers=n_layers)  # type: ignore[arg-type]
    return filled(CacheFigures, stats, bytes_moved=int(stats.bytes_moved))
