"""Do two greedy answers agree, and if not, was it a near-tie?

Verification computes several tokens in one batch, and kernels may round a batch differently from a single token. Where
the two best logits all but tie, that can turn the order around; anywhere else a difference is an error.

Does every mode say what stock-ar says? Greedy tokens compared, differences weighed by the reference's own logits.

Where the two tokens' logits are as close as rounding makes them (moeedge.engine.agreement has the bound and its
reason), either is a right answer: a near-tie. It is listed, and it is no failure. Anything else is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.samples import Sample
from moeedge.llama.context import Context
from moeedge.native.abi import Phase

# logits; rounding moved logits of scale 16 by at most 0.3 % (repacked against plain kernels), so a wider gap is no tie
NEAR_TIE_GAP = 0.05


@dataclass(frozen=True)
class Agreement:
    """How an answer compares with its reference, token by token."""

    equal: bool
    first_difference: int | None  # index of the first token that differs; None when equal
    gap: float | None  # by how much the reference's logits prefer its own token there; None when equal
    near_tie: bool  # they differ, but only where the reference itself was undecided


def compare(reference: Sequence[int], tokens: Sequence[int], gap_of: Callable[[int], float]) -> Agreement:
    """Compares `tokens` with `reference`; `gap_of(i)` is by how much its logits prefer its token i.

    An answer that is shorter or longer differs behind the end of the shorter one.
    """
    if list(reference) == list(tokens):
        return Agreement(True, None, None, False)
    shorter = min(len(reference), len(tokens))
    first = next((i for i in range(shorter) if reference[i] != tokens[i]), shorter)
    gap = gap_of(first)
    return Agreement(False, first, gap, gap <= NEAR_TIE_GAP)


def top2_gap(logits: NDArray[np.float32]) -> float:
    """Best minus second-best of `logits` [n_vocab]."""
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


class ReferenceGap:
    """`gap_of` for `compare`, computed on demand: one token at a time, as plain decoding does.

    Uses (and leaves behind) the context's KV cache; call it between answers.
    """

    def __init__(
        self, context: Context, prompt: Sequence[int], reference: Sequence[int], answer: Sequence[int]
    ) -> None:
        self._context = context
        self._prompt = list(prompt)
        self._reference = list(reference)
        self._answer = list(answer)

    def __call__(self, position: int) -> float:
        """The reference's best logit minus that of the answer's token; where the answer has ended, of the next best."""
        self._context.clear()
        logits = self._context.decode(self._prompt, phase=Phase.PREFILL, logits="last")
        for token in self._reference[:position]:
            logits = self._context.decode([token], phase=Phase.DECODE, logits="last")
        if position >= len(self._answer):
            return top2_gap(logits[0])
        return float(logits[0].max() - logits[0, self._answer[position]])


@dataclass(frozen=True)
class Difference:
    """The first place where a mode's answer leaves the reference's."""

    prompt: str
    turn: int
    repetition: int
    position: int  # in the answer, from 0
    reference_token: int | None  # None: the reference stopped here
    token: int | None  # None: this mode stopped here
    gap: float  # logits, by which stock-ar's context prefers the better of the two
    near_tie: bool

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


@dataclass(frozen=True)
class OutputCheck:
    """A mode's answers beside the reference's. A prompt is equal when all its turns and repetitions are."""

    equal: int
    compared: int
    near_ties: tuple[Difference, ...] = ()
    different: tuple[Difference, ...] = ()

    @property
    def passed(self) -> bool:
        """No difference but near-ties."""
        return not self.different

    def __str__(self) -> str:
        return f"{self.equal}/{self.compared}"


# (answer, position) -> float32 [n_vocab], the reference context's logits behind so many tokens of that answer
LogitsAt = Callable[[Sample, int], NDArray[np.float32]]


def check_output(
    samples: Sequence[Sample],
    reference: Sequence[Sample],
    logits_at: LogitsAt,
    end_tokens: Sequence[int],
) -> OutputCheck:
    """Compares every answer of `samples` with the first one that `reference` gave to the same turn.

    `logits_at(reference_sample, position)` computes the logits after `position` tokens of that answer; `end_tokens` are
    those that stop an answer, for the case that one of the two stopped.
    """
    expected: dict[tuple[str, int], Sample] = {}
    for sample in reference:
        expected.setdefault((sample.prompt, sample.turn), sample)
    prompts: dict[str, bool] = {}
    found: dict[tuple[str, int, tuple[int, ...]], Difference] = {}
    for sample in samples:
        wanted = expected.get((sample.prompt, sample.turn))
        if wanted is None:
            continue
        prompts[sample.prompt] = prompts.get(sample.prompt, True) and sample.tokens == wanted.tokens
        key = (sample.prompt, sample.turn, tuple(sample.tokens))
        if sample.tokens != wanted.tokens and key not in found:  # each once, however often it was repeated
            found[key] = _weigh(sample, wanted, logits_at, end_tokens)
    return OutputCheck(
        equal=sum(prompts.values()),
        compared=len(prompts),
        near_ties=tuple(d for d in found.values() if d.near_tie),
        different=tuple(d for d in found.values() if not d.near_tie),
    )


def _weigh(sample: Sample, wanted: Sample, logits_at: LogitsAt, end_tokens: Sequence[int]) -> Difference:
    """The first difference of two answers, and how much the reference preferred its own token to the other's."""

    def gap_of(position: int) -> float:
        logits = logits_at(wanted, position)
        ours, theirs = _token(sample.tokens, position), _token(wanted.tokens, position)
        return abs(_logit(logits, theirs, end_tokens) - _logit(logits, ours, end_tokens))

    agreement = compare(wanted.tokens, sample.tokens, gap_of)
    position, gap = agreement.first_difference, agreement.gap
    assert position is not None and gap is not None  # they were found to differ
    return Difference(
        prompt=sample.prompt,
        turn=sample.turn,
        repetition=sample.repetition,
        position=position,
        reference_token=_token(wanted.tokens, position),
        token=_token(sample.tokens, position),
        gap=gap,
        near_tie=agreement.near_tie,
    )


def _token(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _logit(logits: NDArray[np.float32], token: int | None, end_tokens: Sequence[int]) -> float:
    if token is not None:
        return float(logits[token])
    return float(logits[list(end_tokens)].max()) if end_tokens else float("-inf")
