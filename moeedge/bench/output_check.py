"""Does every mode say what stock-ar says? Greedy tokens compared, differences weighed by the reference's own logits.

Verification computes several tokens in one batch and plain decoding one at a time; the kernels of the two round
differently (relative differences of the logits around 1e-4, at worst a few 1e-3, stock against stock). Where the two
best tokens are closer than that, either is a right answer: a near-tie. It is listed, and it is no failure. Anything
else is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.samples import Sample

# in units of logits: 3e-3 of a logit of about 17; the two tokens' probabilities differ by less than a factor 1.06
NEAR_TIE_GAP = 0.05


@dataclass(frozen=True)
class Difference:
    """The first place where a mode's answer leaves the reference's."""

    prompt: str
    turn: int
    repetition: int
    position: int  # in the answer, from 0
    reference_token: int | None  # None: the reference stopped here
    token: int | None  # None: this mode stopped here
    gap: float  # logits, by which a stock context prefers the better of the two
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


def first_difference(reference: Sequence[int], answer: Sequence[int]) -> int | None:
    """The first position at which two answers differ; the end of the shorter one counts. None: equal."""
    for position, (ours, theirs) in enumerate(zip(answer, reference, strict=False)):
        if ours != theirs:
            return position
    return None if len(reference) == len(answer) else min(len(reference), len(answer))


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
    found: dict[tuple[str, int, int, int | None], Difference] = {}
    for sample in samples:
        wanted = expected.get((sample.prompt, sample.turn))
        if wanted is None:
            continue
        position = first_difference(wanted.tokens, sample.tokens)
        prompts[sample.prompt] = prompts.get(sample.prompt, True) and position is None
        if position is None:
            continue
        token = _token(sample.tokens, position)
        key = (sample.prompt, sample.turn, position, token)
        if key in found:  # another repetition with the same difference
            continue
        wanted_token = _token(wanted.tokens, position)
        logits = logits_at(wanted, position)
        gap = abs(_logit(logits, wanted_token, end_tokens) - _logit(logits, token, end_tokens))
        found[key] = Difference(
            sample.prompt, sample.turn, sample.repetition, position, wanted_token, token, gap, gap <= NEAR_TIE_GAP
        )
    return OutputCheck(
        equal=sum(prompts.values()),
        compared=len(prompts),
        near_ties=tuple(d for d in found.values() if d.near_tie),
        different=tuple(d for d in found.values() if not d.near_tie),
    )


def _token(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _logit(logits: NDArray[np.float32], token: int | None, end_tokens: Sequence[int]) -> float:
    if token is not None:
        return float(logits[token])
    return float(logits[list(end_tokens)].max()) if end_tokens else float("-inf")
