"""Predict and prefetch, with a cache per layer: Mixtral-Offloading, AdapMoE and SP-MoE by LRU, Fate by ARC.

Predictions are those of the next layer's gate or of the draft. What was read of each system, and departures:
docs/lab/policies.md.

mixtral-offloading  Eliseev & Mazur, arXiv 2312.17238; repository dvmazur/mixtral-offloading, src/expert_cache.py. Each
    layer keeps its k most recently used experts, k the same for all layers. Speculative loading: when a layer's experts
    are loaded, the next layer's gate is applied to this layer's input and the 1 or 2 most likely of its experts are
    loaded. Misses are loaded on demand, and the GPU computes everything. A prefetched expert is the next victim if the
    prediction was wrong.

adapmoe  Zhong et al., ICCAD 2024, arXiv 2408.10284; repository PKU-SEC-Lab/AdapMoE, and SP-MoE's account of it.
    - prefetch: the next layer's gate, applied to this layer's input, predicts its experts; the first one that is absent
      is loaded while this layer computes (src/custom_layers.py, SparseMoeWrapper.forward; SP-MoE, section 3.3).
    - cache: LRU per layer (src/expert_cache.py, EvictionGroupInfo); the layers' sizes minimise the expected loads on
      demand by dynamic programming over the layers' prediction accuracies (src/dp.py), here set once after the first
      steps. Expected loads of a layer that holds c of n experts, of which a token uses k, with prediction accuracy a:
      k * (1 - c/n) are absent on average, and one of them is prefetched if it was predicted and any is absent at all:
      k * (1 - c/n) - a * (1 - P(all k are resident)). For k = 2 this is the sum of dp.py's terms (without its gating).
      It is convex in c, so giving the slots one by one to the layer that gains most finds the optimum.

sp-moe  (section numbers of the paper) The target's routers on the draft's attention outputs predict experts.
    - prediction, 3.2: for each draft token the k most likely experts of every layer are critical, k as many as the
      model uses per token. The `ExpertPrediction` comes from "draft-inputs".
    - cutoff layer, 3.2: only layers before it are prefetched (`cutoff_layer`, `critical_experts`).
    - cache, 4.4: a queue per layer, least recently used first; a prefetched expert moves to its end, so that it is not
      the next victim. A fixed number of slots per layer is reserved (3.2).
    - execution, 3.3: a worker thread moves all experts of one layer as one batch, without pause; missing experts are
      loaded on demand at verification, and resident ones are computed first (4.3). The engine does so in `moeedge lab
      ablate` alone; elsewhere its CPU computes them, under the name sp-moe-prefetch.

fate  Fang et al., arXiv 2502.12224, by its abstract and summaries; the numbers are ours (docs/lab/policies.md).
    - prefetch, "cross-layer gate": inputs of adjacent gates are alike, so the next layer's gate, applied to this
      layer's input, predicts its experts (97 % of them are prefetched); all predicted experts are loaded while this
      layer computes.
    - cache, "shallow-favoring": the first layers, whose prediction is worst and for which no earlier layer can
      prefetch, get slots first; the others share the rest.
    - eviction: an Adaptive Replacement Cache (Megiddo & Modha, FAST 2003) per layer. A step's tokens reach a layer
      together, as one set of requests: hits move to the frequent list, ghosts adapt the target of the recent list, and
      then the excess leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, FloatArray, IndexArray, Resident
from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, PolicyConfig
from moeedge.policies.baselines import Recency
from moeedge.policies.planner import PerLayerPolicy, layers_after, predicted_counts

_GUESSES = 2  # experts per layer that mixtral-offloading prefetches
_N_MEASURED = 16  # steps of which adapmoe measures the accuracy of predictions


class LayerLru(PerLayerPolicy, ABC):
    """Score: the number of the token that used the expert last; prefetched experts rank as used next."""

    prefetch_is_use = False  # whether a prefetched expert keeps its rank if it is not used

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._recency = Recency(shape.n_layers, shape.n_experts)

    def observe(self, observation: Observation) -> None:
        self._recency.observe(observation)
        np.copyto(self._utility, self._recency.used)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold each layer's most recently used experts and, with a prediction, the prefetched ones."""
        score, missing = self._ahead(prediction, resident, self._layers)
        used = self._recency.used
        return self._plan(score, resident, missing | used, staged=used)

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        """Plans prefetches for the next layer with experts; the other layers stay as they are."""
        reached = layers_after(self.shape, layer)
        score, missing = self._ahead(prediction, resident, reached)
        return self._plan(score, resident, missing, only=reached)

    def read_prediction(self, prediction: ExpertPrediction, layers: IndexArray) -> None:
        """Learns from a prediction for `layers`, before the plan that follows it."""

    @abstractmethod
    def prefetched(self, counts: FloatArray, resident: Resident) -> BoolArray:
        """Experts to prefetch or keep, bool [n_layers, n_experts]; counts: tokens predicted to use each."""

    def _ahead(
        self, prediction: ExpertPrediction | None, resident: Resident, layers: IndexArray
    ) -> tuple[FloatArray, BoolArray]:
        """Scores with the experts first that are prefetched, of all layers, and which of these are absent."""
        if prediction is not None:
            self.read_prediction(prediction, layers)
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
    execution_model = ExecutionModel(device_only=True, prefetch_within_step=True, speculation=False)
    required_inputs = frozenset({"block-inputs"})

    def prefetched(self, counts: FloatArray, resident: Resident) -> BoolArray:
        """The most likely experts, resident or not."""
        return most_likely(counts, _GUESSES)


class AdapMoe(LayerLru):
    """Prefetches each layer's most likely expert that is absent."""

    name = "adapmoe"
    execution_model = ExecutionModel(device_only=True, prefetch_within_step=True)
    required_inputs = frozenset({"block-inputs"})

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
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
        self.shares = allocate(self.shape, accuracy, n_used)


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


class SpMoe(LayerLru):
    """Prefetches every predicted expert of the layers before the cutoff."""

    name = "sp-moe"
    execution_model = ExecutionModel(device_only=True, batched_io=True)
    required_inputs = frozenset({"draft-inputs"})
    prefetch_is_use = True

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._fixed_cutoff = config.cutoff_layer
        self._n_drafts = max(config.gamma, 1)
        self._cost_model = config.cost_model
        self._expert_layers = shape.expert_layers
        self._cutoff = 0

    def cutoff(self, n_critical: int) -> int:
        """Layers with experts that are prefetched for, where each token has `n_critical` critical experts per layer."""
        n_layers = self._expert_layers.size
        if self._fixed_cutoff is not None:
            return min(self._fixed_cutoff, n_layers)
        n_slots, n_reserved = int(self.shares.sum()), int(self.shares.max(initial=0))
        n_prefetched = critical_experts(n_critical, self._n_drafts, self.shape.n_experts, n_reserved)
        cost = self._cost_model
        draft_token_s, transfer_s = (0.0, 0.0) if cost is None else (cost.draft_token_s, cost.transfer_expert_s)
        return cutoff_layer(n_layers, n_prefetched, n_slots, draft_token_s, transfer_s, self._n_drafts, n_critical)

    def read_prediction(self, prediction: ExpertPrediction, layers: IndexArray) -> None:
        """Derives the cutoff layer from the number of predicted experts."""
        self._cutoff = self.cutoff(prediction.layer_ids.shape[2])

    def prefetched(self, counts: FloatArray, resident: Resident) -> BoolArray:
        """Every predicted expert of the layers before the cutoff."""
        chosen = counts > 0.0
        chosen[self._expert_layers[self._cutoff :]] = False
        return chosen


class SpMoePrefetch(SpMoe):
    """The prefetch and cache of SP-MoE; the CPU computes missing experts, which SP-MoE loads."""

    name = "sp-moe-prefetch"
    execution_model = ExecutionModel(batched_io=True)


def critical_experts(n_critical: int, n_drafts: int, n_experts: int, n_reserved: int) -> float:
    """Experts of a layer that drafting may prefetch, where each of `n_drafts` tokens has `n_critical` random ones.

    n_reserved: slots of the layer, which holds no more at once, but the experts of one token in any case.
    """
    n_distinct = n_experts * (1.0 - (1.0 - min(n_critical / n_experts, 1.0)) ** n_drafts)
    return min(n_distinct, max(n_reserved, n_critical))


def cutoff_layer(
    n_layers: int,
    n_prefetched: float,
    n_slots: int,
    draft_token_s: float,
    transfer_s: float,
    n_drafts: int = 1,
    n_last: float | None = None,
) -> int:
    """The deepest layer that SP-MoE prefetches for (section 3.2), as a number of layers.

    n_prefetched: experts to load per layer, resident ones included, so that it is an upper bound (`critical_experts`);
    n_last: of these, what the last of `n_drafts` tokens adds; None: all. n_slots: experts that fit. draft_token_s,
    transfer_s: seconds of drafting a token and of moving an expert; 0: not measured.

    All transfers end before drafting does, "no matter whether compute time or I/O time is the bottleneck". A layer's
    experts are known once its draft layer is computed. Where transfers are the slower side they follow each other from
    the first layer's on: draft_token_s / n_layers + L * n_prefetched * transfer_s <= n_drafts * draft_token_s. Where
    computing is, the last token's of layer L begin after L of its layers: L * draft_token_s / n_layers + n_last *
    transfer_s <= draft_token_s. The draft has as many layers as the target (its Table 1).

    The objective, the sum of drafting, verification and loading, falls with every layer that the constraints allow, so
    the largest number is optimal.
    """
    if n_prefetched <= 0 or n_layers < 1:
        return max(n_layers, 0)
    limits = [n_slots / n_prefetched]
    if transfer_s > 0:
        layer_s, last = draft_token_s / n_layers, n_prefetched if n_last is None else min(n_last, n_prefetched)
        limits.append((n_drafts * draft_token_s - layer_s) / (n_prefetched * transfer_s))
        limits.append((draft_token_s - last * transfer_s) / layer_s if layer_s > 0 else 0.0)
    return max(0, min(n_layers, int(min(limits) + 1e-9)))


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
