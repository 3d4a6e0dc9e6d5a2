"""An LRU cache of experts per layer with prefetch, which Mixtral-Offloading, AdapMoE and SP-MoE share.

Policy mixtral-offloading: Eliseev & Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading"
(arXiv 2312.17238). Each layer keeps its k most recently used experts, k the same for all layers (repository
dvmazur/mixtral-offloading, src/expert_cache.py: an eviction group per layer, least recently used first). Speculative
loading: when a layer's experts are loaded, the next layer's gate is applied to this layer's input and the 1 or 2 most
likely of its experts are loaded; that part is in the paper alone, whose text was not at hand. Misses are loaded on
demand, and the GPU computes everything.

In the paper a prefetched expert waits in a buffer and enters the cache only when it is used. Here it replaces the
layer's least recently used expert at once, and is the next victim if the prediction was wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from moeedge.policies.base import (
    BoolArray,
    CacheShape,
    ExecutionModel,
    ExpertPrediction,
    FloatArray,
    IndexArray,
    Observation,
    Plan,
    PolicyConfig,
    Resident,
)
from moeedge.policies.lru import Recency
from moeedge.policies.per_layer import PerLayerPolicy, layers_after, predicted_counts

_GUESSES = 2  # experts per layer that mixtral-offloading prefetches


class LayerLru(PerLayerPolicy, ABC):
    """Score: the number of the token that used the expert last; prefetched experts rank as used next."""

    prefetch_is_use = False  # whether a prefetched expert keeps its rank if it is not used

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._recency = Recency(shape.n_layers, shape.n_experts)

    def observe(self, observation: Observation) -> None:
        """Takes in which experts a step used."""
        self._recency.observe(observation)
        np.copyto(self._utility, self._recency.used)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold each layer's most recently used experts and, with a prediction, the prefetched ones."""
        recency = self._recency
        if prediction is None:
            return self._plan(recency.last, resident, recency.used, staged=recency.used)
        self.read_prediction(prediction, self._layers)
        score, missing = self._ahead(prediction, resident)
        return self._plan(score, resident, missing | recency.used, staged=recency.used)

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        """Plans prefetches for the next layer with experts; the other layers stay as they are."""
        reached = layers_after(self.shape, layer)
        if prediction is not None:
            self.read_prediction(prediction, reached)
        score, missing = self._ahead(prediction, resident)
        return self._plan(score, resident, missing, only=reached)

    def read_prediction(self, prediction: ExpertPrediction, layers: IndexArray) -> None:
        """Learns from a prediction for `layers`, before the plan that follows it."""

    @abstractmethod
    def prefetched(self, counts: FloatArray, resident: Resident) -> BoolArray:
        """Experts to prefetch or keep, bool [n_layers, n_experts]; counts: tokens predicted to use each."""

    def _ahead(self, prediction: ExpertPrediction | None, resident: Resident) -> tuple[FloatArray, BoolArray]:
        """Scores with the prefetched experts first, and which of these are absent."""
        counts = predicted_counts(prediction, self.shape)
        chosen = self.prefetched(counts, resident)
        out = self._recency.last if self.prefetch_is_use else self._score
        return self._recency.ahead(counts, chosen, out), chosen & (resident == 0)


def most_likely(counts: FloatArray, n: int) -> BoolArray:
    """The n experts of each layer with the highest `counts` > 0, bool [n_layers, n_experts]; ties: the lower number."""
    best: IndexArray = np.argsort(-counts, axis=1, kind="stable")[:, : min(n, counts.shape[1])]
    chosen = np.zeros(counts.shape, dtype=np.bool_)
    np.put_along_axis(chosen, best, True, axis=1)
    return chosen & (counts > 0.0)


class MixtralOffloading(LayerLru):
    """Prefetches the two most likely experts of the next layer."""

    name = "mixtral-offloading"
    execution_model = ExecutionModel(
        device_only=True, per_layer_slots=True, prefetch_within_step=True, speculation=False
    )
    required_inputs = frozenset({"block-inputs"})

    def prefetched(self, counts: FloatArray, resident: Resident) -> BoolArray:
        """The most likely experts, resident or not."""
        return most_likely(counts, _GUESSES)
