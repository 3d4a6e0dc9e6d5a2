"""From scores to transfers (pure NumPy), for caches whose layers share one pool of slots and for slots per layer.

One pool per group of layers (`PooledPolicy`): its slots should hold the experts with the highest scores. A resident
expert's score counts `margin` more, so that two experts of nearly equal score do not replace each other step after
step. Uploads follow MoE-SpAc, section 3.4: by priority, K first, down to the layer's threshold tau; equal priorities in
the order of layers, in which they will be used. At tau = 1 every expert that fits is hot. Victims are in the order of
their scores, lowest first, and few more than the uploads need.

A share of the slots per layer (`PerLayerPolicy`), as most published systems have it and keep by their plans: the device
has one pool per group. A layer may hold more while the pool has free slots; these experts are victims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, FloatArray, IndexArray, Residency, Resident, count_ids
from moeedge.policies.base import CacheShape, ExpertPrediction, Plan, Policy, PolicyConfig, limit_uploads

# a slot that a computation reads cannot be freed: name some more victims than uploads
_SPARE_VICTIMS = 16
_SCORE_MIN = 1e-30  # an expert whose score is lower has none
_LOWEST_PRIORITY = np.uint8(1)
_NO_IDS: IndexArray = np.zeros(0, dtype=np.intp)


class _Candidates(NamedTuple):
    """Flat ids of one group that may move."""

    uploads: IndexArray  # absent, and among the experts that fit
    victims: IndexArray  # resident, and not among them
    free: int  # slots


class PooledPolicy(Policy):
    """Base of policies with one pool of slots per group and tau = 1.

    A subclass sets `_score` and `_utility`, which rises with it, in `observe` or in `_set_utilities`, and `_used` if
    only experts of the last step may be uploaded. A `plan` of its own calls `_fit`, then `_moves`.
    """

    def __init__(self, shape: CacheShape, config: PolicyConfig, *, cap: int = 0, evict: bool | None = None) -> None:
        """cap, evict: override the config's, for policies that read other ablations."""
        super().__init__(shape, config)
        self._cap = cap or self._cap
        self._evict = not config.used_only and "no-evict" not in config.ablations if evict is None else evict
        self._used: BoolArray | None = None  # [n_layers, n_experts], may be uploaded; None: every expert
        n = self._score.size
        self._boosted: FloatArray = np.empty(n, dtype=np.float32)
        self._fits: BoolArray = np.empty(n, dtype=np.bool_)
        self._in_flight = False
        # flat ids of the experts of each pool, and its slots
        self._groups = [(_flat_ids(shape, group), size) for group, size in enumerate(shape.capacity.tolist())]
        # per group the lowest score that fits; 0 where there are more slots than experts with a score
        self._lowest = [0.0] * shape.n_groups

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        self._set_utilities(self._fit(resident))
        return self._moves(resident, self._max_uploads, self._used)

    def _set_utilities(self, lowest: list[float]) -> None:
        """Sets `_utility` where it depends on `lowest` [n_groups], the lowest score that fits."""

    def _fit(self, resident: Resident, margin: float = 0.0) -> list[float]:
        """The lowest score that fits, [n_groups]; a resident expert's counts `margin` more."""
        boosted, residency = self._boosted, resident.reshape(-1)
        self._in_flight = False
        np.multiply(residency, np.float32(margin), out=boosted)
        np.add(boosted, self._score.reshape(-1), out=boosted)
        if residency.dtype != np.bool_ and residency.max() == Residency.IN_FLIGHT:
            self._in_flight = True
            boosted[residency == Residency.IN_FLIGHT] = np.inf  # a transfer that has begun keeps its slot
        for index, (flat_ids, capacity) in enumerate(self._groups):
            self._lowest[index] = _nth_largest(boosted[flat_ids], capacity)
        return self._lowest

    def _moves(
        self,
        resident: Resident,
        max_uploads: int | None = None,
        allowed: BoolArray | None = None,
        expected: FloatArray | None = None,
    ) -> Plan:
        """The plan for the scores that were fitted; those without a score are not uploaded.

        allowed: bool [n_layers, n_experts], experts that may be uploaded; None: all. expected: of the plan.
        """
        flat_score, flat_utility = self._score.reshape(-1), self._utility.reshape(-1)
        residency = resident.reshape(-1)
        groups = [self._candidates(group, residency, allowed) for group in range(len(self._groups))]
        up = groups[0].uploads if len(groups) == 1 else np.sort(np.concatenate([_NO_IDS, *(c.uploads for c in groups)]))
        up, priority = self._hot(up, flat_utility)
        if max_uploads is not None and up.size > max_uploads:
            n_left = up.size - max_uploads
            best = np.sort(np.argpartition(flat_score[up], n_left - 1)[n_left:])
            up, priority = up[best], priority[best]
        down = self._victims(up, groups, flat_score, flat_utility)
        return self._make_plan(up, priority, down, expected)

    def _candidates(self, group: int, residency: NDArray[Any], allowed: BoolArray | None) -> _Candidates:
        """Absent experts that belong into the group's slots and resident ones that do not."""
        (flat_ids, capacity), lowest = self._groups[group], self._lowest[group]
        boosted, residency = self._boosted[flat_ids], residency[flat_ids]
        fits = self._fits[: boosted.size]
        np.greater_equal(boosted, np.float32(max(lowest, _SCORE_MIN)), out=fits)
        held = residency != 0 if self._in_flight else residency.view(np.bool_)
        free = capacity - int(np.count_nonzero(held))
        changes = np.not_equal(fits, held, out=fits).nonzero()[0]
        leaves = held.take(changes)
        down = changes.take(leaves.nonzero()[0])
        up = changes.take(np.logical_not(leaves, out=leaves).nonzero()[0])
        if allowed is not None:
            up = up[allowed.reshape(-1)[flat_ids].take(up)]
        if not self._evict:
            down = _NO_IDS
        if up.size > free + down.size:
            up, down = self._break_ties(up, down, free, boosted, residency, lowest)
        if not isinstance(flat_ids, slice):
            up, down = flat_ids[up], flat_ids[down]
        return _Candidates(up, down, free)

    def _break_ties(
        self, up: IndexArray, down: IndexArray, free: int, boosted: FloatArray, residency: NDArray[Any], lowest: float
    ) -> tuple[IndexArray, IndexArray]:
        """Fewer uploads, where several experts are exactly at the margin or no expert may be evicted."""
        room = max(free + down.size, 0)
        better = boosted[up] > np.float32(lowest)
        n_better = int(np.count_nonzero(better))
        if n_better <= room:
            better[np.flatnonzero(~better)[: room - n_better]] = True
            return up[better], down
        up = up[better]  # each replaces an expert at the margin
        if self._evict:
            tied = np.flatnonzero((boosted == np.float32(lowest)) & (residency == Residency.RESIDENT))
            down = np.concatenate((down, tied[: n_better - room]))
        return up[: max(free + down.size, 0)], down

    def _hot(self, up: IndexArray, utility: FloatArray) -> tuple[IndexArray, NDArray[np.uint8]]:
        """Uploads whose utility reaches the threshold of their layer, and their priorities."""
        reached = utility.take(up)
        if self._tau.max() > 1.0:
            threshold = self._tau.take(up // self.shape.n_experts)
            hot = (reached >= threshold) | (threshold <= 1.0)
            up, reached = up[hot], reached[hot]
        priority = reached.astype(np.uint8)
        return up, np.maximum(priority, _LOWEST_PRIORITY, out=priority)

    def _victims(self, up: IndexArray, groups: list[_Candidates], score: FloatArray, utility: FloatArray) -> IndexArray:
        """As many victims as the uploads need and some to spare, lowest utility first."""
        chosen: list[IndexArray] = []
        for group, candidates in enumerate(groups):
            down = candidates.victims
            in_group = up if len(groups) == 1 else up[self.shape.group[up // self.shape.n_experts] == group]
            n_needed = in_group.size - candidates.free
            if n_needed > 0 and down.size:
                n_named = n_needed + _SPARE_VICTIMS
                if n_named < down.size:
                    down = down[np.argpartition(score.take(down), n_named)[:n_named]]
                chosen.append(down)
        if not chosen:
            return _NO_IDS
        if len(chosen) == 1:  # utility rises with the score within a group
            return chosen[0].take(score.take(chosen[0]).argsort())
        down = np.concatenate(chosen)
        return down[np.lexsort((score.take(down), utility.take(down)))]


def _flat_ids(shape: CacheShape, group: int) -> slice | IndexArray:
    """Flat ids of a group; a slice, which needs no copies, where the group has all layers."""
    layers, n = np.flatnonzero(shape.group == group), shape.n_experts
    if layers.size == shape.n_layers:
        return slice(0, shape.n_layers * n)
    return np.asarray((layers[:, None] * n + np.arange(n)).reshape(-1), dtype=np.intp)


def _nth_largest(values: FloatArray, n: int) -> float:
    """The n-th largest value: values of at least this one fit into n slots."""
    if n <= 0:
        return math.inf
    if n >= values.size:
        return 0.0
    values = values.copy()
    values.partition(values.size - n)
    return float(values[values.size - n])


def even_shares(shape: CacheShape) -> IndexArray:
    """Slots of each layer [n_layers]: its group's divided evenly, the remainder to the first layers."""
    shares = np.zeros(shape.n_layers, dtype=np.intp)
    for layers, capacity in shape.pools():
        shares[layers] = capacity // layers.size
        shares[layers[: capacity % layers.size]] += 1
    return np.minimum(shares, shape.n_experts)


def layers_after(shape: CacheShape, layer: int, n: int = 1) -> IndexArray:
    """The next n layers with experts after `layer`, fewer at the end."""
    layers = shape.expert_layers
    return layers[layers > layer][:n]


def predicted_counts(prediction: ExpertPrediction | None, shape: CacheShape) -> FloatArray:
    """Tokens predicted to use each expert, float32 [n_layers, n_experts]; zeros without a prediction."""
    if prediction is None:
        return np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
    return count_ids(prediction.layer_ids, shape.n_experts).astype(np.float32)


class PerLayerPolicy(Policy):
    """Base of policies with slots per layer. shares: slots of each layer [n_layers]; None: even ones."""

    def __init__(self, shape: CacheShape, config: PolicyConfig, shares: IndexArray | None = None) -> None:
        super().__init__(shape, config)
        self.shares = even_shares(shape) if shares is None else shares
        self._layers = np.arange(shape.n_layers)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        return self._plan(self._score, resident)

    def _plan(
        self,
        score: FloatArray,
        resident: Resident,
        allowed: BoolArray | None = None,
        only: IndexArray | None = None,
        staged: BoolArray | None = None,
    ) -> Plan:
        """Uploads the absent experts to hold; the resident ones that are not to be held are the victims.

        score    [n_layers, n_experts] >= 0, orders experts of equal utility; without a score none is uploaded
        allowed  [n_layers, n_experts], may be uploaded; only: layers that may change; None: all
        staged   [n_layers, n_experts], see `limit_uploads`
        """
        held = resident != 0
        keep = self._best(score, resident, held, allowed)
        if only is not None:
            others = ~np.isin(self._layers, only)
            keep[others] = held[others]
        up = np.flatnonzero(keep & ~held)
        down = np.flatnonzero((resident == Residency.RESIDENT) & ~keep)
        flat_score, flat_utility = score.reshape(-1), self._utility.reshape(-1)
        up = self._drop_excess(up, down, held, flat_score)
        priority = np.maximum(flat_utility[up].astype(np.uint8), np.uint8(1))
        down = down[np.lexsort((flat_score[down], flat_utility[down]))] if up.size else down[:0]
        return limit_uploads(self._make_plan(up, priority, down), score, self._max_uploads, staged)

    def _best(self, score: FloatArray, resident: Resident, held: BoolArray, allowed: BoolArray | None) -> BoolArray:
        """The experts to hold, bool [n_layers, n_experts]: per layer the best of the resident and the allowed ones."""
        may_come = score > 0.0
        if allowed is not None:
            may_come &= allowed
        key = np.where(held | may_come, score, np.float32(-1.0))
        if resident.dtype != np.bool_:
            key[resident == Residency.IN_FLIGHT] = np.inf  # a transfer that has begun keeps its slot
        at = np.minimum(self.shape.n_experts - self.shares, self.shape.n_experts - 1)
        least = np.where(self.shares > 0, np.sort(key, axis=1)[self._layers, at], np.inf)
        keep: BoolArray = np.asarray(key >= np.maximum(least, np.float32(0.0))[:, None])
        if (keep.sum(axis=1) > self.shares).any():
            _break_ties(keep, key, least, held, self.shares)
        return keep

    def _drop_excess(self, up: IndexArray, down: IndexArray, held: BoolArray, score: FloatArray) -> IndexArray:
        """The uploads for which their group has a slot, the best ones; all, unless layers are above their shares."""
        n, group_of = self.shape.n_experts, self.shape.group
        for group, capacity in enumerate(self.shape.capacity.tolist()):
            at = np.flatnonzero(group_of[up // n] == group)
            n_down = int(np.count_nonzero(group_of[down // n] == group))
            n_held = int(np.count_nonzero(held[group_of == group]))
            excess = at.size - max(capacity - n_held, 0) - n_down
            if excess > 0:
                up = np.delete(up, at[np.argsort(score[up[at]], kind="stable")[:excess]])
        return up


def _break_ties(keep: BoolArray, key: FloatArray, least: NDArray[Any], held: BoolArray, shares: IndexArray) -> None:
    """Of the experts exactly at the margin `least` [n_layers] keeps as many as fit: held ones first, then by number."""
    tied = keep & (key == least[:, None]) & np.isfinite(key)
    n_left = shares - np.count_nonzero(keep & ~tied, axis=1)
    tied_held, tied_absent = tied & held, tied & ~held
    n_tied_held = tied_held.sum(axis=1, keepdims=True)
    rank = np.where(tied_held, tied_held.cumsum(axis=1), n_tied_held + tied_absent.cumsum(axis=1))
    keep &= ~tied | (rank <= n_left[:, None])
