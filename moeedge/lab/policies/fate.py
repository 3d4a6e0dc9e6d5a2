"""Policy fate: the next layer's gate on this layer's input; the first layers cached entirely, ARC in the others.

Fate (Fang et al., arXiv 2502.12224), by its abstract and summaries; the numbers are ours (docs/lab/policies.md).
- prefetch, "cross-layer gate": inputs of adjacent gates are alike, so the next layer's gate, applied to this layer's
  input, predicts its experts (97 % of them are prefetched); all predicted experts are loaded while this layer computes.
- cache, "shallow-favoring": the first layers, whose prediction is worst and for which no earlier layer can prefetch,
  get slots first; the others share the rest.
- eviction: an Adaptive Replacement Cache (Megiddo & Modha, FAST 2003) per layer. A step's tokens reach a layer
  together, as one set of requests: hits move to the frequent list, ghosts adapt the target of the recent list, and then
  the excess leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, FloatArray, IndexArray, Resident
from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, PolicyConfig
from moeedge.policies.baselines import Recency
from moeedge.policies.planner import PerLayerPolicy, layers_after, predicted_counts

_SHALLOW_LAYERS = 1  # layers cached entirely where the slots allow it
_SHALLOW_SHARE_MAX = 0.25  # of all slots
_NEW, _RECENT, _FREQUENT, _GHOST_RECENT, _GHOST_FREQUENT = 0, 1, 2, 3, 4


class Fate(PerLayerPolicy):
    """Keeps the experts of ARC; predicted experts are uploaded, and leave as recently used ones do."""

    name = "fate"
    execution_model = ExecutionModel(device_only=True, prefetch_within_step=True, speculation=False)
    required_inputs = frozenset({"block-inputs"})

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        shares = shallow_shares(shape)
        super().__init__(shape, config, shares)
        self._arc = Arc(shares, shape.n_experts)
        self._recency = Recency(shape.n_layers, shape.n_experts)

    def observe(self, observation: Observation) -> None:
        """Requests the step's experts from every layer's cache."""
        self._recency.observe(observation)
        self._arc.request(self._recency.used, self._recency.last)
        np.copyto(self._utility, self._recency.used)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold the predicted experts, then those of ARC."""
        scored = self._scored(predicted_counts(prediction, self.shape))
        return self._plan(scored, resident, staged=self._recency.used)

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        """Plans prefetches for the next layer with experts; the other layers stay as they are."""
        counts = predicted_counts(prediction, self.shape)
        return self._plan(self._scored(counts), resident, counts > 0, only=layers_after(self.shape, layer))

    def _scored(self, counts: FloatArray) -> FloatArray:
        """Above 2 for predicted experts, by their tokens; 1..2 for experts of ARC, by recency; 0 for all others."""
        score = self._score
        np.multiply(self._recency.last, np.float32(1.0 / max(self._recency.now + 1.0, 1.0)), out=score)
        score += 1.0
        score[~self._arc.held] = 0.0
        predicted = counts > 0
        score[predicted] = 2.0 + counts[predicted]
        return score


def shallow_shares(shape: CacheShape) -> IndexArray:
    """Slots of each layer [n_layers]: all experts of the first layer, an even share for the others."""
    shares = np.zeros(shape.n_layers, dtype=np.intp)
    for layers, capacity in shape.pools():
        shallow = layers[: min(_SHALLOW_LAYERS, layers.size - 1)]
        even = capacity // layers.size
        entire = max(min(shape.n_experts, int(capacity * _SHALLOW_SHARE_MAX)), even)
        shares[shallow] = entire
        deep = layers[shallow.size :]
        left = capacity - int(shares[shallow].sum())
        shares[deep] = left // deep.size
        shares[deep[: left % deep.size]] += 1
    return np.minimum(shares, shape.n_experts)


class Arc:
    """An Adaptive Replacement Cache per layer, all layers at once (Megiddo & Modha, Figure 4, for sets of requests)."""

    def __init__(self, sizes: IndexArray, n_experts: int) -> None:
        """sizes: slots of each layer [n_layers]."""
        self._size = sizes[:, None]
        self._list = np.zeros((sizes.size, n_experts), dtype=np.int8)
        self._target: NDArray[np.float64] = np.zeros((sizes.size, 1))  # p: of the recent list's length
        self.held = np.zeros((sizes.size, n_experts), dtype=np.bool_)

    def request(self, used: BoolArray, last: FloatArray) -> None:
        """Takes in the `used` experts of each layer; `last` is the order of use, both [n_layers, n_experts]."""
        lists, size = self._list, self._size
        in_ghost_recent = lists == _GHOST_RECENT
        in_ghost_frequent = lists == _GHOST_FREQUENT
        hit_recent, hit_frequent = _length(used & in_ghost_recent), _length(used & in_ghost_frequent)
        n_recent, n_frequent = _length(in_ghost_recent), _length(in_ghost_frequent)
        # cases II and III: a ghost that returns moves the target towards its list
        self._target += hit_recent * np.maximum(n_frequent / np.maximum(n_recent, 1), 1.0)
        self._target -= hit_frequent * np.maximum(n_recent / np.maximum(n_frequent, 1), 1.0)
        np.clip(self._target, 0.0, size, out=self._target)
        # case I and the ghosts: used again; case IV: new, and room is made before it comes
        came = (used & (lists == _NEW)).any(axis=1)[:, None]
        lists[used] = np.where(lists[used] == _NEW, _RECENT, _FREQUENT)
        order = np.argsort(last, axis=1, kind="stable")
        queue = np.take_along_axis(lists, order, axis=1)  # used longest ago first
        self._replace(queue, np.floor(self._target).astype(np.intp) + came)
        # the recent list and its ghosts have `size` entries together, all four lists twice as many
        ghosts = queue == _GHOST_RECENT
        queue[_first(ghosts, _length(queue == _RECENT) + _length(ghosts) - size)] = _NEW
        queue[_first(queue == _GHOST_FREQUENT, _length(queue != _NEW) - 2 * size)] = _NEW
        np.put_along_axis(lists, order, queue, axis=1)
        self.held = (lists == _RECENT) | (lists == _FREQUENT)

    def _replace(self, queue: NDArray[np.int8], target: IndexArray) -> None:
        """REPLACE: the recent list loses what exceeds its target [n_layers, 1], the frequent list the rest."""
        recent, frequent = queue == _RECENT, queue == _FREQUENT
        n_recent, n_frequent = _length(recent), _length(frequent)
        excess = np.maximum(n_recent + n_frequent - self._size, 0)
        from_recent = np.minimum(excess, np.maximum(n_recent - target, 0))
        from_recent = np.maximum(from_recent, excess - n_frequent)
        queue[_first(recent, from_recent)] = _GHOST_RECENT
        queue[_first(frequent, excess - from_recent)] = _GHOST_FREQUENT


def _length(members: BoolArray) -> IndexArray:
    return np.asarray(np.count_nonzero(members, axis=1))[:, None]


def _first(members: BoolArray, n: IndexArray) -> BoolArray:
    """The first n [n_layers, 1] members of each layer."""
    return np.asarray(members & (members.cumsum(axis=1) <= n))
