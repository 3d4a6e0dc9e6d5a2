"""Draws the next token: llama.cpp's default chain of filters, and exact rejection sampling for drafts.

The chain is penalties -> top-k -> top-p -> min-p -> temperature -> draw. Distributions are short lists of candidates
(ids and probabilities), not rows over the vocabulary.

Rejection sampling: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023,
algorithm 1. The emitted tokens are distributed as if the target alone had drawn them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.types import SamplingConfig
from moeedge.errors import EngineError

_ROWS = 64  # of the vocabulary, for the search: it looks into the columns with a large maximum
_TOP_P_HEAD = 1024  # candidates that top-p sorts before it sorts the entire vocabulary
_NOT_FINITE = ("The model computed logits that are not finite.", "Its file may be damaged.")

FloatRow = NDArray[np.float32]  # [n_vocab]


@dataclass(frozen=True)
class Candidates:
    """A distribution over the tokens that passed a filter chain."""

    ids: NDArray[np.intp]  # [n]
    probabilities: NDArray[np.float64]  # [n], sums to 1

    @classmethod
    def certain(cls, token: int) -> Candidates:
        """All probability on one token, as for a greedy or deterministic proposal."""
        return cls(np.array([token], dtype=np.intp), np.ones(1))

    def probability_of(self, token: int) -> float:
        return float(self.probabilities[self.ids == token].sum())


class Sampler:
    """Draws tokens under one configuration from one seeded stream of random numbers.

    Target and draft of one answer share a sampler: the same filters apply to both.
    """

    def __init__(self, config: SamplingConfig, n_vocab: int) -> None:
        self.config = config
        self.n_vocab = n_vocab
        self.seed = secrets.randbits(32) if config.seed is None else config.seed
        self.greedy = config.temperature == 0
        self._rng = np.random.Generator(np.random.PCG64(self.seed % 2**64))
        self._penalizes = config.repeat_penalty != 1.0 and config.repeat_last_n != 0
        self._scratch = np.zeros(n_vocab)

    @property
    def state(self) -> dict[str, Any]:
        """The position in the stream of random numbers; may be set to go back to it."""
        return dict(self._rng.bit_generator.state)

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state

    def candidates(self, logits: FloatRow, history: Sequence[int]) -> Candidates:
        """The candidates that `logits` float32 [n_vocab] leave; `history` is every token before this position.

        Raises EngineError for logits that are not finite.
        """
        if self.greedy:
            return Candidates.certain(self.argmax(logits, history))
        config = self.config
        with self._penalized(logits, history) as values:
            ids, kept, total = self._head(values)
        if config.top_p < 1:
            n = int(np.searchsorted(np.cumsum(np.exp(kept)), config.top_p * total)) + 1
            ids, kept = ids[:n], kept[:n]
        if config.min_p > 0:
            n = int(np.count_nonzero(kept >= math.log(config.min_p)))
            ids, kept = ids[:n], kept[:n]
        weights = np.exp(kept / config.temperature)
        return Candidates(ids, weights / weights.sum())

    def _head(self, values: FloatRow) -> tuple[NDArray[np.intp], NDArray[np.float64], float]:
        """The ids that pass top-k by descending value, their values less the largest one, and the sum for top-p.

        The sum is of exp(value - largest) over all that pass top-k; 0 where top-p is off. Without top-k, ids that
        top-p or min-p drop later may be missing already (the sum includes them); without any filter the ids are in the
        order of the vocabulary.
        """
        config = self.config
        maxima = _column_maxima(values)
        best = float(maxima.max())
        if not math.isfinite(best):
            raise EngineError(*_NOT_FINITE)
        if 0 < config.top_k < len(values):
            ids = _largest(values, maxima, config.top_k)
            kept = _below(values[ids], best)
            return ids, kept, float(np.exp(kept).sum())
        total = _sum_of_exp(values, best) if config.top_p < 1 else 0.0
        if config.min_p > 0:
            ids = _descending(values, _at_least(values, maxima, best + math.log(config.min_p)))
        elif config.top_p == 1:
            ids = np.arange(len(values))
        else:
            ids = _largest(values, maxima, _TOP_P_HEAD)
            if np.exp(_below(values[ids], best)).sum() < config.top_p * total:
                ids = _descending(values, np.arange(len(values)))
        return ids, _below(values[ids], best), total

    def argmax(self, logits: FloatRow, history: Sequence[int]) -> int:
        """The greedy choice, the lowest id among equals as in llama.cpp."""
        with self._penalized(logits, history) as values:
            token = int(values.argmax())
            is_finite = math.isfinite(values[token])
        if not is_finite:
            raise EngineError(*_NOT_FINITE)
        return token

    def pick(self, candidates: Candidates) -> int:
        """Draws one token."""
        if len(candidates.ids) == 1:
            return int(candidates.ids[0])
        return int(candidates.ids[self._draw_index(candidates.probabilities)])

    def accept(
        self,
        logits: NDArray[np.float32],
        drafts: Sequence[int],
        proposals: Sequence[Candidates],
        history: Sequence[int],
    ) -> tuple[int, int]:
        """The number of accepted drafts, and the target's own token after them.

        logits: float32 [len(drafts) + 1, n_vocab], the target's after the last token of `history` and after each draft.
        proposals: the distribution that each draft was drawn from. Each position is filtered with its own history,
        earlier drafts included.
        """
        seen = self.recent(history)
        if self.greedy:
            return self._accept_greedy(logits, drafts, seen)
        for i, token in enumerate(drafts):
            target = self.candidates(logits[i], seen)
            replacement = self._reject(target, proposals[i], token)
            if replacement is not None:
                return i, replacement
            seen.append(token)
        return len(drafts), self.pick(self.candidates(logits[len(drafts)], seen))

    def recent(self, history: Sequence[int]) -> list[int]:
        """A copy, to append to, of the part of `history` that the penalty covers; an entire history may be long."""
        return list(history[-self._window(history) :]) if self._penalizes else []

    def _accept_greedy(self, logits: NDArray[np.float32], drafts: Sequence[int], seen: list[int]) -> tuple[int, int]:
        for i, token in enumerate(drafts):
            best = self.argmax(logits[i], seen)
            if best != token:
                return i, best
            seen.append(token)
        return len(drafts), self.argmax(logits[len(drafts)], seen)

    def _reject(self, target: Candidates, draft: Candidates, token: int) -> int | None:
        """None (accepted) with probability min(1, p/q), else a token drawn from the residual max(0, p - q)."""
        p = target.probability_of(token)
        q = draft.probability_of(token)
        if self._rng.random() * q < p:
            return None
        self._scratch[draft.ids] = draft.probabilities
        residual = np.maximum(target.probabilities - self._scratch[target.ids], 0.0)
        self._scratch[draft.ids] = 0.0
        if residual.sum() <= 0:  # p and q differ only by rounding
            return self.pick(target)
        return int(target.ids[self._draw_index(residual)])

    def _draw_index(self, weights: NDArray[np.float64]) -> int:
        """An index with probability proportional to its weight, never one of weight 0."""
        cumulated = np.cumsum(weights)
        index = int(np.searchsorted(cumulated, self._rng.random() * cumulated[-1], side="right"))
        return min(index, len(cumulated) - 1)

    def _window(self, history: Sequence[int]) -> int:
        """Tokens that the penalty covers; -1 means the entire history, as in llama.cpp."""
        last_n = self.config.repeat_last_n
        return len(history) if last_n < 0 else last_n

    @contextmanager
    def _penalized(self, logits: FloatRow, history: Sequence[int]) -> Iterator[FloatRow]:
        """`logits` under the repeat penalty, in place, and as before at the end: a copy takes as long as a search."""
        if not self._penalizes or not history:
            yield logits
            return
        seen = np.unique(np.asarray(history[-self._window(history) :], dtype=np.intp))
        seen = seen[: np.searchsorted(seen, len(logits))]  # a draft's vocabulary may lack the target's last tokens
        before = logits[seen]
        # a division would make the token of a negative logit more likely
        penalty = self.config.repeat_penalty
        try:
            logits[seen] = np.where(before <= 0, before * penalty, before / penalty)
            yield logits
        finally:
            logits[seen] = before


def _below(values: FloatRow, best: float) -> NDArray[np.float64]:
    """How far each value is below the largest one, float64 and at most 0."""
    return values.astype(np.float64) - best


def _sum_of_exp(values: FloatRow, best: float) -> float:
    """The sum of exp(value - best), its terms in float32 as llama.cpp has them: float64 takes several times as long."""
    terms = values - best
    return float(np.exp(terms, out=terms).sum(dtype=np.float64))


def _column_maxima(values: FloatRow) -> FloatRow:
    """The largest value of each column of the vocabulary in `_ROWS` rows; what fills no row follows. NaN where one is.

    Neighbours are in neighbouring columns, so that vector instructions compare them.
    """
    n = len(values) // _ROWS
    maxima: FloatRow = values[: n * _ROWS].reshape(_ROWS, n).max(axis=0)
    return maxima if len(values) == n * _ROWS else np.concatenate((maxima, values[n * _ROWS :]))


def _at_least(values: FloatRow, maxima: FloatRow, least: float) -> NDArray[np.intp]:
    """Ascending indices of the values >= `least`, which only the columns hold whose maximum reaches it."""
    places = np.flatnonzero(maxima >= least)
    if len(places) > len(maxima) // 4:
        return np.flatnonzero(values >= least)
    n = len(values) // _ROWS
    columns = places[: np.searchsorted(places, n)]
    ids = (np.arange(_ROWS)[:, None] * n + columns).ravel()
    found: NDArray[np.intp] = ids[values[ids] >= least]
    if len(columns) == len(places):
        return found
    return np.concatenate((found, places[len(columns) :] + n * (_ROWS - 1)))


def _largest(values: FloatRow, maxima: FloatRow, k: int) -> NDArray[np.intp]:
    """Indices of the `k` largest values, descending, the lower index first among equals; of all if there are fewer."""
    # the maxima are values themselves: the k-th largest of them is a lower bound of the k-th largest value
    known = maxima if len(maxima) > k else values
    if len(known) <= k:
        return _descending(values, np.arange(len(values)))
    return _descending(values, _at_least(values, maxima, np.partition(known, -k)[-k]))[:k]


def _descending(values: FloatRow, ids: NDArray[np.intp]) -> NDArray[np.intp]:
    order: NDArray[np.intp] = np.argsort(-values[ids], kind="stable")
    return ids[order]
