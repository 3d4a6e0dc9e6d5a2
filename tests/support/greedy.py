"""Whether a token sequence is greedy decoding's, up to near-ties that stock llama.cpp itself decides either way.

A verification computes several tokens in one batch, for which llama.cpp uses other kernels than for one token; the last
bits differ, and where two logits are closer than that, greedy decoding by batches may take the other one. Everything
here is judged by a stock context alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support.stock import StockContext

BATCH = 9  # of a verification with gamma 8


@dataclass(frozen=True)
class Verdict:
    """Positions at which a sequence departs from the argmax of stock's logits for the very same prefix."""

    ties: list[int]  # closer than stock's own batch noise
    faults: list[int]  # further: not greedy decoding
    noise: float  # the most that batching moved one of stock's logits along this sequence
    gaps: dict[int, float] = field(default_factory=dict)  # of all of them: how far below the best logit


def judge(stock: StockContext, prompt: Sequence[int], tokens: Sequence[int]) -> Verdict:
    """Forces `tokens` through the stock context token by token and compares each with the argmax before it."""
    if not tokens:
        return Verdict([], [], 0.0)
    rows = forced_rows(stock, prompt, tokens, 1)
    noise = float(np.abs(forced_rows(stock, prompt, tokens, BATCH) - rows).max())
    gaps = rows.max(axis=1) - rows[np.arange(len(tokens)), list(tokens)]
    departures = np.flatnonzero(rows.argmax(axis=1) != tokens)
    ties = [int(i) for i in departures if gaps[i] <= 2 * noise]  # both logits may have moved
    faults = [int(i) for i in departures if i not in ties]
    return Verdict(ties, faults, noise, {int(i): float(gaps[i]) for i in departures})


def forced_rows(stock: StockContext, prompt: Sequence[int], tokens: Sequence[int], batch: int) -> np.ndarray:
    """Logits that each of `tokens` was to be chosen from, decoded `batch` at a time: float32 [len(tokens), n_vocab]."""
    stock.trim(0)
    rows = [stock.decode(prompt, every=False)]
    rows += [stock.decode(tokens[i : i + batch]) for i in range(0, len(tokens) - 1, batch)]
    return np.concatenate(rows)[: len(tokens)]
