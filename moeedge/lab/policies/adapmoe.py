"""Policy adapmoe: LRU per layer with slots allocated by prediction accuracy, and prefetch of one expert per layer.

AdapMoE (Zhong et al., ICCAD 2024, arXiv 2408.10284), by its repository (PKU-SEC-Lab/AdapMoE) and SP-MoE's account of
it; the paper's text was not at hand:
- prefetch: the next layer's gate, applied to this layer's input, predicts its experts; the first one that is absent is
  loaded while this layer computes (src/custom_layers.py, SparseMoeWrapper.forward, for one token; here for all tokens
  of a batch; SP-MoE, section 3.3).
- cache: LRU per layer (src/expert_cache.py, EvictionGroupInfo); the layers' sizes minimise the expected loads on
  demand by dynamic programming over the layers' prediction accuracies (src/dp.py).
- adaptive gating, which leaves out experts of insensitive tokens, changes the model's output. It is left out here, as
  every policy leaves the output as it is.

The paper measures the accuracies offline. Here they are measured during the first steps with predictions, after which
the sizes are set once. Expected loads of a layer that holds c of n experts, of which a token uses k, with prediction
accuracy a: k * (1 - c/n) are absent on average, and one of them is prefetched if it was predicted and any is absent at
all: k * (1 - c/n) - a * (1 - P(all k are resident)). For k = 2 this is the sum of dp.py's terms (without its gating).
It is convex in c, so giving the slots one by one to the layer that gains most finds the optimum of the dynamic program.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.lab.policies.layer_lru import LayerLru, most_likely
from moeedge.policies.base import (
    BoolArray,
    CacheShape,
    ExecutionModel,
    ExpertPrediction,
    FloatArray,
    IndexArray,
    Observation,
    PolicyConfig,
    Resident,
)
from moeedge.policies.per_layer import PerLayerPlanner, predicted_counts

_N_MEASURED = 16  # steps


class AdapMoe(LayerLru):
    """Prefetches each layer's most likely expert that is absent."""

    name = "adapmoe"
    execution_model = ExecutionModel(device_only=True, per_layer_slots=True, prefetch_within_step=True)
    required_inputs = frozenset({"block-inputs"})

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._cap = config.cap
        self._predicted: FloatArray | None = None  # [n_layers, n_experts], tokens of the step to come
        self._n_right = np.zeros(shape.n_layers)  # predicted pairs that came true
        self._n_predicted = np.zeros(shape.n_layers)
        self._steps_left = _N_MEASURED

    def observe(self, observation: Observation) -> None:
        """Takes in which experts a step used, and during the first steps the accuracy of the predictions."""
        super().observe(observation)
        if self._predicted is not None and not observation.prefill and self._steps_left > 0:
            self._n_right += np.minimum(self._predicted, observation.counts).sum(axis=1)
            self._n_predicted += self._predicted.sum(axis=1)
            self._steps_left -= 1
            if self._steps_left == 0:
                self._allocate(float(observation.counts.sum()) / max(observation.n_tokens, 1))
        self._predicted = None

    def prefetched(self, counts: FloatArray, resident: Resident) -> BoolArray:
        """The most likely expert of those that are absent."""
        return most_likely(np.where(resident == 0, counts, np.float32(0.0)), 1)

    def read_prediction(self, prediction: ExpertPrediction, layers: IndexArray) -> None:
        """During the first steps records the prediction, to measure its accuracy."""
        if self._steps_left > 0:
            if self._predicted is None:
                self._predicted = np.zeros(self._utility.shape, dtype=np.float32)
            self._predicted[layers] = predicted_counts(prediction, self.shape)[layers]

    def _allocate(self, pairs_per_token: float) -> None:
        """Sets the layers' slots by the measured accuracies."""
        n_layers = max(self.shape.expert_layers.size, 1)
        n_used = min(max(round(pairs_per_token / n_layers), 1), self.shape.n_experts)
        accuracy = self._n_right / np.maximum(self._n_predicted, 1.0)
        self._planner = PerLayerPlanner(self.shape, self._cap, allocate(self.shape, accuracy, n_used))


def allocate(shape: CacheShape, accuracy: NDArray[np.float64], n_used: int) -> IndexArray:
    """Slots of each layer [n_layers] that minimise the expected loads on demand.

    accuracy  [n_layers] of the predictions for each layer
    n_used    experts per token
    """
    loads = expected_loads(shape.n_experts, accuracy, n_used)
    gain = -np.diff(loads, axis=1)  # of the c-th slot of each layer
    shares = np.zeros(shape.n_layers, dtype=np.intp)
    for layers, capacity in shape.pools():
        best = np.argsort(-gain[layers].T.reshape(-1), kind="stable")[:capacity]  # ties: one slot for each layer
        shares[layers] = np.bincount(best % layers.size, minlength=layers.size)
    return shares


def expected_loads(n_experts: int, accuracy: NDArray[np.float64], n_used: int) -> NDArray[np.float64]:
    """Loads on demand per token of layers that hold 0..n_experts experts, [n_layers, n_experts + 1]."""
    held = np.arange(n_experts + 1)
    all_resident = np.ones(n_experts + 1)  # probability that all experts of a token are resident
    for used in range(n_used):
        all_resident *= np.maximum(held - used, 0) / max(n_experts - used, 1)
    absent = n_used * (1.0 - held / n_experts)
    return np.asarray(absent[None, :] - accuracy[:, None] * (1.0 - all_resident)[None, :])
