"""An LRU cache of experts per layer with guesses brought ahead: what Mixtral-Offloading, AdapMoE and SP-MoE share.

Policy mixtral-offloading: an LRU cache of k experts per layer, misses loaded on demand, and two guesses ahead.

Eliseev & Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading" (arXiv 2312.17238). The k most
recently used experts of each layer are kept, k the same for all layers (repository dvmazur/mixtral-offloading,
src/expert_cache.py: an eviction group per layer, least recently used first). Speculative loading: when the experts of a
layer are loaded, the next layer's gate is applied to this layer's input and the 1 or 2 likeliest of its experts are
brought; that part is in the paper alone, whose text was not at hand. All is computed on the GPU.

In the paper a guess waits in a buffer and takes a place of the cache only when it is used; here it takes the place of
the layer's least recently used expert at once, and is the next to go where it was wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.lru import Recency
from moeedge.policies.per_layer import PerLayerPlanner, layers_after, predicted_counts

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class LayerLru(ABC):
    """Score: the number of the token that used the expert last; what is guessed is used next, so it comes first."""

    _touches = False  # whether an expert brought ahead counts as used

    def __init__(self, shape: CacheShape, config: PolicyConfig, shares: NDArray[np.intp] | None = None) -> None:
        cells = (shape.n_layers, shape.n_experts)
        self.shape = shape
        self._planner = PerLayerPlanner(shape, config.cap, shares)
        self._recency = Recency(*cells)
        self._utility: FloatArray = np.zeros(cells, dtype=np.float32)
        self._score: FloatArray = np.zeros(cells, dtype=np.float32)
        self._layers = np.arange(shape.n_layers)

    def observe(self, observation: Observation) -> None:
        """Notes what was used."""
        self._recency.observe(observation)
        np.copyto(self._utility, self._recency.used)

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """What was used last stays; of what is foretold, as much of each layer as the system brings ahead."""
        recency, planner = self._recency, self._planner
        if hints is None:
            keep = planner.best(recency.last, resident, recency.used)
            return planner.plan(keep, recency.last, self._utility, resident)
        counts = predicted_counts(hints, self.shape)
        score, coming = self._ahead(counts, self.wanted(counts, resident), resident)
        keep = planner.best(score, resident, coming | recency.used)
        return planner.plan(keep, score, self._utility, resident)

    def plan_layer(self, layer: int, resident: Resident, hints: ExpertPrediction | None = None) -> Plan:
        """What comes for the next layer with experts while this one is computed; all others stay as they are."""
        none: FloatArray = np.zeros(self._utility.shape, dtype=np.float32)
        counts = none if hints is None else predicted_counts(hints, self.shape)
        score, coming = self._ahead(counts, self.wanted(counts, resident), resident)
        keep = self._planner.best(score, resident, coming)
        others = ~np.isin(self._layers, layers_after(self.shape, layer))
        keep[others] = resident[others] != 0
        return self._planner.plan(keep, score, self._utility, resident)

    def reset(self) -> None:  # noqa: B027 - there is nothing to forget
        """What was used last was used last in this conversation, too."""

    @abstractmethod
    def wanted(self, counts: FloatArray, resident: Resident) -> BoolArray:
        """The cells to have ahead [n_layers, n_experts]; `counts`: how many tokens will use each, as foretold."""

    def _ahead(self, counts: FloatArray, wanted: BoolArray, resident: Resident) -> tuple[FloatArray, BoolArray]:
        """Scores with what is wanted in front, and what of it is absent."""
        recency = self._recency
        out = recency.last if self._touches else self._score
        return recency.ahead(counts, wanted, out), wanted & (resident == 0)


def likeliest(counts: FloatArray, n: int) -> BoolArray:
    """The n experts of each layer that most tokens want, [n_layers, n_experts]; the lower number first."""
    best = np.argsort(-counts, axis=1, kind="stable")[:, : min(n, counts.shape[1])]
    chosen = np.zeros(counts.shape, dtype=np.bool_)
    np.put_along_axis(chosen, best, True, axis=1)
    return chosen & (counts > 0.0)


_GUESSES = 2  # experts per layer


class MixtralOffloading(LayerLru):
    """The likeliest two, whether they are there or not."""

    name = "mixtral-offloading"
    execution_model = ExecutionModel(
        device_only=True, per_layer_slots=True, prefetch_within_step=True, speculation=False
    )
    required_inputs = frozenset({"block-inputs"})

    def wanted(self, counts: NDArray[np.float32], resident: Resident) -> NDArray[np.bool_]:
        """See the module."""
        return likeliest(counts, _GUESSES)
