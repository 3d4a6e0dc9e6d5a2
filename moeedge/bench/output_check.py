"""Does every mode say what stock-ar says? Greedy tokens compared, differences weighed by the reference's own logits.

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
from moeedge.engine.agreement import compare


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
