"""What the answers of a run are worth: every answer scored once, then the figures of a row.

Scoring comes after measuring, so that programs under test take no time from an answer. Modes that say the same get the
same score: where scores differ, answers do, and the output check says where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from moeedge.bench.samples import Sample
from moeedge.data import Dataset
from moeedge.scoring.answers import Reference, Score, check_rouge, score_answer
from moeedge.scoring.sandbox import protection

NO_REFERENCE = "no reference"


@dataclass(frozen=True)
class CategoryScore:
    """The answers of one category of a dataset."""

    category: str
    score: float  # mean
    n_scored: int


@dataclass(frozen=True)
class Scores:
    """A row's scores. An answer is one turn of one prompt; of several repetitions the mean counts."""

    score: float | None = None  # mean over answers; None where none was scored
    n_scored: int | None = None  # answers; None where scores were not asked for
    n_answers: int | None = None
    n_cut: int | None = None  # answers that the limit of tokens or of the context ended
    scorer: str | None = None  # those used, separated by commas
    by_category: tuple[CategoryScore, ...] = ()
    unscored: tuple[tuple[str, int], ...] = ()  # why answers were not scored, and how many

    def __str__(self) -> str:
        if not self.n_answers:
            return "-"
        return f"{'-' if self.score is None else f'{self.score:.3f}'} ({self.n_scored}/{self.n_answers})"


class AnswerScorer:
    """Scores the answers to a dataset's prompts, the same text only once."""

    def __init__(self, dataset: Dataset, text_of: Callable[[Sample], str], *, run_code: bool) -> None:
        self._prompts = {prompt.id: prompt for prompt in dataset.prompts}
        self._unscored = dataset.unscored or NO_REFERENCE
        self._text_of = text_of
        self._run_code = run_code
        self._known: dict[tuple[str, int, str], Score] = {}

    def scored(self, sample: Sample) -> Sample:
        """`sample` with its answer's text and score."""
        text = self._text_of(sample)
        key = (sample.prompt, sample.turn, text)
        if key not in self._known:
            self._known[key] = self._score(self._reference(sample), text)
        score = self._known[key]
        return replace(sample, answer=text, score=score.value, score_reason=score.reason)

    def summary(self, samples: Sequence[Sample]) -> Scores:
        """The figures of scored samples, all of one mode."""
        answers: dict[tuple[str, int], list[Sample]] = {}
        for sample in samples:
            answers.setdefault((sample.prompt, sample.turn), []).append(sample)
        values = {
            key: fmean(sample.score for sample in found if sample.score is not None)
            for key, found in answers.items()
            if all(sample.score is not None for sample in found)
        }
        references = (self._reference(found[0]) for key, found in answers.items() if key in values)
        categories: dict[str, list[float]] = {}
        for (prompt, _), value in values.items():
            categories.setdefault(self._prompts[prompt].category, []).append(value)
        reasons = Counter(found[0].score_reason for key, found in answers.items() if key not in values)
        return Scores(
            score=fmean(values.values()) if values else None,
            n_scored=len(values),
            n_answers=len(answers),
            n_cut=sum(any(sample.stop_reason in ("length", "context") for sample in one) for one in answers.values()),
            scorer=",".join(sorted({one.scorer for one in references if one is not None})) or None,
            by_category=tuple(CategoryScore(name, fmean(found), len(found)) for name, found in categories.items()),
            unscored=tuple(reasons.most_common()),
        )

    def _reference(self, sample: Sample) -> Reference | None:
        return self._prompts[sample.prompt].reference(sample.turn)

    def _score(self, reference: Reference | None, text: str) -> Score:
        if reference is None:
            return Score(None, self._unscored)
        return score_answer(reference, final_part(text), run_code=self._run_code)


def final_part(answer: str) -> str:
    """What is left of an answer without the thoughts that reasoning models put before it; empty for unfinished ones."""
    if "</think>" in answer:
        return answer.rpartition("</think>")[2]
    if answer.startswith("analysis") and "assistantfinal" in answer:  # gpt-oss, without its special tokens
        return answer.rpartition("assistantfinal")[2]
    return "" if answer.lstrip().startswith("<think>") else answer


def check_scoring(dataset: Dataset, *, run_code: bool) -> list[str]:
    """Makes sure, before anything is measured, that the answers can be scored; returns sentences for the user.

    Raises InputError where a library is missing, SandboxError where programs cannot be run apart.
    """
    turns = [prompt.reference(turn) for prompt in dataset.prompts for turn in range(len(prompt.turns))]
    kinds = Counter("" if reference is None else reference.scorer for reference in turns)
    notes = []
    if kinds["rouge-l"]:
        check_rouge()
    if kinds[""] == len(turns):
        notes.append(f"No answer to {dataset.name} will be scored: {dataset.unscored or NO_REFERENCE}.")
    elif kinds[""]:
        reason = dataset.unscored or "there is no reference for them"
        notes.append(f"{kinds['']} of {len(turns)} answers will not be scored: {reason}.")
    if kinds["code"] and run_code:
        notes.append(f"Programs that the model writes are run, each shut in by the {protection()}.")
    elif kinds["code"]:
        notes.append(f"Programs, {kinds['code']} of {len(turns)} answers, are scored with --run-code only.")
    return notes


def different_scores(scores: Iterable[tuple[str, Scores]]) -> list[str]:
    """A sentence for each mode whose mean differs from the first one's: the answers must have differed."""
    (first, base), *others = scores
    return [
        f"SCORES DIFFER: {label} has {found}, {first} {base}. Only other answers score otherwise: see the output check."
        for label, found in others
        if found.score != base.score and found.n_scored == base.n_scored
    ]
