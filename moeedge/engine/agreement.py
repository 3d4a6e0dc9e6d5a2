"""Do two greedy answers agree, and if not, was it a near-tie?

Verification computes several tokens in one batch, and kernels may round a batch differently from a single token. Where
the two best logits all but tie, that can turn the order around; anywhere else a difference is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.context import Context
from moeedge.engine.types import Phase

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
