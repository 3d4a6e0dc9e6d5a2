"""Compares greedy answers with the reference's, token by token.

Verification computes several tokens in one batch, and kernels may round a batch differently from a single token. Where
the logits of two tokens are as close as rounding makes them, either token is a correct answer: a near-tie, which is
listed and is no failure. Any other difference is an error.

Under an expert budget answers differ by design: the comparison then gives a figure of quality, and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.samples import Sample
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase

# logits; rounding moved logits of scale 16 by at most 0.3 % (repacked against plain kernels), so a wider gap is no tie
NEAR_TIE_GAP = 0.05

# (reference's sample, position) -> float32 [n_vocab], its logits after `position` tokens of its answer
LogitsAt = Callable[[Sample, int], NDArray[np.float32]]


@dataclass(frozen=True)
class Agreement:
    """Comparison of an answer with its reference; first_difference and gap are None for equal answers."""

    equal: bool
    first_difference: int | None  # index of the first token that differs
    gap: float | None  # logits by which the reference prefers its own token there
    near_tie: bool  # they differ where the reference itself was undecided


def compare_answers(reference: Sequence[int], tokens: Sequence[int], gap_of: Callable[[int], float]) -> Agreement:
    """Compares `tokens` with `reference`; gap_of(i) returns by how much the reference prefers its token i.

    Answers of different lengths differ at the end of the shorter one, if not before.
    """
    if list(reference) == list(tokens):
        return Agreement(True, None, None, False)
    first = n_common(reference, tokens)
    gap = gap_of(first)
    return Agreement(False, first, gap, gap <= NEAR_TIE_GAP)


def n_common(reference: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns the number of tokens before the first difference."""
    shorter = min(len(reference), len(tokens))
    return next((i for i in range(shorter) if reference[i] != tokens[i]), shorter)


def reference_logits(
    context: Context, prompt: Sequence[int], answer: Sequence[int], position: int
) -> NDArray[np.float32]:
    """Returns the logits [n_vocab] after `position` tokens of `answer`, decoded one by one as plain decoding does.

    Overwrites the context's KV cache: call it between answers.
    """
    context.clear()
    logits = context.decode(list(prompt), phase=Phase.PREFILL, logits="last")
    for token in answer[:position]:
        logits = context.decode([token], phase=Phase.DECODE, logits="last")
    return np.array(logits[0])  # a copy: the view is valid until the next decode


def logits_in(context: Context) -> LogitsAt:
    """Returns what computes the reference's logits after some tokens of an answer, in `context`."""

    def logits_at(sample: Sample, position: int) -> NDArray[np.float32]:
        return reference_logits(context, sample.prompt_ids, sample.tokens, position)

    return logits_at


def stop_tokens(model: Model) -> list[int]:
    """Returns the ids that end an answer."""
    return [token for token in range(model.info.n_vocab) if model.is_eog(token)]


def top2_gap(logits: NDArray[np.float32]) -> float:
    """Returns the best minus the second-best of `logits` [n_vocab]."""
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


@dataclass(frozen=True)
class ReferenceGap:
    """`gap_of` for `compare_answers`, computed on demand in the reference's context."""

    context: Context
    prompt: Sequence[int]
    reference: Sequence[int]
    answer: Sequence[int]

    def __call__(self, position: int) -> float:
        """Returns the best logit minus that of the answer's token; after the answer's end, minus the second-best."""
        logits = reference_logits(self.context, self.prompt, self.reference, position)
        if position >= len(self.answer):
            return top2_gap(logits)
        return float(logits.max() - logits[self.answer[position]])


@dataclass(frozen=True)
class Difference:
    """The first place where a mode's answer differs from the reference's."""

    prompt: str
    turn: int
    repetition: int
    position: int  # in the answer, from 0
    reference_token: int | None  # None: the reference stopped here
    token: int | None  # None: this mode stopped here
    gap: float  # logits by which stock-ar's context, or the mode's own split, prefers the better of the two
    near_tie: bool


@dataclass(frozen=True)
class OutputCheck:
    """Comparison of a mode's answers. A prompt is equal if all its turns and repetitions are."""

    equal: int  # prompts
    compared: int
    agreement: float | None = None  # share of the reference's tokens before the first difference of each answer
    lossy: bool = False  # answers may differ: differences are not listed, and none is an error
    near_ties: tuple[Difference, ...] = ()
    different: tuple[Difference, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all differences are near-ties."""
        return not self.different

    def __str__(self) -> str:
        return f"{self.equal}/{self.compared}"

    @property
    def summary(self) -> str:
        """The count of equal prompts, and that of near-ties."""
        return f"{self} ({len(self.near_ties)} near-ties)" if self.near_ties else str(self)


def check_answers(
    samples: Sequence[Sample],
    reference: Sequence[Sample],
    logits_at: LogitsAt,
    end_tokens: Sequence[int],
    *,
    own_split: bool = False,
    lossy: bool = False,
) -> OutputCheck:
    """Compares every answer of `samples` with the first answer that `reference` gave to the same turn.

    end_tokens: ids that stop an answer, for the case that one of the two stopped. own_split: `logits_at` computes with
    the same layers on the GPU as `samples`, which rounds otherwise than the reference: there the best token is right.
    lossy: `samples` were made under an expert budget.
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
        lossy=lossy,
        near_ties=tuple(d for d in differences.values() if d.near_tie),
        different=tuple(d for d in differences.values() if not d.near_tie),
    )


def _difference(
    sample: Sample, base: Sample, logits_at: LogitsAt, end_tokens: Sequence[int], own_split: bool
) -> Difference:
    """Returns the first difference of two answers that differ."""

    def token_at(answer: Sample, position: int) -> int | None:
        return answer.tokens[position] if position < len(answer.tokens) else None

    def logit(logits: NDArray[np.float32], token: int | None) -> float:
        if token is not None:
            return float(logits[token])
        return float(logits[list(end_tokens)].max()) if end_tokens else float("-inf")

    def gap_of(position: int) -> float:
        logits = logits_at(base, position)
        if own_split:
            return float(logits.max()) - logit(logits, token_at(sample, position))
        return abs(logit(logits, token_at(base, position)) - logit(logits, token_at(sample, position)))

    agreement = compare_answers(base.tokens, sample.tokens, gap_of)
    assert agreement.first_difference is not None and agreement.gap is not None
    return Difference(
        prompt=sample.prompt,
        turn=sample.turn,
        repetition=sample.repetition,
        position=agreement.first_difference,
        reference_token=token_at(base, agreement.first_difference),
        token=token_at(sample, agreement.first_difference),
        gap=agreement.gap,
        near_tie=agreement.near_tie,
    )
