"""A stand-in for what layers' hidden states foretell: traces hold none, so a stated accuracy takes their place.

Each (token, layer, slot) of the next batch is foretold rightly with probability p; otherwise an expert drawn by the
popularity of the layer's experts over the whole trace stands there, which at times is one of the token's by chance.
Seeded, and the same for every policy and cache ratio.

  draft-router  SP-MoE: the draft's attention outputs through the target's routers. p = 0.88, the accuracy of the top
                expert that SP-MoE's Figure 7(b) gives ("88.94 % ... on average across layers" for DeepSeek-Lite, about
                88 % for Mixtral and Phi-3.5-MoE), taken for all slots, which favours the predictor. The last draft of a
                batch never went through the draft: nothing is known of it.
  next-gate     Fate, AdapMoE, HybriMoE: the next layer's router on this layer's input. p = 0.80: "Pre-Attention Expert
                Prediction" (arXiv 2511.10676) reports 93.0 to 97.6 % for its own predictors, about 15 points above
                Fate's. The first layer with experts has no layer before it: nothing is known of it.

The engine measures such accuracies on real models, and where it did, its figures should be given instead (`accuracy`).

The stand-in of moeedge.sim.foresight, as time goes by: what is foretold so far, token by token and layer by layer.

While the draft model works, its outputs say something of the tokens that it has read; while the target works, the
input of a layer says something of the layers behind it, the less the farther they are (a power of the accuracy). The
accuracies are those of foresight.py, with their sources; what is wrong is drawn by the popularity seen so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import ExpertPrediction
from moeedge.trace.format import Trace
from moeedge.trace.schedule import Chunk

ACCURACY: dict[str, float] = {"draft-router": 0.88, "next-gate": 0.80}
_SOURCE_OF = {"draft-inputs": "draft-router", "block-inputs": "next-gate"}  # by what policies need
_STREAM = {"draft-router": 1, "next-gate": 2}  # of random numbers


def source_of(required_inputs: frozenset[str]) -> str | None:
    """Which stand-in serves a policy with these needs; the draft's, if it needs both."""
    return next((source for need, source in _SOURCE_OF.items() if need in required_inputs), None)


class NoisyPredictor:
    """Foretells batches of a trace."""

    def __init__(self, trace: Trace, seed: int, accuracy: Mapping[str, float] | None = None) -> None:
        self.accuracy = ACCURACY | dict(accuracy or {})
        for source, share in self.accuracy.items():
            if not 0 <= share <= 1:
                raise ValueError(f"the accuracy of {source} must be in [0, 1], not {share}")
        self._seed = seed
        layers = trace.expert_layers()
        self._first_layer = layers[0] if layers else 0
        self._n_experts = trace.meta.n_experts
        self._cumulative = _cumulative(trace)

    def foretell(self, chunk: Chunk, source: str) -> list[ExpertPrediction | None]:
        """Hints for each batch of the chunk; None for prompts."""
        rng = np.random.default_rng([self._seed, _STREAM[source], chunk.first])
        return [None if batch.prefill else self._hints(batch.ids, source, rng) for batch in chunk.batches]

    def _hints(self, ids: NDArray[np.int32], source: str, rng: np.random.Generator) -> ExpertPrediction:
        drawn = rng.random(ids.shape, dtype=np.float32)
        share = np.float32(self.accuracy[source])
        wrong = drawn >= share
        # what is left of the draw is uniform again: one search over all layers, each a step of 1 above the one before
        rest = (drawn - share) / np.float32(max(1.0 - float(share), 1e-6))
        layer = np.broadcast_to(np.arange(ids.shape[0])[:, None, None], ids.shape)[wrong]
        found = np.searchsorted(self._cumulative, layer + rest[wrong], side="right")
        told = ids.copy()
        told[wrong] = np.minimum(found - layer * self._n_experts, self._n_experts - 1)
        told[ids < 0] = -1
        if source == "next-gate":
            told[self._first_layer] = -1
        elif ids.shape[1] > 1:
            told[:, -1] = -1
        return ExpertPrediction(layer_ids=told, source=source)


def _cumulative(trace: Trace) -> NDArray[np.float64]:
    """Cumulative popularity of the experts, layer after layer: [n_layers * n_experts], rising from 0 to n_layers."""
    n_experts = trace.meta.n_experts
    parts = []
    for layer in range(trace.meta.n_layers):
        ids = trace.ids[:, layer]
        counts = np.bincount(ids[ids != trace.sentinel], minlength=n_experts).astype(np.float64)
        total = counts.sum()
        share = counts / total if total else np.full(n_experts, 1.0 / n_experts)
        parts.append(layer + np.minimum(np.cumsum(share), 1.0))
    return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Probability that a predicted expert is right."""

    draft_router: float = ACCURACY["draft-router"]
    next_gate: float = ACCURACY["next-gate"]  # one layer ahead
    reach: int = 3  # layers ahead that a gate looks; 0: it is not asked
    critical: int | None = None  # experts per token and layer that the draft names; None: all that a token uses

    def __post_init__(self) -> None:
        if not (0 <= self.draft_router <= 1 and 0 <= self.next_gate <= 1 and self.reach >= 0):
            raise ValueError("an accuracy must be in [0, 1], and a reach >= 0")


class NoisyPredictorInTime:
    """Seeded; one per run."""

    def __init__(self, n_layers: int, n_experts: int, accuracy: Accuracy, seed: int) -> None:
        self._accuracy = accuracy
        self._rng = np.random.default_rng(seed)
        self._seen: NDArray[np.float64] = np.ones((n_layers, n_experts))
        self._n_experts = n_experts
        self._guess: NDArray[np.int32] = np.zeros((0, 0, 0), dtype=np.int32)
        self._luck: NDArray[np.float64] = np.zeros((0, 0, 0))
        self._ids: NDArray[np.int32] = np.zeros((0, 0, 0), dtype=np.int32)

    def begin(self, ids: NDArray[np.int32]) -> None:
        """The next verification's experts, [n_layers, n_tokens, k]: what will be foretold, more or less."""
        self._ids = ids
        self._luck = self._rng.random(ids.shape)
        cumulative = np.cumsum(self._seen, axis=1)
        drawn = self._rng.random(ids.shape) * cumulative[:, -1][:, None, None]
        guess = np.empty(ids.shape, dtype=np.int32)
        for layer in range(len(ids)):
            guess[layer] = np.searchsorted(cumulative[layer], drawn[layer])
        self._guess = np.minimum(guess, self._n_experts - 1)

    def learn(self, counts: NDArray[np.int32]) -> None:
        """What a verification used, [n_layers, n_experts]."""
        self._seen += counts

    def of_draft(self, n_tokens: int, share: float = 1.0) -> ExpertPrediction:
        """What the draft's outputs say of the first `n_tokens` tokens; of the last one for a share of the layers."""
        shown = self._mixed(self._accuracy.draft_router)
        shown[:, n_tokens:] = -1
        shown[round(share * len(shown)) :, n_tokens - 1] = -1
        if self._accuracy.critical is not None:
            shown[:, :, self._accuracy.critical :] = -1
        return ExpertPrediction(shown, "draft-router")

    def of_gates(self, layer: int) -> ExpertPrediction:
        """What the input of `layer` says of the next layers with experts behind it."""
        shown = np.full_like(self._ids, -1)
        routed = np.flatnonzero((self._ids >= 0).any(axis=(1, 2)))
        for ahead, behind in enumerate(routed[routed > layer][: self._accuracy.reach].tolist(), start=1):
            shown[behind] = self._mixed(self._accuracy.next_gate**ahead, behind)
        return ExpertPrediction(shown, "next-gate")

    def _mixed(self, accuracy: float, layer: int | None = None) -> NDArray[np.int32]:
        rows: slice | int = slice(None) if layer is None else layer
        ids, guess, luck = self._ids[rows], self._guess[rows], self._luck[rows]
        return np.where((luck < accuracy) | (ids < 0), ids, guess).astype(np.int32)
