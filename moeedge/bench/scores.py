"""Scores of the answers of a run: every answer is scored once, then summed up for a row.

Scoring comes after measuring, so that programs under test take no time from an answer. Equal answers get equal scores:
where scores differ, answers differ, and the output check names the place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean

from moeedge.bench.samples import Sample, Samples, answer_scores, grouped, mean_and_error
from moeedge.data.prompts import Dataset
from moeedge.records import derived, figure
from moeedge.scoring.answers import Reference, Score, rouge_scorer, score_answer
from moeedge.scoring.sandbox import protection

NO_REFERENCE = "no reference"


@dataclass(frozen=True)
class CategoryScore:
    """The mean score of one category of a dataset."""

    category: str = figure("Category of the prompts")
    score: float = figure("Mean score", most=1)
    n_scored: int = figure("Number of scored answers")


@dataclass(frozen=True)
class Unscored:
    """Answers without a score."""

    reason: str = figure("Why they have no score")
    n: int = figure("Number of answers")


@dataclass(frozen=True)
class Scores:
    """The scores of a row. An answer is one turn of one prompt, its score the mean over repetitions."""

    score: float | None = figure("With --score: mean score", default=None, most=1)
    n_scored: int | None = figure("Scored answers", default=None)
    n_answers: int | None = figure("All answers", default=None)
    n_cut: int | None = figure("Answers that -n or the context ended", default=None)
    scorer: str | None = figure("Scorers used, separated by commas", default=None)
    by_category: tuple[CategoryScore, ...] = figure("Score of each category", default=(), key="score_by_category")
    unscored: tuple[tuple[str, int], ...] = ()  # reasons, with the number of answers each

    @derived("Answers without a score, by reason", key="unscored")
    def reasons(self) -> list[Unscored]:
        return [Unscored(reason, n) for reason, n in self.unscored]

    def __str__(self) -> str:
        if not self.n_answers:
            return "-"
        return f"{'-' if self.score is None else f'{self.score:.3f}'} ({self.n_scored}/{self.n_answers})"


class AnswerScorer:
    """Scores the answers to a dataset's prompts; a text that is repeated is scored once."""

    def __init__(self, dataset: Dataset, text_of: Callable[[Sample], str], *, run_code: bool) -> None:
        self._prompts = {prompt.id: prompt for prompt in dataset.prompts}
        self._unscored = dataset.unscored or NO_REFERENCE
        self._text_of = text_of
        self._run_code = run_code
        self._scores: dict[tuple[str, int, str], Score] = {}

    def scored(self, sample: Sample) -> Sample:
        """Returns `sample` with its answer's text and score."""
        text = self._text_of(sample)
        key, reference = (sample.prompt, sample.turn, text), self._reference(sample)
        if key not in self._scores:
            self._scores[key] = Score(None, self._unscored)
            if reference is not None:
                self._scores[key] = score_answer(reference, final_part(text), run_code=self._run_code)
        score = self._scores[key]
        return replace(sample, answer=text, score=score.value, score_reason=score.reason)

    def summary(self, samples: Samples) -> Scores:
        """Sums up scored samples of one mode."""
        answers, values = grouped(samples, attrgetter("prompt", "turn")), answer_scores(samples)
        references = (self._reference(group[0]) for key, group in answers.items() if key in values)
        categories = grouped(values, lambda key: self._prompts[key[0]].category)
        is_cut = [any(sample.stop_reason in ("length", "context") for sample in group) for group in answers.values()]
        reasons = Counter(group[0].score_reason for key, group in answers.items() if key not in values)
        return Scores(
            score=mean_and_error(values.values())[0],
            n_scored=len(values),
            n_answers=len(answers),
            n_cut=sum(is_cut),
            scorer=",".join(sorted({reference.scorer for reference in references if reference is not None})) or None,
            by_category=tuple(
                CategoryScore(name, fmean(values[key] for key in keys), len(keys)) for name, keys in categories.items()
            ),
            unscored=tuple(reasons.most_common()),
        )

    def _reference(self, sample: Sample) -> Reference | None:
        return self._prompts[sample.prompt].reference(sample.turn)


def final_part(answer: str) -> str:
    """Returns an answer without the thoughts of reasoning models before it; "" if the thoughts did not end."""
    if "</think>" in answer:
        return answer.rpartition("</think>")[2]
    if answer.startswith("analysis") and "assistantfinal" in answer:  # gpt-oss, without its special tokens
        return answer.rpartition("assistantfinal")[2]
    return "" if answer.lstrip().startswith("<think>") else answer


def check_scoring(dataset: Dataset, *, run_code: bool) -> list[str]:
    """Checks before the measurement that the answers can be scored; returns sentences for the user.

    Raises InputError if a library is missing, SandboxError if programs cannot be isolated.
    """
    turns = [prompt.reference(turn) for prompt in dataset.prompts for turn in range(len(prompt.turns))]
    kinds = Counter("" if reference is None else reference.scorer for reference in turns)
    notes = []
    if kinds["rouge-l"]:
        rouge_scorer()
    if kinds[""] == len(turns):
        notes.append(f"No answer to {dataset.name} will be scored: {dataset.unscored or NO_REFERENCE}.")
    elif kinds[""]:
        reason = dataset.unscored or "there is no reference for them"
        notes.append(f"{kinds['']} of {len(turns)} answers will not be scored: {reason}.")
    if kinds["code"] and run_code:
        notes.append(f"Programs that the model writes are run, each isolated by the {protection()}.")
    elif kinds["code"]:
        notes.append(f"Programs are scored with --run-code only: {kinds['code']} of {len(turns)} answers.")
    return notes


def different_scores(scores: Iterable[tuple[str, Scores]]) -> list[str]:
    """Returns a sentence for each mode whose mean differs from the first mode's: their answers must differ."""
    (first, base), *others = scores
    return [
        f"SCORES DIFFER: {label} has {own}, {first} {base}. Their answers differ: see the output check."
        for label, own in others
        if own.score != base.score and own.n_scored == base.n_scored
    ]
