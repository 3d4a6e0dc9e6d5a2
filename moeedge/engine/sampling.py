"""Draws the next token: llama.cpp's default chain of filters, and exact rejection sampling for drafts.

The chain is penalties -> top-k -> top-p -> min-p -> temperature -> draw. After top-k candidates are lists of Python's
own numbers: a call of NumPy takes longer than a loop over 40 of them. Without top-k they are arrays.

Rejection sampling: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023,
algorithm 1. The emitted tokens are distributed as if the target alone had drawn them.
"""

from __future__ import annotations

import ctypes
import math
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.types import SamplingConfig
from moeedge.errors import EngineError
from moeedge.native.compute import LargestValues

if TYPE_CHECKING:
    from moeedge.llama.model import Model

_ROWS = 64  # of the vocabulary, of whose columns the search takes the maxima
_BLOCK = 32  # values of the vocabulary, of which `confidence` uses the largest
_SMALL_VOCABULARY = 8192  # all values of which it uses
SHORT = 4096  # the largest top-k of which candidates are lists
NOT_FINITE = (
    "The model's output is not a number (NaN or infinite).",
    "Its file may be damaged: download or copy it again.",
)

FloatRow = NDArray[np.float32]  # [n_vocab]
CRow = Any  # ctypes array of c_float [n_vocab]
Weights = list[float] | NDArray[np.float64]


class Candidates(NamedTuple):
    """A distribution over the tokens that passed a filter chain: two lists, or two arrays, of equal length."""

    ids: list[int] | NDArray[np.intp]
    probabilities: Weights  # sum to 1

    @classmethod
    def certain(cls, token: int) -> Candidates:
        """All probability on one token, as for a greedy or deterministic proposal."""
        return cls([token], [1.0])

    def probability_of(self, token: int) -> float:
        """0 for a token that is no candidate."""
        if isinstance(self.ids, list):
            return float(self.probabilities[self.ids.index(token)]) if token in self.ids else 0.0
        return float(np.asarray(self.probabilities)[self.ids == token].sum())


class Sampler:
    """Draws tokens under one configuration from one seeded stream, which target and draft of an answer share."""

    def __init__(self, config: SamplingConfig, n_vocab: int) -> None:
        self.config = config
        self.n_vocab = n_vocab
        self.seed = secrets.randbits(32) if config.seed is None else config.seed
        self.greedy = config.temperature == 0
        self._rng = np.random.Generator(np.random.PCG64(self.seed % 2**64))
        self._penalizes = config.repeat_penalty != 1.0 and config.repeat_last_n != 0
        self._penalty = ctypes.c_float(config.repeat_penalty).value  # as llama.cpp has it
        self._top_k = min(config.top_k, n_vocab)  # 0: no filter
        self._log_min_p = math.log(config.min_p) if config.min_p > 0 else -math.inf
        has_short_lists = 0 < self._top_k <= SHORT and not self.greedy
        self._largest = LargestValues(self._top_k) if has_short_lists else None
        self._scratch: NDArray[np.float64] | None = None  # [n_vocab], zeros

    @property
    def state(self) -> dict[str, Any]:
        """The position in the stream of random numbers; may be set to go back to it."""
        return dict(self._rng.bit_generator.state)

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state

    def use(self, model: Model) -> None:
        """Goes on with the same model that was loaded again, as the one before is freed."""

    def candidates(self, logits: FloatRow, history: Sequence[int]) -> Candidates:
        """The candidates of `logits` float32 [n_vocab] after `history`. Raises EngineError where none is finite."""
        if self.greedy:
            return Candidates.certain(self.argmax(logits, history))
        if self._largest is None:
            return self._wide_candidates(logits, history)
        with self._penalized(logits, history) as row:
            ids, values = self._largest.find(row, self._top_k)
        if not values or not math.isfinite(values[0]):
            raise EngineError(*NOT_FINITE)
        best, config = values[0], self.config
        values = [value - best for value in values]
        n = len(values)
        if config.top_p < 1:
            sums = list(accumulate(map(math.exp, values)))
            n = min(bisect_left(sums, config.top_p * sums[-1]) + 1, n)
        while values[n - 1] < self._log_min_p:
            n -= 1
        temperature = config.temperature
        weights = [math.exp(value / temperature) for value in values[:n]]
        total = sum(weights)
        return Candidates(ids[:n], [weight / total for weight in weights])

    def confidence(self, logits: FloatRow, history: Sequence[int]) -> float:
        """About the share of the most likely token under softmax, from `logits` [n_vocab]; never less."""
        values = logits
        if len(logits) // _BLOCK > _SMALL_VOCABULARY // _BLOCK:
            # in one pass the largest value of each 32: a softmax over 151,936 tokens would take longer than drawing one
            n = len(logits) // _BLOCK * _BLOCK
            values = np.append(logits[:n].reshape(_BLOCK, -1).max(axis=0), logits[n:])
        return 1.0 / float(np.exp(values - values.max()).sum())

    def largest(self, k: int, logits: FloatRow, history: Sequence[int]) -> NDArray[np.intp]:
        """Ids of the `k` largest under the repeat penalty, descending."""
        with self._penalized(logits, history):
            return _largest(logits, k)

    def _wide_candidates(self, logits: FloatRow, history: Sequence[int]) -> Candidates:
        """The candidates without top-k, or with a large one; without any filter in the order of the vocabulary."""
        config, total = self.config, 0.0
        with self._penalized(logits, history):
            best = float(logits.max())
            if not math.isfinite(best):
                raise EngineError(*NOT_FINITE)
            floor = self._log_min_p  # of the values that are sorted, less the largest one
            if self._top_k:
                ids = _largest(logits, self._top_k)
            else:
                if config.top_p < 1:
                    terms = logits - best  # in float32 as llama.cpp has them: float64 takes several times as long
                    total = float(np.exp(terms, out=terms).sum(dtype=np.float64))
                    # all tokens below have less than 1 - top_p together
                    floor = max(floor, math.log((1 - config.top_p) * total / len(logits)))
                ids = np.flatnonzero(logits >= best + floor)
                ids = ids if math.isinf(floor) else _descending(logits, ids)
            values = logits[ids].astype(np.float64) - best
        if config.top_p < 1:
            weights = np.exp(values)
            n = int(np.searchsorted(np.cumsum(weights), config.top_p * (total or weights.sum()))) + 1
            ids, values = ids[:n], values[:n]
        values = values[values >= self._log_min_p]
        weights = np.exp(values / config.temperature)
        return Candidates(ids[: len(values)], weights / weights.sum())

    def argmax(self, logits: FloatRow, history: Sequence[int]) -> int:
        """The greedy choice, the lowest id among equals as in llama.cpp."""
        if self._penalizes:
            with self._penalized(logits, history):
                token = int(logits.argmax())
                value = logits[token]
        else:  # the usual case, several times a step
            token = int(logits.argmax())
            value = logits[token]
        if not math.isfinite(value):
            raise EngineError(*NOT_FINITE)
        return token

    def pick(self, candidates: Candidates) -> int:
        if len(candidates.ids) == 1:
            return int(candidates.ids[0])
        return int(candidates.ids[self._draw_index(candidates.probabilities)])

    def accept(
        self, logits: FloatRow, drafts: Sequence[int], proposals: Sequence[Candidates], history: Sequence[int]
    ) -> tuple[int, int]:
        """The number of accepted drafts, and the target's token. logits: float32 [len(drafts) + 1, n_vocab]."""
        seen = self._verified(history)
        for i, token in enumerate(drafts):
            replacement = self._verify(logits[i], seen, token, proposals[i])
            self._take(token if replacement is None else replacement)
            if replacement is not None:
                return i, replacement
            seen.append(token)
        token = self._draw(logits[len(drafts)], seen)
        self._take(token)
        return len(drafts), token

    def recent(self, history: Sequence[int]) -> list[int]:
        """A copy, to append to, of the part of `history` that the penalty covers; an entire history may be long."""
        return list(self._penalized_tokens(history))

    def _verified(self, history: Sequence[int]) -> list[int]:
        """As `recent`, of the tokens before the target's logits."""
        return self.recent(history)

    def _take(self, token: int) -> None:
        """The answer goes on with `token`."""

    def _draw(self, logits: FloatRow, seen: list[int]) -> int:
        return self.argmax(logits, seen) if self.greedy else self.pick(self.candidates(logits, seen))

    def _verify(self, logits: FloatRow, seen: list[int], token: int, draft: Candidates) -> int | None:
        """None (accepted) with probability min(1, p/q), else a token drawn from the residual max(0, p - q)."""
        if self.greedy:
            best = self.argmax(logits, seen)
            return None if best == token else best
        target = self.candidates(logits, seen)
        if self._rng.random() * draft.probability_of(token) < target.probability_of(token):
            return None
        residual = self._residual(target, draft)
        # p and q may differ only by rounding
        return self.pick(target) if residual is None else int(target.ids[self._draw_index(residual)])

    def _residual(self, target: Candidates, draft: Candidates) -> Weights | None:
        """max(0, p - q) of the target's candidates; None where all are 0."""
        if isinstance(target.ids, list):
            drafted = dict(zip(draft.ids, draft.probabilities, strict=True))
            pairs = zip(target.ids, target.probabilities, strict=True)
            few = [max(p - drafted.get(token, 0.0), 0.0) for token, p in pairs]
            return few if any(few) else None
        if self._scratch is None:
            self._scratch = np.zeros(self.n_vocab)
        self._scratch[draft.ids] = draft.probabilities
        many = np.maximum(target.probabilities - self._scratch[target.ids], 0.0)
        self._scratch[draft.ids] = 0.0
        return many if many.any() else None

    def _draw_index(self, weights: Weights) -> int:
        """An index with probability proportional to its weight, never one of weight 0."""
        if isinstance(weights, list):
            cumulated = list(accumulate(weights))
            index = bisect_right(cumulated, self._rng.random() * cumulated[-1])
            return index if index < len(cumulated) else bisect_left(cumulated, cumulated[-1])
        sums = np.cumsum(weights)
        index = int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))
        return index if index < len(sums) else int(np.searchsorted(sums, sums[-1]))

    def _penalized_tokens(self, history: Sequence[int]) -> Sequence[int]:
        """The tokens that the penalty covers; a window of -1 means the entire history, as in llama.cpp."""
        last_n = self.config.repeat_last_n
        return () if not self._penalizes else history if last_n < 0 else history[-last_n:]

    @contextmanager
    def _penalized(self, logits: FloatRow, history: Sequence[int]) -> Iterator[CRow]:
        """Within, `logits` have the repeat penalty, in place: a copy takes as long as a search. Yields them for C."""
        row, n = (ctypes.c_float * len(logits)).from_buffer(logits.data), len(logits)
        before: dict[int, float] = {}
        try:
            for token in self._penalized_tokens(history):
                if token not in before and token < n:  # a draft's vocabulary may lack the target's last tokens
                    value = before[token] = row[token]
                    # a division would make the token of a negative logit more likely
                    row[token] = value * self._penalty if value <= 0 else value / self._penalty
            yield row
        finally:
            for token, value in before.items():
                row[token] = value


def _largest(values: FloatRow, k: int) -> NDArray[np.intp]:
    """Indices of the `k` largest values, descending, the lower index first among equals; of all if there are fewer."""
    # the largest values of the columns of a table are values themselves: the k-th largest of them is a lower bound
    n = len(values) // _ROWS * _ROWS
    sample = np.append(values[:n].reshape(_ROWS, -1).max(axis=0), values[n:])
    sample = sample if len(sample) > k else values
    if len(sample) <= k:
        return _descending(values, np.arange(len(values)))
    return _descending(values, np.flatnonzero(values >= np.partition(sample, -k)[-k]))[:k]


def _descending(values: FloatRow, ids: NDArray[np.intp]) -> NDArray[np.intp]:
    return np.asarray(ids[np.argsort(-values[ids], kind="stable")])
