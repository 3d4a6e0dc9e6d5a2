"""Quality and speed of expert budgets next to unbudgeted speculation: the points of MoE-Spec's Figures 3, 4, 9 and 10.

A point is one mode on one category of a dataset, or on all of it. Its speed-ups are medians of pairs, over stock-ar
(the paper's x axis) and over the same mode without a budget; its quality is the mean score, its change the mean over
answers of the difference from the answer without a budget. Answers are greedy, so that the errors stated are those of
the choice of prompts alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moeedge.bench.config import BenchMode
from moeedge.bench.perplexity import Perplexity
from moeedge.bench.samples import Sample, named, paired_ratio, quotient

Answer = tuple[str, int]  # prompt and turn
ALL = ""  # the category of a point of the entire dataset


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
