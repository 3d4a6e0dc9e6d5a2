"""Compares greedy answers with the reference's, token by token.

Verification computes several tokens in one batch, and kernels may round a batch differently from a single token. Where
the logits of two tokens are as close as rounding makes them, either token is a correct answer: a near-tie, which is
listed and is no failure. Any other difference is an error.

Under an expert budget answers differ by design: the comparison then gives a figure of quality, and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.samples import Sample, Samples
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.records import derived, figure, filled

# logits; rounding moved logits of scale 16 by at most 0.3 % (repacked against plain kernels), so a wider gap is no tie
NEAR_TIE_GAP = 0.05

# (reference's sample, position) -> float32 [n_vocab], its logits after `position` tokens of its answer
LogitsAt = Callable[[Sample, int], NDArray[np.float32]]


def n_common(reference: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns the number of tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reference, tokens, strict=False)))


def logits_in(context: Context) -> LogitsAt:
    """Returns a function of the reference's logits by plain decoding, which overwrites the context's KV cache."""

    def logits_at(sample: Sample, position: int) -> NDArray[np.float32]:
        context.clear()
        logits = context.decode(list(sample.prompt_ids), phase=Phase.PREFILL, logits="last")
        for token in sample.tokens[:position]:
            logits = context.decode([token], phase=Phase.DECODE, logits="last")
        return np.array(logits[0])  # a copy: the view is valid until the next decode

    return logits_at


def stop_tokens(model: Model) -> list[int]:
    """Returns the ids that end an answer."""
    return [token for token in range(model.info.n_vocab) if model.is_eog(token)]


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
    lossy: bool = False  # answers may differ: differences are not listed, and none is an error
    near_ties: tuple[Difference, ...] = figure("Differences that a near-tie explains", default=(), absent=())
    different: tuple[Difference, ...] = figure("Other differences", default=(), absent=())

    @derived("Prompts with stock-ar's output, of how many, as text", key="output_check")
    def text(self) -> str:
        return f"{self.equal}/{self.compared}"

    def __str__(self) -> str:
        return self.text

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
    """Compares every answer of `samples` with the first answer that `reference` gave to the same turn.

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
        lossy=lossy,
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
