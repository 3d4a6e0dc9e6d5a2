"""From scores to transfers, for caches whose layers share one pool of slots per group (pure NumPy).

The slots of a group should hold the experts with the highest scores. A resident expert's score counts `margin` more, so
that two experts of nearly equal score do not replace each other step after step. One partition finds the score of the
last expert that fits; only the experts that move are sorted.

Uploads follow MoE-SpAc, section 3.4: by priority, K first, down to the layer's threshold tau; equal priorities in the
order of layers, in which they will be used. At tau = 1, the lowest threshold, every expert that fits is hot. Victims
are in the order of their scores, lowest first, and few more than the uploads need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency
from moeedge.policies.base import (
    BoolArray,
    CacheShape,
    ExpertPrediction,
    FloatArray,
    IndexArray,
    Plan,
    PolicyConfig,
    Resident,
    ScoringPolicy,
)

# a slot that a computation reads cannot be freed: name some more victims than uploads
_SPARE_VICTIMS = 16
_SCORE_MIN = 1e-30  # an expert whose score is lower has none
_LOWEST_PRIORITY = np.uint8(1)
_NO_IDS: IndexArray = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, eq=False)
class _Group:
    """One pool of slots and the experts that it may hold."""

    flat_ids: slice | IndexArray
    capacity: int


class _Candidates(NamedTuple):
    """Flat ids of one group that may move."""

    uploads: IndexArray  # absent, and among the experts that fit
    victims: IndexArray  # resident, and not among them
    free: int  # slots


class PooledPlanner:
    """Call `fit`, then `moves`, with the same scores and residency. Keeps no other state between plans."""

    def __init__(self, shape: CacheShape, cap: int, *, evict: bool = True) -> None:
        self.shape = shape
        self._cap = cap
        self._evict = evict
        n = shape.n_layers * shape.n_experts
        self._boosted: FloatArray = np.empty(n, dtype=np.float32)
        self._fits: BoolArray = np.empty(n, dtype=np.bool_)
        self._pair_of = np.stack(np.divmod(np.arange(n), shape.n_experts), axis=1).astype(np.int32)
        self._in_flight = False
        self._groups = [_Group(_flat_ids(shape, group), size) for group, size in enumerate(shape.capacity.tolist())]
        # per group the lowest score that fits; 0 where there are more slots than experts with a score
        self.marginal = [0.0] * shape.n_groups

    def fit(self, score: FloatArray, resident: Resident, margin: float) -> list[float]:
        """Computes `marginal` [n_groups] from `score` [n_layers, n_experts] >= 0."""
        boosted, residency = self._boosted, resident.reshape(-1)
        self._in_flight = False
        np.multiply(residency, np.float32(margin), out=boosted)
        np.add(boosted, score.reshape(-1), out=boosted)
        if residency.dtype != np.bool_ and residency.max() == Residency.IN_FLIGHT:
            self._in_flight = True
            boosted[residency == Residency.IN_FLIGHT] = np.inf  # a transfer that has begun keeps its slot
        for index, group in enumerate(self._groups):
            self.marginal[index] = _nth_largest(boosted[group.flat_ids], group.capacity)
        return self.marginal

    def moves(
        self,
        score: FloatArray,
        utility: FloatArray,
        tau: FloatArray,
        resident: Resident,
        max_uploads: int | None = None,
        allowed: BoolArray | None = None,
        expected: FloatArray | None = None,
    ) -> Plan:
        """The plan for the scores that were fitted.

        score     [n_layers, n_experts] orders experts; those without a score are not uploaded
        utility   [n_layers, n_experts] 0..K, rises with the score; its integer part is the priority
        tau       [n_layers]
        allowed   [n_layers, n_experts] experts that may be uploaded; None: all
        expected  [n_layers, n_experts] Plan.expected
        """
        flat_score, flat_utility, residency = score.reshape(-1), utility.reshape(-1), resident.reshape(-1)
        found = [
            self._candidates(group, marginal, residency, allowed)
            for group, marginal in zip(self._groups, self.marginal, strict=True)
        ]
        up = found[0].uploads if len(found) == 1 else np.sort(np.concatenate([_NO_IDS, *(c.uploads for c in found)]))
        up, priority = self._hot(up, flat_utility, tau)
        if max_uploads is not None and up.size > max_uploads:
            n_left = up.size - max_uploads
            best = np.sort(np.argpartition(flat_score[up], n_left - 1)[n_left:])
            up, priority = up[best], priority[best]
        down = self._victims(up, found, flat_score, flat_utility)
        # flat ids are in the order of layers, and a stable sort keeps it within a priority
        order = (self._cap - priority).argsort(kind="stable")
        return Plan(
            tau=tau,
            utility=utility,
            uploads=self._pair_of.take(up.take(order), axis=0),
            priority=priority.take(order),
            victims=self._pair_of.take(down, axis=0),
            victim_utility=flat_utility.take(down),
            expected=expected,
        )

    def _candidates(
        self, group: _Group, marginal: float, residency: NDArray[Any], allowed: BoolArray | None
    ) -> _Candidates:
        """Absent experts that belong into the group's slots and resident ones that do not."""
        boosted, residency = self._boosted[group.flat_ids], residency[group.flat_ids]
        fits = self._fits[: boosted.size]
        np.greater_equal(boosted, np.float32(max(marginal, _SCORE_MIN)), out=fits)
        held = residency != 0 if self._in_flight else residency.view(np.bool_)
        free = group.capacity - int(np.count_nonzero(held))
        changes = np.not_equal(fits, held, out=fits).nonzero()[0]
        leaves = held.take(changes)
        down = changes.take(leaves.nonzero()[0])
        up = changes.take(np.logical_not(leaves, out=leaves).nonzero()[0])
        if allowed is not None:
            up = up[allowed.reshape(-1)[group.flat_ids].take(up)]
        if not self._evict:
            down = _NO_IDS
        if up.size > free + down.size:
            up, down = self._break_ties(up, down, free, boosted, residency, marginal)
        if not isinstance(group.flat_ids, slice):
            up, down = group.flat_ids[up], group.flat_ids[down]
        return _Candidates(up, down, free)

    def _break_ties(
        self,
        up: IndexArray,
        down: IndexArray,
        free: int,
        boosted: FloatArray,
        residency: NDArray[Any],
        marginal: float,
    ) -> tuple[IndexArray, IndexArray]:
        """Fewer uploads, where several experts are exactly at the margin or no expert may be evicted."""
        room = max(free + down.size, 0)
        better = boosted[up] > np.float32(marginal)
        n_better = int(np.count_nonzero(better))
        if n_better <= room:
            better[np.flatnonzero(~better)[: room - n_better]] = True
            return up[better], down
        up = up[better]  # each replaces an expert at the margin
        if self._evict:
            tied = np.flatnonzero((boosted == np.float32(marginal)) & (residency == Residency.RESIDENT))
            down = np.concatenate((down, tied[: n_better - room]))
        return up[: max(free + down.size, 0)], down

    def _hot(self, up: IndexArray, utility: FloatArray, tau: FloatArray) -> tuple[IndexArray, NDArray[np.uint8]]:
        """Uploads whose utility reaches the threshold of their layer, and their priorities."""
        reached = utility.take(up)
        if tau.max() > 1.0:
            threshold = tau.take(up // self.shape.n_experts)
            hot = (reached >= threshold) | (threshold <= 1.0)
            up, reached = up[hot], reached[hot]
        priority = reached.astype(np.uint8)
        return up, np.maximum(priority, _LOWEST_PRIORITY, out=priority)

    def _victims(self, up: IndexArray, found: list[_Candidates], score: FloatArray, utility: FloatArray) -> IndexArray:
        """As many victims as the uploads need and some to spare, lowest utility first."""
        chosen: list[IndexArray] = []
        for group, candidates in enumerate(found):
            down = candidates.victims
            if len(found) == 1:
                n_up = up.size
            else:
                n_up = int(np.count_nonzero(self.shape.group[up // self.shape.n_experts] == group))
            n_needed = n_up - candidates.free
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


class PooledPolicy(ScoringPolicy):
    """Base of policies with one pool of slots per group and tau = 1.

    A subclass sets `_score` and `_utility` in `observe`, or in one of the hooks of `plan`, and `_used` if only experts
    of the last step may be uploaded.
    """

    def __init__(
        self, shape: CacheShape, config: PolicyConfig, *, cap: int | None = None, evict: bool | None = None
    ) -> None:
        """cap, evict: override the config's, for policies that read other ablations."""
        super().__init__(shape)
        cap = config.cap if cap is None else cap
        self._cap = np.float32(cap)
        self._planner = PooledPlanner(shape, cap, evict=config.evicts if evict is None else evict)
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)
        self._used: BoolArray | None = None  # [n_layers, n_experts], may be uploaded; None: every expert
        # of a plan: the best of more uploads than the link carries
        self._max_uploads = config.uploads_per_plan

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold the experts with the highest scores."""
        self._set_scores(resident)
        self._set_utilities(self._planner.fit(self._score, resident, 0.0))
        return self._planner.moves(
            self._score, self._utility, self._tau, resident, self._max_uploads, allowed=self._used
        )

    def _set_scores(self, resident: Resident) -> None:
        """Sets `_score` where it depends on the plan."""

    def _set_utilities(self, marginal: list[float]) -> None:
        """Sets `_utility` where it depends on `marginal` [n_groups], the lowest score that fits."""


def _flat_ids(shape: CacheShape, group: int) -> slice | IndexArray:
    """Flat ids of a group; a slice, which needs no copies, where the group has all layers."""
    layers = np.flatnonzero(shape.group == group)
    n = shape.n_experts
    if layers.size == 0:
        return np.zeros(0, dtype=np.intp)
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
