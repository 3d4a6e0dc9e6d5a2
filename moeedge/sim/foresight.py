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
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moeedge.scheduler.policy import Hints
from moeedge.sim.windows import Chunk
from moeedge.trace import Trace

ACCURACY: dict[str, float] = {"draft-router": 0.88, "next-gate": 0.80}
_SOURCE_OF = {"draft-inputs": "draft-router", "block-inputs": "next-gate"}  # by what policies need
_STREAM = {"draft-router": 1, "next-gate": 2}  # of random numbers


def source_of(needs: frozenset[str]) -> str | None:
    """Which stand-in serves a policy with these needs; the draft's, if it needs both."""
    return next((source for need, source in _SOURCE_OF.items() if need in needs), None)


class Foresight:
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

    def foretell(self, chunk: Chunk, source: str) -> list[Hints | None]:
        """Hints for each batch of the chunk; None for prompts."""
        rng = np.random.default_rng([self._seed, _STREAM[source], chunk.first])
        return [None if batch.prefill else self._hints(batch.ids, source, rng) for batch in chunk.batches]

    def _hints(self, ids: NDArray[np.int32], source: str, rng: np.random.Generator) -> Hints:
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
        return Hints(layer_ids=told, source=source)


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
