"""Two bounds that know the future, as pure functions of arrays (for the replay) and as policies (for the simulator).

oracle  Before every step the slots hold the experts that most of its tokens use. No policy that moves experts between
        steps finds more (token, expert) pairs resident. Transfers are not counted, and it looks one step ahead.
belady  MIN with bypass (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal
        5(2), 1966): after every step, of the resident and the just used experts, the slots keep those that are used
        again soonest. No cache that is filled by use (LRU, LFU) finds more distinct experts resident; a policy that
        uploads experts before their use may. All experts of a step are used at once and a used expert need not stay, so
        the choice is one of intervals between two uses, at most as many at a time as there are slots: keeping those
        that end first is optimal.

All layers share one pool of slots; a policy that gives every layer its own slots is bounded as well. A prefill is not a
step: its uses are not hits, but belady may keep what it used.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import BoolArray, CacheShape, IntArray, Observation, PolicyConfig, Resident
from moeedge.policies.planner import PooledPolicy

NEVER = np.iinfo(np.int32).max  # the next use of an expert that is not used again
_SPREAD = 0x9E3779B1  # Knuth's multiplicative hash: orders ids as if by chance

FlatIds = NDArray[np.int32]


class NextUse:
    """For every batch the flat ids of the experts that it uses, and the batch that uses each of them next.

    chunks: pairs of activations [n_batches, n_layers, n_experts] and bool [n_batches], whether uses by the batch count.
    """

    def __init__(self, chunks: Iterable[tuple[IntArray, BoolArray]]) -> None:
        self._used: list[FlatIds] = []
        counted: list[bool] = []
        self.n_flat = 0  # flat ids
        for counts, counts_as_use in chunks:
            flat = counts.reshape(len(counts), -1)
            self.n_flat = flat.shape[1]
            self._used += [np.flatnonzero(row).astype(np.int32) for row in flat]
            counted += counts_as_use.tolist()
        self._next: list[NDArray[np.int32]] = [np.zeros(0, dtype=np.int32)] * len(self._used)
        coming = np.full(self.n_flat, NEVER, dtype=np.int32)
        for batch in range(len(self._used) - 1, -1, -1):
            flat_ids = self._used[batch]
            self._next[batch] = coming[flat_ids]
            if counted[batch]:
                coming[flat_ids] = batch
        self.first = coming  # [n_flat], the first batch that uses each expert

    def __len__(self) -> int:
        return len(self._used)

    def of(self, batch: int) -> tuple[FlatIds, NDArray[np.int32]]:
        """Flat ids [n] that the batch uses and the batch [n] that uses each of them next (NEVER: none)."""
        return self._used[batch], self._next[batch]


def oracle_residency(counts: IntArray, resident: BoolArray, capacity: int) -> BoolArray:
    """The `capacity` experts with the highest `counts` [n]; of equal ones those that are `resident` [n]; bool [n].

    Slots that the step does not need stay as they are.
    """
    kept = np.zeros(counts.size, dtype=np.bool_)
    capacity = min(capacity, counts.size)
    if capacity:
        score = 2 * counts + resident
        best = (-score).argsort(kind="stable")[:capacity]  # a partition's choice among equals depends on the processor
        kept[best[score[best] > 0]] = True
    return kept


def belady_residency(resident: BoolArray, used: FlatIds, coming: NDArray[np.int32], capacity: int) -> BoolArray:
    """Of the `resident` experts [n] and the flat ids `used` just now the `capacity` used next soonest; bool [n].

    coming  [n], the batch that uses each expert next; a used expert that is NEVER used again does not stay
    """
    kept: BoolArray = resident.copy()
    kept[used[coming[used] < NEVER]] = True
    held = np.flatnonzero(kept)
    if held.size > capacity:
        # of experts that are used next in the same batch no layer's come first, whatever the processor
        spread = held * _SPREAD & 0xFFFFFFFF
        kept[held[np.lexsort((spread, coming[held]))[capacity:]]] = False
    return kept


class Oracle(PooledPolicy):
    """Score: activations of the next step, from `PolicyConfig.future`."""

    name = "oracle"

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._future = _future(shape, config, self.name)
        self._next = 0  # step that the next plan is for

    def observe(self, observation: Observation) -> None:
        """Moves on by one step."""
        self._next += not observation.prefill

    def _set_scores(self, resident: Resident) -> None:
        if self._next < len(self._future):
            np.copyto(self._score, self._future[self._next], casting="unsafe")
        else:
            self._score[:] = 0.0
        np.minimum(self._score, self._cap, out=self._utility)


class Belady(PooledPolicy):
    """Score: the sooner the next use, the higher; 0 for experts that are not used again."""

    name = "belady"

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        future = _future(shape, config, self.name)
        self._next_use = NextUse([(future, np.ones(len(future), dtype=np.bool_))])
        self._coming = self._next_use.first.copy()  # [n], step that uses each expert next
        self._step = 0
        self._used: BoolArray = np.zeros(self._score.shape, dtype=np.bool_)

    def observe(self, observation: Observation) -> None:
        """Moves on by one step. Experts used by a prefill may stay, too."""
        np.greater(observation.counts, 0, out=self._used)
        if not observation.prefill:
            if self._step < len(self._next_use):
                used, following = self._next_use.of(self._step)
                self._coming[used] = following
            self._step += 1

    def _set_scores(self, resident: Resident) -> None:
        # the reciprocal of the wait orders by it, and keeps the order in float32 for far more steps than traces have
        wait = self._coming.astype(np.float64) - self._step  # 0: used by the next step
        score = self._score.reshape(-1)
        np.divide(np.float32(1.0), 1.0 + wait, out=score, casting="unsafe")
        score[self._coming == NEVER] = 0.0
        self._score *= self._used | (np.asarray(resident) != 0)  # no other expert may be uploaded
        np.copyto(self._utility, self._score)


def _future(shape: CacheShape, config: PolicyConfig, name: str) -> IntArray:
    """`PolicyConfig.future`. Raises ValueError where it is missing or has another shape."""
    if config.future is None:
        raise ValueError(f"policy '{name}' needs the steps to come: it runs in a replay or simulation only")
    future = np.asarray(config.future)
    if future.ndim != 3 or future.shape[1:] != (shape.n_layers, shape.n_experts):
        raise ValueError(f"the future has shape {future.shape}, not (n_steps, {shape.n_layers}, {shape.n_experts})")
    return future
