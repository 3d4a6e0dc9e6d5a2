"""Policy fate: the next layer's gate on this layer's input, the first layers cached whole, ARC in the others.

Fate (Fang et al., arXiv 2502.12224), by its abstract and what summaries say of it: neither the paper's text nor any
code was at hand. So the rules' names are the paper's, the numbers are not: one layer whole, a quarter of the slots at
most.
- prefetch, "cross-layer gate": inputs of adjacent gates are alike, so the next layer's gate applied to this layer's
  input foretells its experts (97 % of them are brought ahead); all that it names are prefetched while this layer
  computes.
- cache, "shallow-favoring": the first layers, which are foretold worst and have nothing before them to be foretold
  from, get slots first; what is left is divided among the others.
- eviction: an Adaptive Replacement Cache (Megiddo & Modha, FAST 2003) per layer.
- the quantization of what is moved changes what the model says and is left out here.

A step's tokens reach a layer together, so ARC sees a step as one set of requests: hits move to the frequent list,
ghosts adapt the target of the recent list, and then as many leave as are too many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.lru import Recency
from moeedge.policies.per_layer import PerLayerPlanner, layers_after, predicted_counts

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

_SHALLOW = 1  # layers cached whole where the slots allow it
_SHALLOW_AT_MOST = 0.25  # of all slots
_NEW, _RECENT, _FREQUENT, _GHOST_RECENT, _GHOST_FREQUENT = 0, 1, 2, 3, 4


class Fate:
    """Keeps what ARC keeps; what the gate foretells comes, and leaves as recently used."""

    name = "fate"
    execution_model = ExecutionModel(
        device_only=True, per_layer_slots=True, prefetch_within_step=True, speculation=False
    )
    required_inputs = frozenset({"block-inputs"})

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        cells = (shape.n_layers, shape.n_experts)
        self.shape = shape
        shares = shallow_shares(shape)
        self._planner = PerLayerPlanner(shape, config.cap, shares)
        self._arc = Arc(shares, shape.n_experts)
        self._recency = Recency(*cells)
        self._utility: FloatArray = np.zeros(cells, dtype=np.float32)
        self._score: FloatArray = np.zeros(cells, dtype=np.float32)

    def observe(self, observation: Observation) -> None:
        """A set of requests to every layer's cache."""
        self._recency.observe(observation)
        self._arc.request(self._recency.used, self._recency.last)
        np.copyto(self._utility, self._recency.used)

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """What ARC holds; with hints, what they name comes first."""
        score = self._held()
        if hints is not None:
            self._ahead(score, predicted_counts(hints, self.shape))
        keep = self._planner.best(score, resident)
        return self._planner.plan(keep, score, self._utility, resident)

    def plan_layer(self, layer: int, resident: Resident, hints: ExpertPrediction | None = None) -> Plan:
        """What the next layer with experts is expected to use; all others stay as they are."""
        score = self._held()
        none: FloatArray = np.zeros(score.shape, dtype=np.float32)
        counts = none if hints is None else predicted_counts(hints, self.shape)
        self._ahead(score, counts)
        keep = self._planner.best(score, resident, counts > 0)
        others = ~np.isin(np.arange(self.shape.n_layers), layers_after(self.shape, layer))
        keep[others] = resident[others] != 0
        return self._planner.plan(keep, score, self._utility, resident)

    def reset(self) -> None:
        """The caches go on."""

    def _held(self) -> FloatArray:
        """1..2 for what ARC holds, the more recent the higher; 0 for all else."""
        np.multiply(self._recency.last, np.float32(1.0 / max(self._recency.now + 1.0, 1.0)), out=self._score)
        self._score += 1.0
        self._score[~self._arc.held] = 0.0
        return self._score

    def _ahead(self, score: FloatArray, counts: FloatArray) -> None:
        """What is foretold comes before all else, what more tokens want first."""
        named = counts > 0
        score[named] = 2.0 + counts[named]


def shallow_shares(shape: CacheShape) -> NDArray[np.intp]:
    """Slots of each layer [n_layers]: all the experts of the first layer, then an even share for the others."""
    shares = np.zeros(shape.n_layers, dtype=np.intp)
    for group, capacity in enumerate(shape.capacity.tolist()):
        layers = np.flatnonzero(shape.group == group)
        if layers.size == 0:
            continue
        shallow = layers[: min(_SHALLOW, layers.size - 1)]
        even = capacity // layers.size
        whole = max(min(shape.n_experts, int(capacity * _SHALLOW_AT_MOST)), even)
        shares[shallow] = whole
        deep = layers[shallow.size :]
        left = capacity - int(shares[shallow].sum())
        shares[deep] = left // deep.size
        shares[deep[: left % deep.size]] += 1
    return np.minimum(shares, shape.n_experts)


class Arc:
    """An Adaptive Replacement Cache per layer, all layers at once (Megiddo & Modha, Figure 4, for sets of requests)."""

    def __init__(self, sizes: NDArray[np.intp], n_experts: int) -> None:
        self._size = sizes[:, None]
        self._list = np.zeros((sizes.size, n_experts), dtype=np.int8)
        self._target: NDArray[np.float64] = np.zeros((sizes.size, 1))  # p: of the recent list's length
        self.held = np.zeros((sizes.size, n_experts), dtype=np.bool_)

    def request(self, used: BoolArray, last: FloatArray) -> None:
        """Takes in what each layer used; `last` [n_layers, n_experts] tells the order of use."""
        lists, size = self._list, self._size
        in_ghost_recent = lists == _GHOST_RECENT
        in_ghost_frequent = lists == _GHOST_FREQUENT
        hit_recent, hit_frequent = _length(used & in_ghost_recent), _length(used & in_ghost_frequent)
        n_recent, n_frequent = _length(in_ghost_recent), _length(in_ghost_frequent)
        # cases II and III: a ghost that returns moves the target towards its list
        self._target += hit_recent * np.maximum(n_frequent / np.maximum(n_recent, 1), 1.0)
        self._target -= hit_frequent * np.maximum(n_recent / np.maximum(n_frequent, 1), 1.0)
        np.clip(self._target, 0.0, size, out=self._target)
        # case I and the ghosts: used again; case IV: new, and room was made before it came
        came = (used & (lists == _NEW)).any(axis=1)[:, None]
        lists[used] = np.where(lists[used] == _NEW, _RECENT, _FREQUENT)
        order = np.argsort(last, axis=1, kind="stable")
        queue = np.take_along_axis(lists, order, axis=1)  # what was used longest ago first
        self._replace(queue, np.floor(self._target).astype(np.intp) + came)
        self._trim(queue)
        np.put_along_axis(lists, order, queue, axis=1)
        self.held = (lists == _RECENT) | (lists == _FREQUENT)

    def _replace(self, queue: NDArray[np.int8], target: NDArray[np.intp]) -> None:
        """REPLACE: the recent list gives up what is above its target [n_layers, 1], the frequent list the rest."""
        recent, frequent = queue == _RECENT, queue == _FREQUENT
        n_recent, n_frequent = _length(recent), _length(frequent)
        excess = np.maximum(n_recent + n_frequent - self._size, 0)
        from_recent = np.minimum(excess, np.maximum(n_recent - target, 0))
        from_recent = np.maximum(from_recent, excess - n_frequent)
        queue[_first(recent, from_recent)] = _GHOST_RECENT
        queue[_first(frequent, excess - from_recent)] = _GHOST_FREQUENT

    def _trim(self, queue: NDArray[np.int8]) -> None:
        """The recent list and its ghosts have `size` entries together, all four lists twice as many."""
        size = self._size
        ghosts = queue == _GHOST_RECENT
        queue[_first(ghosts, _length(queue == _RECENT) + _length(ghosts) - size)] = _NEW
        queue[_first(queue == _GHOST_FREQUENT, _length(queue != _NEW) - 2 * size)] = _NEW


def _length(cells: BoolArray) -> NDArray[np.intp]:
    return np.asarray(np.count_nonzero(cells, axis=1))[:, None]


def _first(cells: BoolArray, n: NDArray[np.intp]) -> BoolArray:
    """The first n [n_layers, 1] of `cells` in each layer."""
    return np.asarray(cells & (cells.cumsum(axis=1) <= n))
