"""Slots divided among the layers: which experts each layer keeps, and the plan that leads there (pure NumPy).

Most published systems give every layer slots of its own. The device's slots are one pool per group all the same
(scheduler/policy.py), so that such a system keeps to its shares by what it plans. A layer may hold more for a while,
where the pool has free slots: what is above the share is named as a victim and goes when another layer needs the slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.counting import count_ids
from moeedge.policies.base import CacheShape, ExpertPrediction, Plan, Resident

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

_IN_FLIGHT = 2


def even_shares(shape: CacheShape) -> NDArray[np.intp]:
    """Slots of each layer [n_layers]: its group's divided evenly, what is left over to the first layers."""
    shares = np.zeros(shape.n_layers, dtype=np.intp)
    for group, capacity in enumerate(shape.capacity.tolist()):
        layers = np.flatnonzero(shape.group == group)
        if layers.size:
            shares[layers] = capacity // layers.size
            shares[layers[: capacity % layers.size]] += 1
    return np.minimum(shares, shape.n_experts)


def layers_after(shape: CacheShape, layer: int, n: int = 1) -> NDArray[np.intp]:
    """The next n layers with experts behind `layer`, fewer at the end."""
    layers = np.flatnonzero(shape.group >= 0)
    return layers[layers > layer][:n]


def predicted_counts(hints: ExpertPrediction, shape: CacheShape) -> FloatArray:
    """How many of the tokens to come will use each expert, float32 [n_layers, n_experts], as `hints` has it."""
    return count_ids(hints.layer_ids, shape.n_experts).astype(np.float32)


class PerLayerPlanner:
    """Keeps the best of each layer. Holds nothing from plan to plan but its shares."""

    def __init__(self, shape: CacheShape, cap: int, shares: NDArray[np.intp] | None = None) -> None:
        self.shape = shape
        self._cap = cap
        self._rows = np.arange(shape.n_layers)
        self.shares = even_shares(shape) if shares is None else shares
        self.tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)

    def best(self, score: FloatArray, resident: Resident, allowed: BoolArray | None = None) -> BoolArray:
        """The cells to hold, [n_layers, n_experts]: of what is there and what may come the best of each layer.

        score    [n_layers, n_experts] >= 0; what is absent and has none does not come
        allowed  [n_layers, n_experts] may come
        """
        there = resident != 0
        may_come = score > 0.0
        if allowed is not None:
            may_come &= allowed
        key = np.where(there | may_come, score, np.float32(-1.0))
        if resident.dtype != np.bool_:
            key[resident == _IN_FLIGHT] = np.inf  # comes in any case
        ordered = np.sort(key, axis=1)
        at = self.shape.n_experts - self.shares
        least = np.where(self.shares > 0, ordered[self._rows, np.minimum(at, self.shape.n_experts - 1)], np.inf)
        keep: BoolArray = np.asarray(key >= np.maximum(least, np.float32(0.0))[:, None])
        if (keep.sum(axis=1) > self.shares).any():
            _settle_ties(keep, key, least, there, self.shares)
        return keep

    def plan(self, keep: BoolArray, score: FloatArray, utility: FloatArray, resident: Resident) -> Plan:
        """Uploads what is to be held and absent; what is there and not to be held are the victims.

        score    [n_layers, n_experts] orders what has the same utility
        utility  [n_layers, n_experts] 0..K, its integer part is the level
        """
        there = resident != 0
        up = np.flatnonzero(keep & ~there)
        down = np.flatnonzero((resident == 1) & ~keep)
        flat_score, flat_utility = score.reshape(-1), utility.reshape(-1)
        up = self._that_fit(up, down, there, flat_score)
        priority = np.maximum(flat_utility[up].astype(np.uint8), np.uint8(1))
        order = (self._cap - priority).argsort(kind="stable")
        down = down[np.lexsort((flat_score[down], flat_utility[down]))] if up.size else down[:0]
        return Plan(
            tau=self.tau,
            utility=utility,
            uploads=self._pairs(up[order]),
            priority=priority[order],
            victims=self._pairs(down),
            victim_utility=flat_utility[down],
        )

    def _that_fit(
        self, up: NDArray[np.intp], down: NDArray[np.intp], there: BoolArray, score: FloatArray
    ) -> NDArray[np.intp]:
        """Without the uploads for which a group has no slot; there are some only where layers are above their share."""
        n, group_of = self.shape.n_experts, self.shape.group
        for group, capacity in enumerate(self.shape.capacity.tolist()):
            whole = self.shape.n_groups == 1
            mine = np.ones(up.size, dtype=np.bool_) if whole else group_of[up // n] == group
            n_down = down.size if whole else int(np.count_nonzero(group_of[down // n] == group))
            held = int(np.count_nonzero(there if whole else there[group_of == group]))
            excess = int(np.count_nonzero(mine)) - max(capacity - held, 0) - n_down
            if excess > 0:
                mine_at = np.flatnonzero(mine)
                worst = mine_at[np.argsort(score[up[mine_at]], kind="stable")[:excess]]
                up = np.delete(up, worst)
        return up

    def _pairs(self, cells: NDArray[np.intp]) -> NDArray[np.int32]:
        pairs = np.empty((cells.size, 2), dtype=np.int32)
        pairs[:, 0], pairs[:, 1] = np.divmod(cells, self.shape.n_experts)
        return pairs


def _settle_ties(
    keep: BoolArray, key: FloatArray, least: NDArray[Any], there: BoolArray, shares: NDArray[np.intp]
) -> None:
    """Of those exactly at the margin as many as fit: first what is there, then the lowest number."""
    tied = keep & (key == least[:, None]) & np.isfinite(key)
    n_left = shares - np.count_nonzero(keep & ~tied, axis=1)
    here, absent = tied & there, tied & ~there
    rank = np.where(here, here.cumsum(axis=1), here.sum(axis=1, keepdims=True) + absent.cumsum(axis=1))
    keep &= ~tied | (rank <= n_left[:, None])
