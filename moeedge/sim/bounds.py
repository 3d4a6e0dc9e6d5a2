"""What no policy can beat, for reference: residencies chosen with the future in hand.

  oracle  one step: before every batch the slots hold the experts that the most of its tokens use, whatever had to move.
          The bound on the share of pairs that are resident when a batch begins.
  belady  MIN (Belady 1966) with bypass, for caches that load only what was just used (single-level caches: LRU, LFU):
          after every batch, of what was there and what it used, the slots keep what is used again soonest. No such
          cache finds more distinct experts resident: as in the classical proof, whoever keeps something else can be
          changed step by step into MIN without losing a hit. A policy that brings experts before their use is not
          bound by it.

All layers share one pool of slots; a policy that gives every layer a share of its own is bound all the more.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moeedge.trace.schedule import Chunk

BOUNDS = {
    "oracle": "bound: the best residency for each batch, known in advance",
    "belady": "bound: what a cache of used experts could have kept (MIN)",
}
_NEVER = np.iinfo(np.int32).max


class Oracle:
    """The one-step oracle; ties go to what is there already."""

    def __init__(self, n_cells: int, capacity: int) -> None:
        self._capacity = min(capacity, n_cells)
        self._resident = np.zeros(n_cells, dtype=np.int32)
        self.n_uploads = 0

    def run(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Residency as each batch of the chunk begins, [n_batches, n_layers, n_experts]."""
        there = np.zeros(chunk.counts.shape, dtype=np.bool_)
        resident, capacity = self._resident, self._capacity
        for index in np.flatnonzero(chunk.counted) if capacity else ():
            score = 2 * chunk.counts[index].reshape(-1) + resident
            best = np.argpartition(score, score.size - capacity)[score.size - capacity :]
            best = best[score[best] > 0]  # a slot for which there is no use stays empty
            self.n_uploads += best.size - int(resident[best].sum())
            resident[:] = 0
            resident[best] = 1
            there[index].reshape(-1)[best] = True
        return there


class NextUse:
    """When the experts that a batch uses are used again, for every batch of a schedule."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        used: list[NDArray[np.int32]] = []
        counted: list[bool] = []
        n_cells = 0
        for chunk in chunks:
            flat = chunk.counts.reshape(len(chunk.counts), -1)
            n_cells = flat.shape[1]
            used += [np.flatnonzero(row).astype(np.int32) for row in flat]
            counted += chunk.counted.tolist()
        self._cells = used
        self._next: list[NDArray[np.int32]] = [np.zeros(0, dtype=np.int32)] * len(used)
        coming = np.full(n_cells, _NEVER, dtype=np.int32)
        for batch in range(len(used) - 1, -1, -1):
            cells = used[batch]
            self._next[batch] = coming[cells]
            if counted[batch]:  # being used by a prompt counts for nothing
                coming[cells] = batch
        self.n_cells = n_cells

    def of(self, batch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Flat cells that a batch uses, and the number of the batch that uses each of them next."""
        return self._cells[batch], self._next[batch]


class Belady:
    """MIN with bypass over batches."""

    def __init__(self, next_use: NextUse, capacity: int) -> None:
        self._next_use = next_use
        self._capacity = min(capacity, next_use.n_cells)
        self._coming = np.full(next_use.n_cells, _NEVER, dtype=np.int32)
        self._resident = np.zeros(next_use.n_cells, dtype=np.bool_)
        self.n_uploads = 0

    def run(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Residency as each batch of the chunk begins, [n_batches, n_layers, n_experts]."""
        there = np.empty(chunk.counts.shape, dtype=np.bool_)
        resident, coming = self._resident, self._coming
        for index in range(len(chunk.batches)):
            there[index].reshape(-1)[:] = resident
            cells, following = self._next_use.of(chunk.first + index)
            coming[cells] = following
            came = cells[~resident[cells] & (following < _NEVER)]
            before = resident.copy()
            resident[came] = True
            held = np.flatnonzero(resident)
            if held.size > self._capacity:
                resident[held[np.argpartition(coming[held], self._capacity)[self._capacity :]]] = False
            self.n_uploads += int(np.count_nonzero(resident & ~before))
        return there
