"""The device's slots without time: a plan's uploads are there at once, by the rules of the engine's mover."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, Plan

IndexArray = NDArray[np.intp]


class Slots:
    """An expert store (scheduler/driver.py); `resident` is uint8 [n_layers, n_experts], 1 for an expert in a slot."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.resident = np.zeros((shape.n_layers, shape.n_experts), dtype=np.uint8)
        self._flat = self.resident.reshape(-1)  # a view
        self._held = [0] * shape.n_groups

    def residency(self) -> NDArray[np.uint8]:
        """`resident`, which the next plan changes."""
        return self.resident

    def push(self, plan: Plan) -> IndexArray:
        """Uploads in order, each into a free slot or that of its group's next victim; returns the flat ids uploaded.

        An upload that finds neither is left out.
        """
        up = _flat_ids(plan.uploads, self.shape.n_experts)
        if up.size == 0:
            return up
        down = _flat_ids(plan.victims, self.shape.n_experts)
        if self.shape.n_groups == 1:
            return self._fill(0, up, down)
        return self._fill_groups(up, down)

    def _fill(self, group: int, up: IndexArray, down: IndexArray) -> IndexArray:
        free = max(int(self.shape.capacity[group]) - self._held[group], 0)
        up = up[: free + down.size]
        n_out = max(up.size - free, 0)
        self._flat[down[:n_out]] = 0
        self._flat[up] = 1
        self._held[group] += up.size - n_out
        return up

    def _fill_groups(self, up: IndexArray, down: IndexArray) -> IndexArray:
        """The same for several pools: the rank of an upload within its pool says whether it finds a slot."""
        n = self.shape.n_experts
        up_group, down_group = self.shape.group[up // n], self.shape.group[down // n]
        fits = np.zeros(up.size, dtype=np.bool_)
        for group, capacity in enumerate(self.shape.capacity.tolist()):
            in_group = np.flatnonzero(up_group == group)
            room = max(capacity - self._held[group], 0) + int(np.count_nonzero(down_group == group))
            fits[in_group[:room]] = True
        for group in range(self.shape.n_groups):
            self._fill(group, up[fits & (up_group == group)], down[down_group == group])
        return up[fits]


def _flat_ids(pairs: NDArray[np.int32], n_experts: int) -> IndexArray:
    """Flat ids of layers and experts [n, 2]."""
    flat_ids: IndexArray = pairs[:, 0] * np.intp(n_experts) + pairs[:, 1]
    return flat_ids
