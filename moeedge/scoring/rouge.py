"""ROUGE-L through Google's rouge-score, the reimplementation of ROUGE-1.5.5 that papers on summaries cite."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from moeedge.errors import InputError


def rouge_l(answer: str, references: tuple[str, ...]) -> float:
    """The F1 of the longest common subsequence of stemmed words, 0 to 1, with the reference that fits best.

    Raises InputError where rouge-score is not installed.
    """
    scorer = _scorer()
    return max(float(scorer.score(reference, answer)["rougeL"].fmeasure) for reference in references)


def check_rouge() -> None:
    """Raises InputError where rouge-score is not installed."""
    _scorer()


@lru_cache
def _scorer() -> Any:
    try:
        # imported here: its stemmer comes with nltk, which takes a second
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError(
            "ROUGE-L needs the package rouge-score, which is not installed.", 'Run: pip install "moeedge[score]"'
        ) from None
    return RougeScorer(["rougeL"], use_stemmer=True)
