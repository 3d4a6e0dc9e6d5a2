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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.scheduler.policy import CacheShape, Plan, Resident

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]

RESIDENT, IN_FLIGHT = 1, 2
# a slot that a computation reads cannot be given up: name some more victims than uploads
_SPARE_VICTIMS = 16
_NOBODY: IndexArray = np.zeros(0, dtype=np.intp)


class Planner:
    """Call `fit`, then `moves`, with the same scores and residency. Holds nothing else from plan to plan."""

    def __init__(self, shape: CacheShape, cap: int, *, evict: bool = True) -> None:
        self.shape = shape
        self._cap = cap
        self._evict = evict
        n = shape.n_layers * shape.n_experts
        self._boosted: FloatArray = np.empty(n, dtype=np.float32)
        self._fits: BoolArray = np.empty(n, dtype=np.bool_)
        self._above: BoolArray = np.empty(n, dtype=np.bool_)
        self._cells: list[slice | IndexArray] = [_cells(shape, group) for group in range(shape.n_groups)]
        # the score from which on an expert fits, per group; 0 where there are more slots than experts with a score
        self.marginal: FloatArray = np.zeros(shape.n_groups, dtype=np.float32)

    def fit(self, score: FloatArray, resident: Resident, margin: float) -> FloatArray:
        """Works out `marginal` [n_groups] from `score` [n_layers, n_experts], which must be >= 0."""
        boosted, there = self._boosted, resident.reshape(-1)
        np.multiply(there, np.float32(margin), out=boosted)
        np.add(boosted, score.reshape(-1), out=boosted)
        if there.dtype != np.bool_ and there.max(initial=0) == IN_FLIGHT:
            boosted[there == IN_FLIGHT] = np.inf  # comes in any case
        for group, capacity in enumerate(self.shape.capacity.tolist()):
            self.marginal[group] = _nth_largest(boosted[self._cells[group]], capacity)
        return self.marginal

    def moves(
        self,
        score: FloatArray,
        utility: FloatArray,
        tau: FloatArray,
        resident: Resident,
        max_uploads: int | None = None,
        allowed: BoolArray | None = None,
    ) -> Plan:
        """The plan.

        score    [n_layers, n_experts] orders experts; one without a score is not uploaded
        utility  [n_layers, n_experts] 0..K, rising with the score; its integer part is the level
        tau      [n_layers]
        allowed  [n_layers, n_experts] may be uploaded at all
        """
        there = resident.reshape(-1)
        coming: list[IndexArray] = []
        going: list[IndexArray] = []
        free: list[int] = []
        for group, capacity in enumerate(self.shape.capacity.tolist()):
            up, down, room = self._candidates(group, capacity, there, allowed)
            coming.append(up)
            going.append(down)
            free.append(room)
        flat_score = score.reshape(-1)
        up = coming[0] if len(coming) == 1 else np.concatenate(coming)
        up, levels = self._hot(up, utility.reshape(-1), tau)
        if max_uploads is not None and up.size > max_uploads:
            best = np.sort(np.argpartition(flat_score[up], up.size - max_uploads)[up.size - max_uploads :])
            up, levels = up[best], levels[best]
        down = self._needed(up, going, free, flat_score)
        # FIFO by layer within a level: cells are in the order of layers, and a stable sort keeps it
        order = np.argsort(np.uint8(self._cap) - levels, kind="stable")
        n_experts = self.shape.n_experts
        return Plan(
            tau=tau,
            utility=utility,
            uploads=_pairs(up[order], n_experts),
            levels=levels[order],
            victims=_pairs(down, n_experts),
            victim_utility=utility.reshape(-1)[down],
        )

    def _candidates(
        self, group: int, capacity: int, there: NDArray[Any], allowed: BoolArray | None
    ) -> tuple[IndexArray, IndexArray, int]:
        """Cells that belong into the group's slots and are absent, those there that do not, and the free slots."""
        marginal, cells = self.marginal[group], self._cells[group]
        fits, above = self._fits, self._above
        boosted = self._boosted[cells]
        if not isinstance(cells, slice):
            fits, above, there = fits[: boosted.size], above[: boosted.size], there[cells]
            allowed = None if allowed is None else allowed.reshape(-1)[cells]
        elif allowed is not None:
            allowed = allowed.reshape(-1)
        free = capacity - int(np.count_nonzero(there))
        absent = np.equal(there, 0, out=fits)
        np.greater_equal(boosted, max(marginal, np.float32(1e-30)), out=above)
        if allowed is None:
            up = np.flatnonzero(np.logical_and(above, absent, out=above))
        else:
            up = np.flatnonzero(above & absent & allowed)
        down = np.flatnonzero((boosted < marginal) & (there == RESIDENT)) if self._evict else _NOBODY
        room = max(free + down.size, 0)
        if up.size > room:  # several are exactly at the margin
            better = boosted[up] > marginal
            n_better = int(np.count_nonzero(better))
            if n_better > room:  # these come in any case, for some of those at the margin
                up = up[better]
                if self._evict:
                    tied = np.flatnonzero((boosted == marginal) & (there == RESIDENT))
                    down = np.concatenate((down, tied[: n_better - room]))
                    room = max(free + down.size, 0)
                up = up[:room]
            else:
                better[np.flatnonzero(~better)[: room - n_better]] = True
                up = up[better]
        return (up, down, free) if isinstance(cells, slice) else (cells[up], cells[down], free)

    def _hot(self, up: IndexArray, utility: FloatArray, tau: FloatArray) -> tuple[IndexArray, NDArray[np.uint8]]:
        """Those of the cells whose utility reaches the threshold of their layer, and their levels."""
        reached = utility[up]
        threshold = tau[up // self.shape.n_experts]
        hot = reached >= threshold
        hot |= threshold <= 1.0
        if not hot.all():
            up, reached = up[hot], reached[hot]
        return up, np.clip(reached, 1, self._cap).astype(np.uint8)

    def _needed(self, up: IndexArray, going: list[IndexArray], free: list[int], score: FloatArray) -> IndexArray:
        """The victims, lowest score first: as many as the uploads need, and some to spare."""
        chosen: list[IndexArray] = []
        for group, down in enumerate(going):
            if len(going) == 1:
                n_up = up.size
            else:
                n_up = int(np.count_nonzero(self.shape.group[up // self.shape.n_experts] == group))
            n_needed = n_up - free[group]
            if n_needed <= 0 or not down.size:
                continue
            n_named = n_needed + _SPARE_VICTIMS
            if n_named < down.size:
                down = down[np.argpartition(score[down], n_named)[:n_named]]
            chosen.append(down)
        if not chosen:
            return _NOBODY
        down = chosen[0] if len(chosen) == 1 else np.concatenate(chosen)
        return down[np.argsort(score[down])]


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
    return float(np.partition(values, values.size - n)[values.size - n])


def _pairs(cells: IndexArray, n_experts: int) -> NDArray[np.int32]:
    """Flat cells as int32 [n, 2], layer and expert."""
    pairs = np.empty((cells.size, 2), dtype=np.int32)
    np.floor_divide(cells, n_experts, out=pairs[:, 0], casting="unsafe")
    np.remainder(cells, n_experts, out=pairs[:, 1], casting="unsafe")
    return pairs
