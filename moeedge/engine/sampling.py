"""Which token comes next: llama.cpp's default chain of filters, and exact rejection sampling for drafts.

The chain is penalties -> top-k -> top-p -> min-p -> temperature -> draw. Distributions are kept as short candidate
lists (ids and probabilities); only `distribution` and `verify` spread them over the whole vocabulary.

Rejection sampling: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023,
algorithm 1. The tokens that come out are distributed as if the target alone had drawn them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.types import SamplingConfig
from moeedge.errors import EngineError

_BLOCK = 256  # vocabulary entries per block of the top-k search
_TOP_P_HEAD = 1024  # candidates that top-p looks at before it sorts the whole vocabulary
FloatRow = NDArray[np.float32]  # [n_vocab]


@dataclass(frozen=True)
class Candidates:
    """A distribution over the tokens that a filter chain left."""

    ids: NDArray[np.intp]  # [n]
    probabilities: NDArray[np.float64]  # [n], sums to 1

    @classmethod
    def certain(cls, token: int) -> Candidates:
        """All probability on one token: what a greedy or deterministic proposal is."""
        return cls(np.array([token], dtype=np.intp), np.ones(1))

    def probability_of(self, token: int) -> float:
        return float(self.probabilities[self.ids == token].sum())

    def dense(self, n_vocab: int) -> NDArray[np.float64]:
        """The same distribution as float64 [n_vocab]."""
        row = np.zeros(n_vocab)
        row[self.ids] = self.probabilities
        return row


class Sampler:
    """Draws tokens by one configuration from one seeded stream of random numbers.

    Target and draft of one answer share a sampler, so that the same filters apply to both.
    """

    def __init__(self, config: SamplingConfig, n_vocab: int) -> None:
        self.config = config
        self.n_vocab = n_vocab
        self.seed = secrets.randbits(32) if config.seed is None else config.seed
        self.greedy = config.temperature == 0
        self._rng = np.random.Generator(np.random.PCG64(self.seed % 2**64))
        self._penalizes = config.repeat_penalty != 1.0 and config.repeat_last_n != 0
        self._scratch = np.zeros(n_vocab)

    def candidates(self, logits: FloatRow, history: Sequence[int]) -> Candidates:
        """What is left of `logits` [n_vocab] after the chain; `history` is every token before this position."""
        if self.greedy:
            return Candidates.certain(self.argmax(logits, history))
        config = self.config
        values = self._penalized(logits, history)
        best = float(values.max())
        if not math.isfinite(best):
            raise EngineError("The model computed logits that are not finite.", "Its file may be damaged.")
        ids, total = self._head(values, best)
        kept = values[ids].astype(np.float64) - best
        if config.top_p < 1:
            n = int(np.searchsorted(np.cumsum(np.exp(kept)), config.top_p * total)) + 1
            ids, kept = ids[:n], kept[:n]
        if config.min_p > 0:
            n = int(np.count_nonzero(kept >= math.log(config.min_p)))
            ids, kept = ids[:n], kept[:n]
        weights = np.exp(kept / config.temperature)
        return Candidates(ids, weights / weights.sum())

    def _head(self, values: FloatRow, best: float) -> tuple[NDArray[np.intp], float]:
        """The ids that top-k leaves, descending, and the sum of their exp(value - best).

        Without top-k over a large vocabulary, ids that top-p or min-p will drop anyway may already be missing (their
        weight is in the sum); without any filter the order is that of the vocabulary.
        """
        config = self.config
        if 0 < config.top_k < len(values):
            ids = _largest(values, config.top_k)
            return ids, float(np.exp(values[ids].astype(np.float64) - best).sum())
        total = float(np.exp(values.astype(np.float64) - best).sum())
        if config.min_p > 0:
            return _descending(values, np.flatnonzero(values >= best + math.log(config.min_p))), total
        if config.top_p == 1:
            return np.arange(len(values)), total
        ids = _largest(values, _TOP_P_HEAD)
        if np.exp(values[ids].astype(np.float64) - best).sum() < config.top_p * total:
            ids = _largest(values, 0)
        return ids, total

    def argmax(self, logits: FloatRow, history: Sequence[int]) -> int:
        """The greedy choice, the lowest id among equals as in llama.cpp."""
        values = self._penalized(logits, history)
        token = int(values.argmax())
        if not np.isfinite(values[token]):
            raise EngineError("The model computed logits that are not finite.", "Its file may be damaged.")
        return token

    def distribution(self, logits: FloatRow, history: Sequence[int]) -> NDArray[np.float64]:
        """`candidates` as float64 [n_vocab]; one-hot when greedy."""
        return self.candidates(logits, history).dense(self.n_vocab)

    def draw(self, distribution: NDArray[np.float64]) -> int:
        """One token by `distribution` [n_vocab]."""
        return int(self._draw_index(distribution))

    def pick(self, candidates: Candidates) -> int:
        """One token by a candidate list."""
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
        """How many of `drafts` stand, and the token that follows them.

        `logits` [len(drafts) + 1, n_vocab] are the target's after the last token of `history` and after each draft;
        `proposals[i]` is the distribution that `drafts[i]` was drawn from. Each position is filtered with the history
        it would have had, earlier drafts included.
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
        """A copy of the part of `history` that the penalty looks at, to append to; a whole one may be long."""
        return list(history[-self._window(history) :]) if self._penalizes else []

    def verify(
        self, p_target: NDArray[np.float64], p_draft: NDArray[np.float64], drafts: Sequence[int]
    ) -> tuple[int, int]:
        """`accept` on whole distributions: p_target [n + 1, n_vocab], p_draft [n, n_vocab]."""
        for i, token in enumerate(drafts):
            replacement = self._reject(_sparse(p_target[i]), _sparse(p_draft[i]), token)
            if replacement is not None:
                return i, replacement
        return len(drafts), self.draw(p_target[len(drafts)])

    def _accept_greedy(self, logits: NDArray[np.float32], drafts: Sequence[int], seen: list[int]) -> tuple[int, int]:
        for i, token in enumerate(drafts):
            wanted = self.argmax(logits[i], seen)
            if wanted != token:
                return i, wanted
            seen.append(token)
        return len(drafts), self.argmax(logits[len(drafts)], seen)

    def _reject(self, target: Candidates, draft: Candidates, token: int) -> int | None:
        """None: `token` stands with probability min(1, p/q). Else a token drawn from the residual max(0, p - q)."""
        p = target.probability_of(token)
        q = draft.probability_of(token)
        if self._rng.random() * q < p:
            return None
        self._scratch[draft.ids] = draft.probabilities
        residual = np.maximum(target.probabilities - self._scratch[target.ids], 0.0)
        self._scratch[draft.ids] = 0.0
        if residual.sum() <= 0:  # p and q differ by rounding only
            return self.pick(target)
        return int(target.ids[self._draw_index(residual)])

    def _draw_index(self, weights: NDArray[np.float64]) -> int:
        """An index with probability proportional to its weight, never one of weight 0."""
        cumulated = np.cumsum(weights)
        index = int(np.searchsorted(cumulated, self._rng.random() * cumulated[-1], side="right"))
        return min(index, len(cumulated) - 1)

    def _window(self, history: Sequence[int]) -> int:
        """Tokens that the penalty looks at; -1 means the whole history, as in llama.cpp."""
        last_n = self.config.repeat_last_n
        return len(history) if last_n < 0 else last_n

    def _penalized(self, logits: FloatRow, history: Sequence[int]) -> FloatRow:
        if not self._penalizes or not history:
            return logits
        seen = np.unique(np.asarray(history[-self._window(history) :], dtype=np.int64))
        values: FloatRow = logits.copy()
        # dividing a negative logit would make the token likelier
        values[seen] = np.where(
            values[seen] <= 0, values[seen] * self.config.repeat_penalty, values[seen] / self.config.repeat_penalty
        )
        return values


def _largest(values: FloatRow, k: int) -> NDArray[np.intp]:
    """Indices of the `k` largest values (0: all), descending, the lower index first among equals."""
    if not 0 < k < len(values):
        return _descending(values, np.arange(len(values)))
    blocks = len(values) // _BLOCK
    if blocks > k:
        # each of the k largest block maxima is a value, so the k-th of them bounds the k-th value from below
        maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        ids = np.flatnonzero(values >= np.partition(maxima, -k)[-k])
    else:
        ids = np.flatnonzero(values >= np.partition(values, -k)[-k])
    return _descending(values, ids)[:k]


def _descending(values: FloatRow, ids: NDArray[np.intp]) -> NDArray[np.intp]:
    order: NDArray[np.intp] = np.argsort(-values[ids], kind="stable")
    return ids[order]


def _sparse(row: NDArray[np.float64]) -> Candidates:
    ids = np.flatnonzero(row)
    return Candidates(ids, row[ids])
