"""The device's memory without time: carries plans out as the engine's mover does, at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, Plan

IndexArray = NDArray[np.intp]


class Slots:
    """`resident` uint8 [n_layers, n_experts]: 1 where an expert lies in a slot."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.resident = np.zeros((shape.n_layers, shape.n_experts), dtype=np.uint8)
        self._flat = self.resident.reshape(-1)  # the same bytes
        self._held = [0] * shape.n_groups
        self.n_uploads = 0

    def execute(self, plan: Plan, limit: int | None = None) -> IndexArray:
        """Uploads in order, each into a free slot or over its group's next victim; the flat cells that were uploaded.

        An upload that finds neither is left out. limit: so many at most, the first.
        """
        n = self.shape.n_experts
        up = _cells(plan.uploads, n)
        if up.size == 0:
            return up
        down = _cells(plan.victims, n)
        if self.shape.n_groups == 1:
            return self._fill(0, up if limit is None else up[:limit], down)
        return self._fill_groups(up, down, limit)

    def _fill(self, group: int, up: IndexArray, down: IndexArray) -> IndexArray:
        free = int(self.shape.capacity[group]) - self._held[group]
        up = up[: max(free, 0) + down.size]
        n_out = max(up.size - max(free, 0), 0)
        self._flat[down[:n_out]] = 0
        self._flat[up] = 1
        self._held[group] += up.size - n_out
        self.n_uploads += up.size
        return up

    def _fill_groups(self, up: IndexArray, down: IndexArray, limit: int | None) -> IndexArray:
        """The same for several pools: which uploads find a slot follows from their rank within their pool."""
        n = self.shape.n_experts
        up_group, down_group = self.shape.group[up // n], self.shape.group[down // n]
        fits = np.zeros(up.size, dtype=np.bool_)
        for group, capacity in enumerate(self.shape.capacity.tolist()):
            mine = np.flatnonzero(up_group == group)
            room = max(capacity - self._held[group], 0) + int(np.count_nonzero(down_group == group))
            fits[mine[:room]] = True
        if limit is not None:
            fits[np.flatnonzero(fits)[limit:]] = False
        for group in range(self.shape.n_groups):
            self._fill(group, up[fits & (up_group == group)], down[down_group == group])
        return up[fits]


def _cells(pairs: NDArray[np.int32], n_experts: int) -> IndexArray:
    """Flat cells of layers and experts [n, 2]."""
    cells: IndexArray = pairs[:, 0] * np.intp(n_experts) + pairs[:, 1]
    return cells
