"""Predictions of a stated accuracy, in place of those from hidden states, which traces lack.

Each (token, layer, slot) of a batch is right with a stated probability (docs/lab/traces.md, Replay). A wrong one is an
expert drawn by popularity among the layer's experts, which by chance may be one of the token's. Predictions are seeded,
and the same for every policy and cache ratio.

  draft-router  SP-MoE: the draft's attention outputs through the target's routers. The draft never computes the last
                draft of a batch: it has no prediction.
  next-gate     Fate, AdapMoE, HybriMoE: the next layer's router on this layer's input. The first layer with experts
                has no prediction; n layers ahead the accuracy is that of one to the power of n.

The replay, which has no time, reads a draft's predictions for a batch at once, and those of gates layer by layer. The
simulator reveals them as time goes by, and draws wrong experts by the popularity so far (`learn`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import require
from moeedge.policies.base import ExpertPrediction

PredictionSource = Literal["draft-router", "next-gate"]
_INPUTS: dict[PredictionSource, str] = {"draft-router": "draft-inputs", "next-gate": "block-inputs"}


@dataclass(frozen=True, kw_only=True)
class PredictorAccuracy:
    """Probability that a predicted expert is right; None: no such predictor, its policies go by their caches alone."""

    draft_router: float | None = 0.88
    next_gate: float | None = 0.80  # one layer ahead
    reach: int = 3  # layers ahead that a gate looks; 0: none
    critical: int | None = None  # experts per token and layer that the draft names; None: all that a token uses

    def __post_init__(self) -> None:
        for name in ("draft_router", "next_gate"):
            accuracy = getattr(self, name)
            require(accuracy is None or 0 <= accuracy <= 1, f"the accuracy {name} must be in [0, 1], not {accuracy}")
        require(self.reach >= 0, f"the reach must be >= 0, not {self.reach}")

    def of(self, source: PredictionSource) -> float | None:
        """The accuracy of one source."""
        return self.draft_router if source == "draft-router" else self.next_gate

    def source_for(self, required_inputs: frozenset[str]) -> PredictionSource | None:
        """The source that serves a policy with these inputs; the draft's, if it reads both. None: none does."""
        wanted = next((source for source, name in _INPUTS.items() if name in required_inputs), None)
        return wanted if wanted is not None and self.of(wanted) is not None else None


NO_PREDICTOR = PredictorAccuracy(draft_router=None, next_gate=None)


@dataclass(frozen=True, eq=False)
class BatchPredictions:
    """What is predicted of one batch; arrays [n_layers, n_tokens, k]."""

    accuracy: PredictorAccuracy
    ids: NDArray[np.int32]  # that the batch uses, -1: not recorded
    wrong: NDArray[np.int32]  # what takes their place where the luck is not below the accuracy
    luck: NDArray[np.float64]

    def of_draft(self, n_tokens: int, share: float = 1.0) -> ExpertPrediction | None:
        """The draft's predictions for the first `n_tokens` tokens, for the last of them a share of the layers."""
        if self.accuracy.draft_router is None:
            return None
        ids = self._mixed(slice(None), self.accuracy.draft_router)
        ids[:, n_tokens:] = -1
        ids[round(share * len(ids)) :, n_tokens - 1] = -1
        if self.accuracy.critical is not None:
            ids[:, :, self.accuracy.critical :] = -1
        return ExpertPrediction(ids)

    def of_gates(self, layer: int) -> ExpertPrediction | None:
        """The predictions from the input of `layer` for the next layers with experts."""
        if self.accuracy.next_gate is None:
            return None
        ids = np.full_like(self.ids, -1)
        for ahead, later in enumerate(self._routed[self._routed > layer][: self.accuracy.reach].tolist(), start=1):
            ids[later] = self._mixed(later, self.accuracy.next_gate**ahead)
        return ExpertPrediction(ids)

    @cached_property
    def _routed(self) -> NDArray[np.intp]:
        return np.flatnonzero((self.ids >= 0).any(axis=(1, 2)))

    def _mixed(self, layers: slice | int, accuracy: float) -> NDArray[np.int32]:
        ids = self.ids[layers]
        return np.where((self.luck[layers] < accuracy) | (ids < 0), ids, self.wrong[layers]).astype(np.int32)


class NoisyPredictor:
    """Predicts the experts of batches with a stated accuracy.

    popularity: float64 [n_layers, n_experts], activations that wrong experts are drawn by: those of the entire
    schedule for a replay, ones for a simulation, which adds what it has seen (`learn`).
    """

    def __init__(self, popularity: NDArray[np.float64], accuracy: PredictorAccuracy, seed: int) -> None:
        self._popularity = popularity.copy()
        self._accuracy = accuracy
        self._rng = np.random.default_rng(seed)

    def predict(self, ids: NDArray[np.int32]) -> BatchPredictions:
        """The predictions for a batch that uses the experts int32 [n_layers, n_tokens, k], -1: not recorded."""
        luck = self._rng.random(ids.shape)
        cumulative = np.cumsum(self._popularity, axis=1)
        drawn = self._rng.random(ids.shape) * cumulative[:, -1][:, None, None]
        wrong = np.stack([np.searchsorted(*layer) for layer in zip(cumulative, drawn, strict=True)])
        last = self._popularity.shape[1] - 1
        return BatchPredictions(self._accuracy, ids, np.minimum(wrong, last).astype(np.int32), luck)

    def learn(self, counts: NDArray[np.int32]) -> None:
        """Adds the activations of a batch, [n_layers, n_experts], to the popularity."""
        self._popularity += counts
