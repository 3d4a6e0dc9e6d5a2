"""Policy sp-moe: the target's routers on the draft's attention outputs predict experts while drafting.

SP-MoE (section numbers of the paper):
- prediction, 3.2: for each draft token the k most likely experts of every layer are critical, k as many as the model
  uses per token (fewer for Mixtral, whose experts are large). The `ExpertPrediction` comes from "draft-inputs".
- cutoff layer, 3.2: only layers before it are prefetched. It is the deepest for which (1) the prefetched experts have
  room and (2) all of them arrive before drafting ends. The number of experts per layer, unknown in advance, is taken as
  k. The paper's evaluation drafts one token; with more, drafting lasts longer and more experts are critical: of gamma
  tokens as many as k random experts each make, N (1 - (1 - k/N)^gamma), or what the layer's slots hold. See
  `cutoff_layer`.
- cache, 4.4: a queue per layer, least recently used first; a prefetched expert moves to its end, so that it is not the
  next victim. A fixed number of slots per layer is reserved (3.2).
- execution, 3.3: a worker thread moves all experts of one layer as one batch, without pause; missing experts are loaded
  on demand at verification, and resident ones are computed first (4.3). Vanilla prefetch and single transfers are the
  ablations of Figure 12.
"""

from __future__ import annotations

from moeedge.lab.policies.layer_lru import LayerLru
from moeedge.policies.base import (
    BoolArray,
    CacheShape,
    ExecutionModel,
    ExpertPrediction,
    FloatArray,
    IndexArray,
    PolicyConfig,
    Resident,
)


class SpMoe(LayerLru):
    """Prefetches every predicted expert of the layers before the cutoff."""

    name = "sp-moe"
    execution_model = ExecutionModel(device_only=True, per_layer_slots=True, batched_io=True)
    required_inputs = frozenset({"draft-inputs"})
    prefetch_is_use = True

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._fixed_cutoff = config.cutoff_layer
        self._n_drafts = max(config.gamma, 1)
        self._drafting_s, self._transfer_s = 0.0, 0.0
        if config.cost_model is not None:
            self._drafting_s = config.gamma * config.cost_model.draft_token_s
            self._transfer_s = config.cost_model.transfer_expert_s
        self._expert_layers = shape.expert_layers
        self._cutoff = 0

    def cutoff(self, n_critical: int) -> int:
        """Layers with experts that are prefetched for, where each token has `n_critical` critical experts per layer."""
        n_layers = self._expert_layers.size
        if self._fixed_cutoff is not None:
            return min(self._fixed_cutoff, n_layers)
        n_slots = int(self._planner.shares.sum())
        n_reserved = int(self._planner.shares.max(initial=0))
        n_prefetched = critical_experts(n_critical, self._n_drafts, self.shape.n_experts, n_reserved)
        return cutoff_layer(n_layers, n_prefetched, n_slots, self._drafting_s, self._transfer_s)

    def read_prediction(self, prediction: ExpertPrediction, layers: IndexArray) -> None:
        """Derives the cutoff layer from the number of predicted experts."""
        self._cutoff = self.cutoff(prediction.layer_ids.shape[2])

    def prefetched(self, counts: FloatArray, resident: Resident) -> BoolArray:
        """Every predicted expert of the layers before the cutoff."""
        chosen = counts > 0.0
        chosen[self._expert_layers[self._cutoff :]] = False
        return chosen


def critical_experts(n_critical: int, n_drafts: int, n_experts: int, n_reserved: int) -> float:
    """Experts of a layer that drafting may prefetch, where each of `n_drafts` tokens has `n_critical` random ones.

    n_reserved: slots of the layer, which holds no more at once, but the experts of one token in any case.
    """
    n_distinct = n_experts * (1.0 - (1.0 - min(n_critical / n_experts, 1.0)) ** n_drafts)
    return min(n_distinct, max(n_reserved, n_critical))


def cutoff_layer(n_layers: int, n_critical: float, n_slots: int, drafting_s: float, transfer_s: float) -> int:
    """The deepest layer that SP-MoE prefetches for (section 3.2), as a number of layers.

    n_critical  experts to load per layer, k for one draft token (`critical_experts`); resident ones are not loaded,
                so that it is an upper bound
    n_slots     experts that fit the memory left by the rest of the model
    drafting_s  seconds of drafting, computation per layer times layers; 0: not measured
    transfer_s  seconds of one expert's transfer; 0: not measured

    The objective, the sum of drafting, verification and loading, falls with every layer that the constraints allow, so
    the largest number is optimal.
    """
    if n_critical <= 0 or n_layers < 1:
        return max(n_layers, 0)
    by_memory = int(n_slots / n_critical + 1e-9)
    by_time = int(drafting_s / (n_critical * transfer_s)) if transfer_s > 0 else n_layers
    return max(0, min(n_layers, by_memory, by_time))
