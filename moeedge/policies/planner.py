"""From scores to moves: which experts to upload, in which order, and which to give up for them (pure NumPy).

The slots of a group should hold the experts with the highest scores. One that is there already counts as `margin`
better than it is, so that two of nearly the same score do not change places step after step. The score of the last one
that fits is found by one partition; nothing is sorted but what moves.

Uploads follow MoE-SpAc, section 3.4: by level, K first, down to the layer's threshold tau, and within a level in the
order of layers, in which they will be needed. At tau = 1, the lowest threshold, whatever fits is hot. Victims come in
the order of their score, lowest first, about as many as the uploads can need.

A flat cell is layer * n_experts + expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, Plan, Resident

FloatArray = NDArray[np.float32]
IndexArray = NDArray[np.intp]

RESIDENT, IN_FLIGHT = 1, 2
# a slot that a computation reads cannot be given up: name some more victims than uploads
_SPARE_VICTIMS = 16
_LEAST = 1e-30  # a score of nothing
_LOWEST = np.uint8(1)  # level
_NOBODY: IndexArray = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, eq=False)
class _Group:
    """One pool of slots, and the flat cells that may lie in it."""

    cells: slice | IndexArray
    capacity: int


class _Candidates(NamedTuple):
    """Flat cells of one group."""

    coming: IndexArray  # absent, and among those that fit
    going: IndexArray  # resident, and not among them
    free: int  # slots


class Planner:
    """Call `fit`, then `moves`, with the same scores and residency. Holds nothing else from plan to plan."""

    def __init__(self, shape: CacheShape, cap: int, *, evict: bool = True) -> None:
        self.shape = shape
        self._cap = cap
        self._evict = evict
        n = shape.n_layers * shape.n_experts
        self._boosted: FloatArray = np.empty(n, dtype=np.float32)
        self._fits: NDArray[np.bool_] = np.empty(n, dtype=np.bool_)
        cells = np.arange(n)
        self._pair_of = np.stack((cells // shape.n_experts, cells % shape.n_experts), axis=1).astype(np.int32)
        self._in_flight = False
        self._groups = [_Group(_cells(shape, group), size) for group, size in enumerate(shape.capacity.tolist())]
        # the score from which on an expert fits, per group; 0 where there are more slots than experts with a score
        self.marginal = [0.0] * shape.n_groups

    def fit(self, score: FloatArray, resident: Resident, margin: float) -> list[float]:
        """Works out `marginal` [n_groups] from `score` [n_layers, n_experts], which must be >= 0."""
        boosted, there = self._boosted, resident.reshape(-1)
        self._in_flight = False
        np.multiply(there, np.float32(margin), out=boosted)
        np.add(boosted, score.reshape(-1), out=boosted)
        if there.dtype != np.bool_ and there.max() == IN_FLIGHT:
            self._in_flight = True
            boosted[there == IN_FLIGHT] = np.inf  # comes in any case
        for index, group in enumerate(self._groups):
            self.marginal[index] = _nth_largest(boosted[group.cells], group.capacity)
        return self.marginal

    def moves(
        self,
        score: FloatArray,
        utility: FloatArray,
        tau: FloatArray,
        resident: Resident,
        max_uploads: int | None = None,
        allowed: NDArray[np.bool_] | None = None,
        expected: FloatArray | None = None,
    ) -> Plan:
        """The plan.

        score    [n_layers, n_experts] orders experts; one without a score is not uploaded
        utility  [n_layers, n_experts] 0..K, rising with the score; its integer part is the level
        tau      [n_layers]
        allowed  [n_layers, n_experts] may be uploaded at all
        expected [n_layers, n_experts] is handed on
        """
        flat_score, flat_utility, there = score.reshape(-1), utility.reshape(-1), resident.reshape(-1)
        found = [
            self._candidates(group, marginal, there, allowed)
            for group, marginal in zip(self._groups, self.marginal, strict=True)
        ]
        up = (
            found[0].coming if len(found) == 1 else np.sort(np.concatenate([_NOBODY, *(each.coming for each in found)]))
        )
        up, priority = self._hot(up, flat_utility, tau)
        if max_uploads is not None and up.size > max_uploads:
            n_left = up.size - max_uploads
            best = np.sort(np.argpartition(flat_score[up], n_left - 1)[n_left:])
            up, priority = up[best], priority[best]
        down = self._needed(up, found, flat_score, flat_utility)
        # FIFO by layer within a level: cells are in the order of layers, and a stable sort keeps it
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
        self, group: _Group, marginal: float, there: NDArray[Any], allowed: NDArray[np.bool_] | None
    ) -> _Candidates:
        """What belongs into the group's slots and what does not."""
        boosted, there = self._boosted[group.cells], there[group.cells]
        fits = self._fits[: boosted.size]
        np.greater_equal(boosted, np.float32(max(marginal, _LEAST)), out=fits)
        held = there != 0 if self._in_flight else there.view(np.bool_)
        free = group.capacity - int(np.count_nonzero(held))
        changes = np.not_equal(fits, held, out=fits).nonzero()[0]  # what should come or go, found in one pass
        goes = held.take(changes)
        down = changes.take(goes.nonzero()[0])
        up = changes.take(np.logical_not(goes, out=goes).nonzero()[0])
        if allowed is not None:
            up = up[allowed.reshape(-1)[group.cells].take(up)]
        if not self._evict:
            down = _NOBODY
        if up.size > free + down.size:
            up, down = self._settle_ties(up, down, free, boosted, there, marginal)
        if not isinstance(group.cells, slice):
            up, down = group.cells[up], group.cells[down]
        return _Candidates(up, down, free)

    def _settle_ties(
        self,
        up: IndexArray,
        down: IndexArray,
        free: int,
        boosted: FloatArray,
        there: NDArray[Any],
        marginal: float,
    ) -> tuple[IndexArray, IndexArray]:
        """Too many come: several cells are exactly at the margin, or nothing may be evicted."""
        room = max(free + down.size, 0)
        better = boosted[up] > np.float32(marginal)
        n_better = int(np.count_nonzero(better))
        if n_better <= room:
            better[np.flatnonzero(~better)[: room - n_better]] = True
            return up[better], down
        up = up[better]  # these come in any case, for some of those at the margin
        if self._evict:
            tied = np.flatnonzero((boosted == np.float32(marginal)) & (there == RESIDENT))
            down = np.concatenate((down, tied[: n_better - room]))
        return up[: max(free + down.size, 0)], down

    def _hot(self, up: IndexArray, utility: FloatArray, tau: FloatArray) -> tuple[IndexArray, NDArray[np.uint8]]:
        """Those of the cells whose utility reaches the threshold of their layer, and their levels."""
        reached = utility.take(up)
        if tau.max() > 1.0:
            threshold = tau.take(up // self.shape.n_experts)
            hot = (reached >= threshold) | (threshold <= 1.0)
            up, reached = up[hot], reached[hot]
        priority = reached.astype(np.uint8)
        return up, np.maximum(priority, _LOWEST, out=priority)

    def _needed(self, up: IndexArray, found: list[_Candidates], score: FloatArray, utility: FloatArray) -> IndexArray:
        """The victims, lowest utility first: as many as the uploads need, and some to spare."""
        chosen: list[IndexArray] = []
        for group, candidates in enumerate(found):
            down = candidates.going
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
            return _NOBODY
        if len(chosen) == 1:  # utility rises with the score within a group
            return chosen[0].take(score.take(chosen[0]).argsort())
        down = np.concatenate(chosen)
        return down[np.lexsort((score.take(down), utility.take(down)))]


def _cells(shape: CacheShape, group: int) -> slice | IndexArray:
    """The flat cells of a group: a slice where its layers follow each other, which needs no copies."""
    layers = np.flatnonzero(shape.group == group)
    n = shape.n_experts
    if layers.size == 0:
        return np.zeros(0, dtype=np.intp)
    if layers.size == shape.n_layers:
        return slice(0, shape.n_layers * n)
    return np.asarray((layers[:, None] * n + np.arange(n)).reshape(-1), dtype=np.intp)


def _nth_largest(values: FloatArray, n: int) -> float:
    """The n-th largest of `values`: what has at least this value fits into n slots."""
    if n <= 0:
        return math.inf
    if n >= values.size:
        return 0.0
    values = values.copy()
    values.partition(values.size - n)
    return float(values[values.size - n])
