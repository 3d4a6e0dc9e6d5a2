"""How good answers are: whether they are the reference's, their scores, and the perplexity of a fixed text.

Every answer of a run is scored once, then summed up for a row. Scoring comes after measuring, so that programs under
test take no time from an answer. Equal answers get equal scores: where scores differ, answers differ, and the output
check names the place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.samples import Sample, Samples, answer_scores, grouped, mean_and_error
from moeedge.data.prompts import Dataset, EvaluationText
from moeedge.errors import InputError
from moeedge.llama.context import Context
from moeedge.llama.sequence import n_common
from moeedge.native.abi import Phase
from moeedge.records import derived, figure, filled
from moeedge.run import Run
from moeedge.scoring.answers import Reference, Score, rouge_scorer, score_answer
from moeedge.scoring.sandbox import protection

# logits; rounding moved logits of scale 16 by at most 0.3 % (repacked against plain kernels), so a wider gap is no tie
NEAR_TIE_GAP = 0.05

# (reference's sample, position) -> float32 [n_vocab], its logits after `position` tokens of its answer
LogitsAt = Callable[[Sample, int], NDArray[np.float32]]


def logits_in(context: Context) -> LogitsAt:
    """Returns a function of the reference's logits by plain decoding, which overwrites the context's KV cache."""

    def logits_at(sample: Sample, position: int) -> NDArray[np.float32]:
        context.clear()
        logits = context.decode(list(sample.prompt_ids), phase=Phase.PREFILL, logits="last")
        for token in sample.tokens[:position]:
            logits = context.decode([token], phase=Phase.DECODE, logits="last")
        return np.array(logits[0])  # a copy: the view is valid until the next decode

    return logits_at


@dataclass(frozen=True)
class Difference:
    """The first place where a mode's answer differs from the reference's."""

    prompt: str = figure("Id of the prompt")
    turn: int = figure("Turn of the conversation, from 0")
    repetition: int = figure("Repetition, from 0")
    position: int = figure("Position in the answer, in tokens from 0")
    reference_token: int | None = figure("Vocabulary id of stock-ar's token; null: its answer ended here")
    token: int | None = figure("Vocabulary id of the mode's token; null: its answer ended here")
    gap: float = figure(
        "Logits by which stock-ar's context, or the mode's own split, prefers the better token (no unit)", least=None
    )
    near_tie: bool = figure("Whether the gap is small enough for a near-tie")


@dataclass(frozen=True)
class OutputCheck:
    """Comparison of a mode's answers. A prompt is equal if all its turns and repetitions are."""

    equal: int = figure("Prompts with stock-ar's output", key="output_equal")
    compared: int = figure("Prompts compared with stock-ar's", key="output_compared")
    agreement: float | None = figure(
        "Share of stock-ar's tokens before the first difference of each answer", default=None, most=1
    )
    near_ties: tuple[Difference, ...] = figure("Differences that a near-tie explains", default=(), absent=())
    different: tuple[Difference, ...] = figure("Other differences", default=(), absent=())

    @derived("Prompts with stock-ar's output, of how many, as text", key="output_check")
    def text(self) -> str:
        return f"{self.equal}/{self.compared}"

    @property
    def passed(self) -> bool:
        """Whether all differences are near-ties."""
        return not self.different

    @property
    def summary(self) -> str:
        """The count of equal prompts, and that of near-ties."""
        return f"{self.text} ({len(self.near_ties)} near-ties)" if self.near_ties else self.text


def check_answers(
    samples: Samples,
    reference: Samples,
    logits_at: LogitsAt,
    end_tokens: Sequence[int],
    *,
    own_split: bool = False,
    lossy: bool = False,
) -> OutputCheck:
    """Compares every answer of `samples` with the first answer that `reference` gave to the same turn, token by token.

    Verification computes several tokens in one batch, and kernels may round a batch differently from a single token.
    Where the logits of two tokens are as close as rounding makes them, either token is a correct answer: a near-tie,
    which is listed and is no failure. Any other difference is an error. Under an expert budget answers differ by
    design: the comparison then gives a figure of quality, lists nothing and finds no error.

    end_tokens: ids that stop an answer. own_split: `logits_at` computes with the same layers on the GPU as `samples`,
    which rounds otherwise than the reference: there the best token is right. lossy: made under an expert budget.
    """
    expected: dict[tuple[str, int], Sample] = {}
    for sample in reference:
        expected.setdefault((sample.prompt, sample.turn), sample)
    equal: dict[str, bool] = {}
    differences: dict[tuple[str, int, tuple[int, ...]], Difference] = {}
    n_agreed = n_tokens = 0
    for sample in samples:
        base = expected.get((sample.prompt, sample.turn))
        if base is None:
            continue
        same = sample.tokens == base.tokens
        equal[sample.prompt] = equal.get(sample.prompt, True) and same
        n_tokens += len(base.tokens)
        n_agreed += n_common(base.tokens, sample.tokens)
        key = (sample.prompt, sample.turn, tuple(sample.tokens))
        if not same and not lossy and key not in differences:  # a repeated difference is listed once
            differences[key] = _difference(sample, base, logits_at, end_tokens, own_split)
    return OutputCheck(
        equal=sum(equal.values()),
        compared=len(equal),
        agreement=n_agreed / n_tokens if n_tokens else None,
        near_ties=tuple(d for d in differences.values() if d.near_tie),
        different=tuple(d for d in differences.values() if not d.near_tie),
    )


def _difference(
    sample: Sample, base: Sample, logits_at: LogitsAt, end_tokens: Sequence[int], own_split: bool
) -> Difference:
    """Returns the first difference of two answers that differ."""
    position = n_common(base.tokens, sample.tokens)
    logits = logits_at(base, position)

    def token_of(answer: Sample) -> int | None:
        return answer.tokens[position] if position < len(answer.tokens) else None

    def logit(token: int | None) -> float:
        if token is not None:
            return float(logits[token])
        return float(logits[list(end_tokens)].max()) if end_tokens else float("-inf")

    expected, token = token_of(base), token_of(sample)
    gap = float(logits.max()) - logit(token) if own_split else abs(logit(expected) - logit(token))
    tokens = {"position": position, "reference_token": expected, "token": token}
    return filled(Difference, sample, **tokens, gap=gap, near_tie=gap <= NEAR_TIE_GAP)


NO_REFERENCE = "no reference"


@dataclass(frozen=True)
class CategoryScore:
    category: str = figure("Category of the prompts")
    score: float = figure("Mean score", most=1)
    n_scored: int = figure("Number of scored answers")


@dataclass(frozen=True)
class Unscored:
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


_WINDOW_TOKENS = 512  # as llama.cpp's perplexity program by default


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How well a model predicts a text; `exp(nll)` is the perplexity."""

    text: str = figure("Name of the text", key="perplexity_text")
    text_sha256: str = figure("SHA-256 of the text, hexadecimal", key="perplexity_text_sha256")
    n_tokens: int = figure("Tokens predicted", key="perplexity_tokens")
    batch_tokens: int = figure("Tokens per batch, a verification of gamma + 1", key="perplexity_batch")
    nll: float  # mean negative log-likelihood of a token, in nats
    nll_stderr: float  # standard error of that mean

    @derived("Perplexity of a text", key="perplexity")
    def value(self) -> float:
        return math.exp(self.nll)

    @derived("Its standard error", key="perplexity_stderr")
    def stderr(self) -> float:
        """Its standard error, by the derivative of exp."""
        return self.value * self.nll_stderr


def measure_perplexity(
    context: Context, text: EvaluationText, *, batch_tokens: int, run: Run | None = None
) -> Perplexity | None:
    """Decodes `text` in batches of `batch_tokens`, as the context's expert budget has them; None if cancelled.

    Every token is predicted from a KV cache that such batches wrote, as large as a verification, so that a budget acts.
    An answer differs: its prompt is decoded exactly, and its batches end with drafts that may be rejected, which
    compete for the shortlist, too.

    Overwrites the KV cache, which is empty afterwards. Raises InputError for a text of fewer than two tokens.
    """
    tokens, window = context.model.tokenize(text.text), min(_WINDOW_TOKENS, context.n_ctx)
    losses: list[NDArray[np.float64]] = []
    try:
        for start in range(0, len(tokens), window):
            part = tokens[start : start + window]
            context.clear()
            for first in range(0, len(part) - 1, batch_tokens):
                if run is not None and run.cancelled():
                    return None
                batch = part[first : min(first + batch_tokens, len(part) - 1)]
                phase = Phase.VERIFY if len(batch) > 1 else Phase.DECODE
                logits = context.decode(batch, phase=phase, logits="all")
                losses.append(negative_log_likelihood(logits, part[first + 1 : first + 1 + len(batch)]))
    finally:
        context.clear()
    if not losses:
        raise InputError(f"The text {text.name} has {len(tokens)} token(s).", "Name a longer text.")
    nll = np.concatenate(losses)
    return Perplexity(
        text=text.name,
        text_sha256=text.sha256,
        n_tokens=nll.size,
        batch_tokens=batch_tokens,
        nll=float(nll.mean()),
        nll_stderr=float(nll.std(ddof=1) / math.sqrt(nll.size)) if nll.size > 1 else 0.0,
    )


def negative_log_likelihood(logits: NDArray[np.float32], targets: Sequence[int]) -> NDArray[np.float64]:
    """Returns -log softmax(logits)[target] of each row, in nats: float64 [n] of logits [n, n_vocab]."""
    rows = logits.astype(np.float64)
    highest = rows.max(axis=1)
    total = np.log(np.exp(rows - highest[:, None]).sum(axis=1)) + highest
    return np.asarray(total - rows[np.arange(len(rows)), list(targets)])
