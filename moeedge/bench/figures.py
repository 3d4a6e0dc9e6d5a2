"""Figures of a row next to those of others: expert budgets, stock llama.cpp at its best, and texts decoded together.

Expert budgets: a point of MoE-Spec's Figures 3, 4, 9 and 10 is one mode on one category of a dataset, or on all of it.
Its speed-ups are medians of pairs, over stock-ar (the paper's x axis) and over the same mode without a budget; its
quality is the mean score. Answers are greedy: the errors stated are those of the choice of prompts alone.

Stock at its best: the fastest stock mode of the run for each category, as a user would choose who had tried them all on
these very prompts. Speeds are all tokens over all seconds of the same turns. Intervals are percentiles of bootstrap
samples of these turns (Efron 1979); each chooses its own fastest stock mode, so that noise counts for stock. Of fewer
than 6 turns they are Student's, of the logarithms of the turns' ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.config import REFERENCE, BenchMode, DraftLength
from moeedge.bench.quality import Perplexity
from moeedge.bench.samples import Sample, Samples, answer_scores, mean_and_error, paired_ratio, paired_ratios, quotient
from moeedge.records import combine, figure, filled, stored

ALL = ""  # the category of all prompts together
MEAN = "mean"  # of the categories' ratios
_N_RESAMPLES = 2000
_PERCENTILES = (2.5, 97.5)
# Student's t at 97.5 % by degrees of freedom: of fewer than 6 turns a bootstrap's percentiles would be too narrow
_STUDENT = (0.0, 12.706, 4.303, 3.182, 2.776)

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class BudgetPoint:
    """One mode's quality and speed; figures of other modes without a budget are comparable with it."""

    category: str = figure("Category of the prompts; empty: the entire dataset")
    mode: str = figure("The mode with all that distinguishes it")
    n_answers: int = figure("Number of answers")
    n_scored: int = figure("Number of scored answers")
    score: float | None = figure("Mean score", most=1)
    score_stderr: float | None = figure("Standard error of the score")
    quality: float | None = figure("With expert budgets: score over stock-ar's. A ratio")
    score_change: float | None = figure("Mean difference of the score from that without a budget", least=None)
    score_change_stderr: float | None = figure("Standard error of score_change")
    ratio: float | None = figure("Decoding speed over stock-ar's, median of pairs. A ratio")
    ratio_unbudgeted: float | None = figure(
        "Decoding speed over that of the same mode without a budget, median of pairs. A ratio"
    )
    tokens_per_step: float | None = stored(Sample, "tokens_per_step")
    acceptance_rate: float | None = stored(Sample, "acceptance_rate")
    experts_natural: float | None = figure("Distinct experts per layer and verification that the router chose")
    experts_kept: float | None = figure("Distinct experts per layer and verification under the budget")
    experts_max: int | None = stored(Sample, "experts_max")
    kept_probability: float | None = stored(Sample, "kept_probability")


def budget_point(category: str, mode: str, own: Samples, reference: Samples, unbudgeted: Samples) -> BudgetPoint:
    """Returns the point of `own`, the samples of one mode; reference: stock-ar's, unbudgeted: without a budget."""
    scores, base = answer_scores(own), answer_scores(unbudgeted)
    sums = combine(own)
    mean, error = mean_and_error(scores.values())
    reference_mean, _ = mean_and_error(answer_scores(reference).values())
    change, change_error = mean_and_error(value - base[key] for key, value in scores.items() if key in base)
    return filled(
        BudgetPoint,
        sums,
        category=category,
        mode=mode,
        n_answers=len({(sample.prompt, sample.turn) for sample in own}),
        n_scored=len(scores),
        score=mean,
        score_stderr=error,
        quality=quotient(mean, reference_mean or 0.0) if mean is not None else None,
        score_change=change,
        score_change_stderr=change_error,
        ratio=paired_ratio(own, reference),
        ratio_unbudgeted=paired_ratio(own, unbudgeted),
        experts_natural=quotient(sums.experts_natural_sum, sums.steps) or None,
        experts_kept=sums.experts_per_verification,
        experts_max=sums.experts_max or None,
    )


# figures of a point that a row has as its own, or by another name
_IN_OTHER_KEYS = ("category", "mode", "n_answers", "n_scored", "score", "ratio", "tokens_per_step", "acceptance_rate")


@dataclass(frozen=True)
class BudgetFigures:
    """Figures of a row's expert budget, and of its mode as the base of others with a budget."""

    mode: BenchMode
    total: BudgetPoint = figure("", prefix="", without=(*_IN_OTHER_KEYS, "experts_kept"))
    perplexity: Perplexity | None = figure("", prefix="", default=None)
    by_category: tuple[BudgetPoint, ...] = figure(
        "With expert budgets: quality and speed of each category; empty for one category",
        default=(),
        absent=(),
        key="points_by_category",
    )


def budget_figures(
    mode: BenchMode, own: Samples, reference: Samples, unbudgeted: Samples, perplexity: Perplexity | None
) -> BudgetFigures:
    """Returns the figures of a row, as in `budget_point`; a mode that no budget acts on is compared with stock-ar."""
    if not (mode.engine == "moeedge" and mode.drafts):
        unbudgeted = ()

    def point(category: str) -> BudgetPoint:
        parts = ([s for s in group if category in (ALL, s.category)] for group in (own, reference, unbudgeted))
        return budget_point(category, mode.label, *parts)

    categories = list(dict.fromkeys(sample.category for sample in own))
    by_category = tuple(point(category) for category in categories if category != ALL) if len(categories) > 1 else ()
    return BudgetFigures(mode, point(ALL), perplexity, by_category)


@dataclass(frozen=True)
class StockRatio:
    """Decoding speed over that of the fastest stock mode."""

    category: str = figure('Category of the prompts, or "mean" of the categories; empty: all prompts')
    ratio: float = figure("Decoding speed over that of the fastest stock mode. A ratio")
    low: float | None = figure("Lower end of the ratio's 95 % interval; null where a single turn tells no error")
    high: float | None = figure("Upper end of the ratio's 95 % interval")
    fastest: str = figure("The fastest stock mode; empty for the mean")
    n_turns: int = figure("Number of turns and repetitions that both modes have")


def over_best_stock(own: Samples, stock: Sequence[Samples]) -> tuple[StockRatio, ...]:
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
        best = int(speeds[1:].argmax())
        ratio = float(speeds[0] / speeds[1 + best])
        low, high = np.percentile(ratios, _PERCENTILES).tolist() if len(turns) > 1 else (None, None)
        if 1 < len(turns) <= len(_STUDENT):
            low, high = interval_around(ratio, np.divide(*(tokens / seconds)[[0, 1 + best]][:, turns]))
        return StockRatio(category, ratio, low, high, labels[best], len(turns)), ratios

    total = measured(ALL, np.arange(len(keys)))[0]
    if len(categories) < 2:
        return (total,)
    parts = [measured(category, np.flatnonzero(of_turn == category)) for category in categories]
    low, high = None, None
    mean = float(np.mean([part.ratio for part, _ in parts]))
    # of the logarithm of each part, by its share of the mean
    margins = [math.log(part.high / part.ratio) * part.ratio / mean / len(parts) for part, _ in parts if part.high]
    if len(margins) == len(parts) and min(part.n_turns for part, _ in parts) <= len(_STUDENT):
        margin = float(np.sqrt(np.square(margins).sum()))
        low, high = mean * math.exp(-margin), mean * math.exp(margin)
    elif len(margins) == len(parts):
        low, high = np.percentile(np.mean([drawn for _, drawn in parts], axis=0), _PERCENTILES).tolist()
    return (total, *(part for part, _ in parts), StockRatio(MEAN, mean, low, high, "", len(keys)))


def interval_around(ratio: float, samples: Array) -> tuple[float, float]:
    """Returns the 95 % interval of `ratio`, a mean or the median of these: Student's, of their logarithms.

    It is a little narrow for a median, and too wide for more ratios than the table has (its last entry counts).
    """
    student = _STUDENT[min(len(samples), len(_STUDENT)) - 1]
    margin = student * float(np.log(samples).std(ddof=1)) / len(samples) ** 0.5
    return ratio * math.exp(-margin), ratio * math.exp(margin)


def _speeds(tokens: Array, seconds: Array, turns: NDArray[np.intp]) -> Array:
    """Tokens per second [lanes, draws] of the turns [draws, n]: all tokens over all seconds."""
    return np.asarray(tokens[:, turns].sum(axis=2) / seconds[:, turns].sum(axis=2))


@dataclass(frozen=True)
class ParallelFigures:
    """Figures of N texts that are decoded together."""

    n_parallel: int = figure("Texts decoded together", least=1, absent=1)
    curve: str = figure("With --parallel: what rows of one curve have in common")
    sequence_ts: float | None = figure("Speed of one of the texts", "t/s")
    plain_mode: str | None = figure("The mode without drafts that speed_up is over")
    speed_up: float | None = figure("Throughput over that of plain_mode with as many texts, median. A ratio")
    speed_up_samples: tuple[float, ...] = figure("speed_up of each repetition", absent=())
    full_batch_share: float | None = figure(
        "Share of the decoding time in which that many texts were decoded, which alone counts", most=1
    )


def plain_mode(mode: BenchMode, modes: Sequence[BenchMode]) -> BenchMode | None:
    """Returns the mode with as many texts and no drafts, of the same engine and cache if it is there, else stock-ar."""
    if not mode.drafts:
        return None
    plain = [other for other in modes if not other.drafts and other.n_parallel == mode.n_parallel]
    cache_of = attrgetter("engine", "policy", "cache_ratio")
    same = [other for other in plain if cache_of(other) == cache_of(mode)]
    return next(iter([*same, *(other for other in plain if other.name == REFERENCE)]), None)


def parallel_figures(
    mode: BenchMode, own: Samples, plain: tuple[BenchMode, Samples] | None, gamma: DraftLength
) -> ParallelFigures:
    """Returns the figures of a mode's samples; plain: the mode without drafts to compare with, and its samples."""
    n_parallel = mode.n_parallel or 1
    throughput_ts = quotient(sum(s.decode_tokens for s in own), sum(s.decode_s for s in own))
    ratios = [] if plain is None else paired_ratios(own, plain[1])
    return ParallelFigures(
        n_parallel=n_parallel,
        curve=replace(mode, gamma=gamma or None, n_parallel=None).label,
        sequence_ts=None if throughput_ts is None else throughput_ts / n_parallel,
        plain_mode=plain[0].name if plain is not None and ratios else None,
        speed_up=statistics.median(ratios) if ratios else None,
        speed_up_samples=tuple(ratios),
        full_batch_share=quotient(sum(s.decode_s for s in own), sum(s.all_decode_s for s in own)),
    )
