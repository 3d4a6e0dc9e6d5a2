"""Policy adapmoe: LRU per layer with slots allocated by how well each layer is foretold, and one expert ahead.

AdapMoE (Zhong et al., ICCAD 2024, arXiv 2408.10284), by its repository (PKU-SEC-Lab/AdapMoE) and SP-MoE's account of
it; the paper's text was not at hand:
- prefetch: the next layer's gate on this layer's input names its experts; the first that is absent is brought while
  this layer computes, one expert at a time (src/custom_layers.py, SparseMoeWrapper.forward, for a
  single token there, for all of a batch here; SP-MoE, section 3.3).
- cache: LRU per layer (src/expert_cache.py, EvictionGroupInfo); the layers' sizes minimise the expected loads on
  demand by dynamic programming over the layers' prediction accuracies (src/dp.py).
- the adaptive gating, which leaves out experts of insensitive tokens, changes what the model says. It is left out
  here: every policy leaves the output as it is.

The accuracies are measured offline in the paper; here during the first steps that bring predictions, after which the
sizes are set once. The expected loads of a layer that holds c of n experts, of which a token uses k, prediction right
with probability a: k * (1 - c/n) are absent in the mean, of which one comes ahead where it was foretold and any is
absent at all: k * (1 - c/n) - a * (1 - P(all k are there)). For k = 2 these are dp.py's terms summed up (without its
gating). It is convex in c, so the slots are given away one by one to the layer that gains most, which is what the
dynamic programming finds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.layer_lru import LayerLru, likeliest
from moeedge.policies.per_layer import PerLayerPlanner, layers_after, predicted_counts

_N_MEASURED = 16  # steps


class AdapMoe(LayerLru):
    """The likeliest of each layer that is absent."""

    name = "adapmoe"
    execution_model = ExecutionModel(device_only=True, per_layer_slots=True, prefetch_within_step=True)
    required_inputs = frozenset({"block-inputs"})

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._cap = config.cap
        self._foretold: NDArray[np.float32] | None = None  # of the step to come, in tokens
        self._right = np.zeros(shape.n_layers)
        self._said = np.zeros(shape.n_layers)
        self._n_left = _N_MEASURED

    def observe(self, observation: Observation) -> None:
        """Notes what was used, and during the first steps how right the predictions were."""
        super().observe(observation)
        if self._foretold is not None and not observation.prefill and self._n_left > 0:
            self._right += np.minimum(self._foretold, observation.counts).sum(axis=1)
            self._said += self._foretold.sum(axis=1)
            self._n_left -= 1
            if self._n_left == 0:
                self._allocate(float(observation.counts.sum()) / max(observation.n_tokens, 1))
        self._foretold = None

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """As the cache of its kind, and remembers the prediction."""
        self._remember(hints, self._layers)
        return super().plan(resident, upcoming, hints)

    def plan_layer(self, layer: int, resident: Resident, hints: ExpertPrediction | None = None) -> Plan:
        """The next layer's expert."""
        self._remember(hints, layers_after(self.shape, layer))
        return super().plan_layer(layer, resident, hints)

    def wanted(self, counts: NDArray[np.float32], resident: Resident) -> NDArray[np.bool_]:
        """See the module."""
        return likeliest(np.where(resident == 0, counts, np.float32(0.0)), 1)

    def _remember(self, hints: ExpertPrediction | None, layers: NDArray[np.intp]) -> None:
        """What is foretold for these layers; of the others of the step what was said before stays."""
        if hints is not None and self._n_left > 0:
            if self._foretold is None:
                self._foretold = np.zeros(self._utility.shape, dtype=np.float32)
            self._foretold[layers] = predicted_counts(hints, self.shape)[layers]

    def _allocate(self, pairs_per_token: float) -> None:
        """Slots of each layer by the accuracies measured."""
        n_layers = max(int(np.count_nonzero(self.shape.group >= 0)), 1)
        n_used = min(max(round(pairs_per_token / n_layers), 1), self.shape.n_experts)
        accuracy = self._right / np.maximum(self._said, 1.0)
        self._planner = PerLayerPlanner(self.shape, self._cap, allocate(self.shape, accuracy, n_used))


def allocate(shape: CacheShape, accuracy: NDArray[np.float64], n_used: int) -> NDArray[np.intp]:
    """Slots of each layer [n_layers] that minimise the expected loads on demand.

    accuracy  [n_layers], of the prediction for each layer
    n_used    experts per token
    """
    loads = expected_loads(shape.n_experts, accuracy, n_used)
    gain = -np.diff(loads, axis=1)  # of the c-th slot of each layer
    shares = np.zeros(shape.n_layers, dtype=np.intp)
    for group, capacity in enumerate(shape.capacity.tolist()):
        layers = np.flatnonzero(shape.group == group)
        if layers.size:
            best = np.argsort(-gain[layers].T.reshape(-1), kind="stable")[:capacity]  # ties: one slot for each layer
            shares[layers] = np.bincount(best % layers.size, minlength=layers.size)
    return shares


def expected_loads(n_experts: int, accuracy: NDArray[np.float64], n_used: int) -> NDArray[np.float64]:
    """Loads on demand per token of a layer that holds 0..n_experts experts, [n_layers, n_experts + 1]."""
    held = np.arange(n_experts + 1)
    there = np.ones(n_experts + 1)  # the chance that all that a token uses are there
    for used in range(n_used):
        there *= np.maximum(held - used, 0) / max(n_experts - used, 1)
    absent = n_used * (1.0 - held / n_experts)
    return np.asarray(absent[None, :] - accuracy[:, None] * (1.0 - there)[None, :])
