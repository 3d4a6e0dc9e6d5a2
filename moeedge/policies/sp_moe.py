"""Policy sp-moe: the draft's attention outputs through the target's routers say what to bring while drafting lasts.

SP-MoE (section numbers of the paper):
- prediction, 3.2: of each draft token the k likeliest experts of every layer are critical, k as many as the model uses
  per token (for Mixtral fewer: its expert is large). They come as `Hints` from "draft-inputs".
- cutoff layer, 3.2: only layers before it are prefetched. It is the deepest for which (1) the prefetched experts find
  room and (2) all of them arrive before drafting ends; the number of experts per layer, which is unknown beforehand,
  is taken as k. See `cutoff_layer`.
- cache, 4.4: a queue per layer, least recently used first; an expert that is brought ahead goes to its end, so that
  it is not the next to leave. A fixed number of slots per layer is reserved (3.2).
- execution, 3.3: a worker thread moves without pause, all experts of one layer as one batch; what is missing at
  verification is loaded on demand, and experts that are there are computed first (4.3). Vanilla prefetch and single
  transfers are the ablations of Figure 12.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.layer_lru import LayerLru


class SpMoe(LayerLru):
    """All that is foretold for the layers before the cutoff."""

    name = "sp-moe"
    execution_model = ExecutionModel(device_only=True, per_layer_slots=True, batched_io=True)
    required_inputs = frozenset({"draft-inputs"})
    _touches = True

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._asked = config.cutoff_layer
        self._drafting_s, self._transfer_s = 0.0, 0.0
        if config.units is not None:
            self._drafting_s = config.gamma * config.units.draft_token_s
            self._transfer_s = config.units.transfer_expert_s
        self._expert_layers = np.flatnonzero(shape.group >= 0)
        self._cutoff = 0

    def cutoff(self, n_critical: int) -> int:
        """Layers with experts that are prefetched for, where a token has `n_critical` critical experts."""
        n_layers = self._expert_layers.size
        if self._asked is not None:
            return min(self._asked, n_layers)
        n_slots = int(self._planner.shares.sum())
        return cutoff_layer(n_layers, n_critical, n_slots, self._drafting_s, self._transfer_s)

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """As the cache of its kind."""
        if hints is not None:
            self._cutoff = self.cutoff(hints.layer_ids.shape[2])
        return super().plan(resident, upcoming, hints)

    def wanted(self, counts: NDArray[np.float32], resident: Resident) -> NDArray[np.bool_]:
        """See the module."""
        wanted = counts > 0.0
        wanted[self._expert_layers[self._cutoff :]] = False
        return wanted


def cutoff_layer(n_layers: int, n_critical: int, n_slots: int, drafting_s: float, transfer_s: float) -> int:
    """The deepest layer that SP-MoE prefetches for (section 3.2), as a number of layers.

    n_critical  experts to bring per layer, k; those that are there already are not brought, so this is an upper bound
    n_slots     experts that fit the memory left beside the rest of the model
    drafting_s  time of the draft's tokens, its computation per layer times its layers; 0: not measured
    transfer_s  time of one expert over the link; 0: not measured

    The objective, the sum of drafting, verification and loading, falls with every layer that the constraints allow,
    so the answer is the largest.
    """
    if n_critical < 1 or n_layers < 1:
        return max(n_layers, 0)
    by_memory = n_slots // n_critical
    by_time = int(drafting_s / (n_critical * transfer_s)) if transfer_s > 0 else n_layers
    return max(0, min(n_layers, by_memory, by_time))
