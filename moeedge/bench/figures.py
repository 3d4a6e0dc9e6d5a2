"""Figures of a row next to those of others: expert budgets, stock llama.cpp at its best, and texts decoded together.

Expert budgets: a point of MoE-Spec's Figures 3, 4, 9 and 10 is one mode on one category of a dataset, or on all of it.
Its speed-ups are medians of pairs, over stock-ar (the paper's x axis) and over the same mode without a budget; its
quality is the mean score, its change the mean over answers of the difference from the answer without a budget. Answers
are greedy, so that the errors stated are those of the choice of prompts alone.

Stock at its best: with stock-ar and stock-sd at several draft lengths in one run, the comparison is the fastest of them
for each category of the prompts, as a user would choose who had tried them all on these very prompts. Speeds are all
tokens over all seconds of the same turns. Intervals are percentiles of bootstrap samples of these turns (Efron 1979);
each chooses its own fastest stock mode, so that noise, which makes a maximum larger, counts for stock.

Texts together: both modes of a speed-up decode the same texts, with the same number of them at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.config import REFERENCE, BenchMode
from moeedge.bench.perplexity import Perplexity
from moeedge.bench.samples import Sample, named, paired_ratio, paired_ratios, quotient

ALL = ""  # the category of all prompts together
MEAN = "mean"  # of the categories' ratios
_N_RESAMPLES = 2000
_PERCENTILES = (2.5, 97.5)

Answer = tuple[str, int]  # prompt and turn
Array = NDArray[np.float64]


@dataclass(frozen=True)
class BudgetPoint:
    """One mode's quality and speed; figures of other modes without a budget are comparable with it."""

    category: str  # ALL: the entire dataset
    mode: str  # BenchMode.label
    n_answers: int
    n_scored: int
    score: float | None  # mean over answers
    score_stderr: float | None  # standard error of that mean
    quality: float | None  # score over stock-ar's
    score_change: float | None  # mean difference from the answers without a budget
    score_change_stderr: float | None  # of the mean of paired differences
    ratio: float | None  # decoding speed over stock-ar's
    ratio_unbudgeted: float | None  # over that of the same mode without a budget
    tokens_per_step: float | None  # the paper's acceptance length
    acceptance_rate: float | None
    experts_natural: float | None  # distinct experts per MoE layer and verification that the router chose
    experts_kept: float | None  # after the budget
    experts_max: int | None  # the most that any layer computed in any verification
    kept_probability: float | None  # share of the natural picks' routing probability that is shortlisted


def budget_point(
    category: str,
    mode: str,
    own: Sequence[Sample],
    reference: Sequence[Sample],
    unbudgeted: Sequence[Sample],
) -> BudgetPoint:
    """Returns the point of `own`, the samples of one mode, scored if scores are wanted.

    reference: stock-ar's samples. unbudgeted: those of the same mode without a budget, measured in turns with `own`.
    """
    scores, base = answer_scores(own), answer_scores(unbudgeted)
    changes = [value - base[key] for key, value in scores.items() if key in base]
    steps = sum(sample.steps for sample in own)
    n_budgeted = sum(sample.budgeted_steps for sample in own)
    natural, kept = (sum(getattr(s, name) for s in own) for name in ("experts_natural_sum", "experts_sum"))
    mean = _mean(scores.values())
    return BudgetPoint(
        category=category,
        mode=mode,
        n_answers=len({(sample.prompt, sample.turn) for sample in own}),
        n_scored=len(scores),
        score=mean,
        score_stderr=_stderr(scores.values()),
        quality=quotient(mean, _mean(answer_scores(reference).values()) or 0.0) if mean is not None else None,
        score_change=_mean(changes),
        score_change_stderr=_stderr(changes),
        ratio=paired_ratio(own, reference, lambda sample: sample.tg_ts),
        ratio_unbudgeted=paired_ratio(own, unbudgeted, lambda sample: sample.tg_ts),
        tokens_per_step=quotient(sum(sample.decode_tokens for sample in own), steps),
        acceptance_rate=quotient(sum(s.accepted for s in own), sum(s.drafted for s in own)),
        experts_natural=quotient(natural, steps) if natural else None,
        experts_kept=quotient(kept, steps) if kept else None,
        experts_max=max((sample.experts_max for sample in own), default=0) or None,
        kept_probability=quotient(sum(s.kept_probability_sum for s in own), n_budgeted),
    )


def answer_scores(samples: Iterable[Sample]) -> dict[Answer, float]:
    """Returns the score of each answer, the mean over repetitions; answers without one are left out."""
    scores: dict[Answer, list[float]] = {}
    for sample in samples:
        if sample.score is not None:
            scores.setdefault((sample.prompt, sample.turn), []).append(sample.score)
    return {key: statistics.fmean(values) for key, values in scores.items()}


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.fmean(known) if known else None


def _stderr(values: Iterable[float]) -> float | None:
    """Returns the standard error of the mean; None for fewer than two values."""
    known = list(values)
    return statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None


@dataclass(frozen=True)
class BudgetFigures:
    """What a row says about its expert budget, and about its mode as the base of others with a budget."""

    mode: BenchMode
    total: BudgetPoint
    by_category: tuple[BudgetPoint, ...] = ()  # empty for a dataset of one category
    perplexity: Perplexity | None = None


_IN_ROW = (
    "quality", "score_stderr", "score_change", "score_change_stderr", "ratio_unbudgeted", "experts_natural",
    "experts_max", "kept_probability",
)  # fmt: skip


def figures_record(figures: BudgetFigures | None) -> dict[str, Any]:
    """Returns the keys of a row: those of its point that other keys of the row lack, perplexity, and the categories."""
    measured = None if figures is None else figures.perplexity
    return {
        **named(figures and figures.total, *_IN_ROW),
        "perplexity": None if measured is None else measured.value,
        **named(measured, "stderr", "text", "text_sha256", prefix="perplexity_"),
        "perplexity_tokens": None if measured is None else measured.n_tokens,
        "perplexity_batch": None if measured is None else measured.batch_tokens,
        "points_by_category": [] if figures is None else [asdict(point) for point in figures.by_category],
    }


def budget_figures(
    mode: BenchMode,
    own: Sequence[Sample],
    reference: Sequence[Sample],
    unbudgeted: Sequence[Sample],
    perplexity: Perplexity | None,
) -> BudgetFigures:
    """Returns the figures of a row of scored samples, as in `budget_point`.

    A mode that no budget acts on is compared with stock-ar alone.
    """
    if not (mode.engine == "moeedge" and mode.drafts):
        unbudgeted = ()

    def point(category: str) -> BudgetPoint:
        parts = ([s for s in group if category in (ALL, s.category)] for group in (own, reference, unbudgeted))
        return budget_point(category, mode.label, *parts)

    categories = list(dict.fromkeys(sample.category for sample in own))
    by_category = tuple(point(category) for category in categories if category != ALL) if len(categories) > 1 else ()
    return BudgetFigures(mode, point(ALL), by_category, perplexity)


def unbudgeted_label(mode: BenchMode) -> str:
    """Returns the label of the mode that `mode` is compared with: the same without a budget."""
    return replace(mode, budget=None).label


@dataclass(frozen=True)
class StockRatio:
    """Decoding speed over that of the fastest stock mode."""

    category: str  # ALL, MEAN, or a category of the prompts
    ratio: float
    low: float | None  # of the 95 % interval; None where a single turn says nothing of its error
    high: float | None
    fastest: str  # BenchMode.label of the stock mode; "" for MEAN
    n_turns: int  # turns and repetitions that both have


def over_best_stock(own: Sequence[Sample], stock: Sequence[Sequence[Sample]]) -> tuple[StockRatio, ...]:
    """Returns the ratios of `own`, the samples of one mode: of all prompts, of each category, and the categories' mean.

    stock: the samples of each stock mode, of the same turns in the same run. Nothing is returned without a common turn;
    categories and mean are left out where there is only one category.
    """
    lanes = [{sample.key: sample for sample in lane if sample.tg_ts} for lane in (own, *stock)]
    keys = [key for key in lanes[0] if all(key in lane for lane in lanes)]
    if not keys or len(lanes) < 2:
        return ()
    labels = [lane[keys[0]].mode for lane in lanes[1:]]
    tokens, seconds = (
        np.array([[getattr(lane[key], name) for key in keys] for lane in lanes], dtype=np.float64)
        for name in ("decode_tokens", "decode_s")
    )  # [lanes, turns]
    of_turn = np.array([lanes[0][key].category for key in keys])
    categories = [category for category in dict.fromkeys(of_turn.tolist()) if category != ALL]
    rng = np.random.default_rng(0)

    def measured(category: str, turns: NDArray[np.intp]) -> tuple[StockRatio, Array]:
        speeds = _speeds(tokens, seconds, turns[None])[:, 0]
        drawn = _speeds(tokens, seconds, rng.choice(turns, (_N_RESAMPLES, len(turns))))
        ratios = drawn[0] / drawn[1:].max(axis=0)
        low, high = _interval(ratios) if len(turns) > 1 else (None, None)
        best = int(speeds[1:].argmax())
        ratio = float(speeds[0] / speeds[1 + best])
        return StockRatio(category, ratio, low, high, labels[best], len(turns)), ratios

    total = measured(ALL, np.arange(len(keys)))[0]
    if len(categories) < 2:
        return (total,)
    parts = [measured(category, np.flatnonzero(of_turn == category)) for category in categories]
    low, high = None, None
    if all(part.n_turns > 1 for part, _ in parts):
        low, high = _interval(np.mean([drawn for _, drawn in parts], axis=0))
    mean = float(np.mean([part.ratio for part, _ in parts]))
    return (total, *(part for part, _ in parts), StockRatio(MEAN, mean, low, high, "", len(keys)))


def _interval(drawn: Array) -> tuple[float, float]:
    low, high = np.percentile(drawn, _PERCENTILES)
    return float(low), float(high)


def _speeds(tokens: Array, seconds: Array, turns: NDArray[np.intp]) -> Array:
    """Tokens per second [lanes, draws] of the turns [draws, n]: all tokens over all seconds."""
    return np.asarray(tokens[:, turns].sum(axis=2) / seconds[:, turns].sum(axis=2))


def stock_record(ratios: Sequence[StockRatio]) -> dict[str, Any]:
    """Returns the keys of a row: ratio, interval and fastest mode of all prompts, and the parts."""
    total = ratios[0] if ratios else None
    return {
        "ratio_best_stock": None if total is None else total.ratio,
        **named(total, "low", "high", prefix="ratio_best_stock_"),
        "best_stock": None if total is None else total.fastest,
        "best_stock_by_category": [asdict(part) for part in ratios[1:]],
    }


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
