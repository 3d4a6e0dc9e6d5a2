"""Synthetic routing: which experts the tokens of a text pick, for models of which no trace is at hand (seeded).

Every layer gives each expert a score per token, and the k best are picked. The score is a sum of four Gaussian terms:

  popularity  drawn once: some experts are used more than others
  topic       drifts slowly (memory of `topic_tokens` tokens): what the text is about
  phrase      drifts fast (`phrase_tokens`): neighbouring tokens share experts
  token       fresh for every token, of variance 1

The three variances and two memories are fitted to what is published of a model: distinct experts over B consecutive
tokens and the overlap of adjacent tokens (sim/data/models.json says to what and how well).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Variances in units of the token's own, memories in tokens."""

    popularity: float
    topic: float
    topic_tokens: float
    phrase: float
    phrase_tokens: float

    def __post_init__(self) -> None:
        if min(self.popularity, self.topic, self.phrase) < 0:
            raise ValueError("variances must be >= 0")
        if min(self.topic_tokens, self.phrase_tokens) <= 0:
            raise ValueError("memories must be > 0 tokens")

    def draw(
        self, n_layers: int, n_experts: int, k: int, lengths: list[int], rng: np.random.Generator
    ) -> list[NDArray[np.int32]]:
        """Texts of the given lengths, ids [T, n_layers, k] each, the best first; popularity is common to all texts."""
        cells = (n_layers, n_experts)
        popular = math.sqrt(self.popularity) * rng.standard_normal(cells, dtype=np.float32)
        return [self._text(popular, k, length, rng) for length in lengths]

    def _text(self, popular: NDArray[np.float32], k: int, n_tokens: int, rng: np.random.Generator) -> NDArray[np.int32]:
        terms = [(self.topic, self.topic_tokens), (self.phrase, self.phrase_tokens)]
        states = [rng.standard_normal(popular.shape, dtype=np.float32) for _ in terms]
        ids = np.empty((n_tokens, popular.shape[0], k), dtype=np.int32)
        for token in range(n_tokens):
            score = popular + rng.standard_normal(popular.shape, dtype=np.float32)
            for index, (variance, memory) in enumerate(terms):
                kept = math.exp(-1.0 / memory)
                fresh = rng.standard_normal(popular.shape, dtype=np.float32)
                states[index] = np.float32(kept) * states[index] + np.float32(math.sqrt(1 - kept * kept)) * fresh
                score += np.float32(math.sqrt(variance)) * states[index]
            best = np.argpartition(score, -k, axis=1)[:, -k:]
            order = np.argsort(-np.take_along_axis(score, best, axis=1), axis=1, kind="stable")
            ids[token] = np.take_along_axis(best, order, axis=1)
        return ids


def unique_experts(ids: NDArray[np.int32], n_tokens: int) -> float:
    """Mean distinct experts per layer over windows of `n_tokens` consecutive tokens of ids [T, n_layers, k]."""
    starts = range(0, len(ids) - n_tokens + 1, n_tokens)
    counts = []
    for start in starts:
        window = np.sort(ids[start : start + n_tokens].transpose(1, 0, 2).reshape(ids.shape[1], -1), axis=1)
        counts.append(1 + np.count_nonzero(np.diff(window, axis=1), axis=1).mean())
    return float(np.mean(counts))
