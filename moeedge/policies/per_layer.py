"""From scores to transfers, for caches that give every layer its own share of the slots (pure NumPy).

Most published systems give every layer its own slots. The device has one pool of slots per group, so such a system
keeps to its shares by its plans. A layer may hold more while the pool has free slots: experts above the share are
victims, and leave when another layer needs the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency, count_ids
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
    limit_uploads,
)


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


class PerLayerPlanner:
    """Keeps the best experts of each layer. Keeps no state between plans except the shares."""

    def __init__(self, shape: CacheShape, cap: int, shares: IndexArray | None = None) -> None:
        self.shape = shape
        self._cap = cap
        self._rows = np.arange(shape.n_layers)
        self.shares = even_shares(shape) if shares is None else shares
        self.tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)

    def best(self, score: FloatArray, resident: Resident, allowed: BoolArray | None = None) -> BoolArray:
        """The experts to hold, bool [n_layers, n_experts]: per layer the best of the resident and the allowed ones.

        score    [n_layers, n_experts] >= 0; an absent expert without a score is not uploaded
        allowed  [n_layers, n_experts] experts that may be uploaded; None: all
        """
        held = resident != 0
        may_come = score > 0.0
        if allowed is not None:
            may_come &= allowed
        key = np.where(held | may_come, score, np.float32(-1.0))
        if resident.dtype != np.bool_:
            key[resident == Residency.IN_FLIGHT] = np.inf  # a transfer that has begun keeps its slot
        ordered = np.sort(key, axis=1)
        at = self.shape.n_experts - self.shares
        least = np.where(self.shares > 0, ordered[self._rows, np.minimum(at, self.shape.n_experts - 1)], np.inf)
        keep: BoolArray = np.asarray(key >= np.maximum(least, np.float32(0.0))[:, None])
        if (keep.sum(axis=1) > self.shares).any():
            _break_ties(keep, key, least, held, self.shares)
        return keep

    def plan(self, keep: BoolArray, score: FloatArray, utility: FloatArray, resident: Resident) -> Plan:
        """Uploads the absent experts to keep; the resident ones that are not to be kept are the victims.

        score    [n_layers, n_experts] orders experts of equal utility
        utility  [n_layers, n_experts] 0..K, its integer part is the priority
        """
        held = resident != 0
        up = np.flatnonzero(keep & ~held)
        down = np.flatnonzero((resident == Residency.RESIDENT) & ~keep)
        flat_score, flat_utility = score.reshape(-1), utility.reshape(-1)
        up = self._drop_excess(up, down, held, flat_score)
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

    def _drop_excess(self, up: IndexArray, down: IndexArray, held: BoolArray, score: FloatArray) -> IndexArray:
        """The uploads for which their group has a slot, the best ones; all, unless layers are above their shares."""
        n, group_of = self.shape.n_experts, self.shape.group
        for group, capacity in enumerate(self.shape.capacity.tolist()):
            only = self.shape.n_groups == 1
            of_group = np.ones(up.size, dtype=np.bool_) if only else group_of[up // n] == group
            n_down = down.size if only else int(np.count_nonzero(group_of[down // n] == group))
            n_held = int(np.count_nonzero(held if only else held[group_of == group]))
            excess = int(np.count_nonzero(of_group)) - max(capacity - n_held, 0) - n_down
            if excess > 0:
                at = np.flatnonzero(of_group)
                up = np.delete(up, at[np.argsort(score[up[at]], kind="stable")[:excess]])
        return up

    def _pairs(self, flat_ids: IndexArray) -> NDArray[np.int32]:
        pairs = np.empty((flat_ids.size, 2), dtype=np.int32)
        pairs[:, 0], pairs[:, 1] = np.divmod(flat_ids, self.shape.n_experts)
        return pairs


class PerLayerPolicy(ScoringPolicy):
    """Base of policies with slots per layer."""

    def __init__(self, shape: CacheShape, config: PolicyConfig, shares: IndexArray | None = None) -> None:
        """shares: slots of each layer [n_layers]; None: even ones."""
        super().__init__(shape)
        self._planner = PerLayerPlanner(shape, config.cap, shares)
        self._layers = np.arange(shape.n_layers)
        self._max_uploads = config.uploads_per_plan

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold each layer's experts with the highest scores."""
        return self._plan(self._score, resident)

    def _plan(
        self,
        score: FloatArray,
        resident: Resident,
        allowed: BoolArray | None = None,
        only: IndexArray | None = None,
        staged: BoolArray | None = None,
    ) -> Plan:
        """The plan for `score`, `allowed`, both [n_layers, n_experts].

        only: layers that may change, None: all. staged [n_layers, n_experts]: see `limit_uploads`.
        """
        keep = self._planner.best(score, resident, allowed)
        if only is not None:
            others = ~np.isin(self._layers, only)
            keep[others] = resident[others] != 0
        plan = self._planner.plan(keep, score, self._utility, resident)
        return limit_uploads(plan, score, self._max_uploads, staged)


def _break_ties(keep: BoolArray, key: FloatArray, least: NDArray[Any], held: BoolArray, shares: IndexArray) -> None:
    """Of the experts exactly at the margin `least` [n_layers] keeps as many as fit: held ones first, then by number."""
    tied = keep & (key == least[:, None]) & np.isfinite(key)
    n_left = shares - np.count_nonzero(keep & ~tied, axis=1)
    tied_held, tied_absent = tied & held, tied & ~held
    n_tied_held = tied_held.sum(axis=1, keepdims=True)
    rank = np.where(tied_held, tied_held.cumsum(axis=1), n_tied_held + tied_absent.cumsum(axis=1))
    keep &= ~tied | (rank <= n_left[:, None])
