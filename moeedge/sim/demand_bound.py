"""The most pairs that a cache filled by use could find, if it knew the entire trace.

Such a cache (LRU, LFU, MIN) holds only experts that a step has used, and what it drops comes back with the next use. So
an expert is found at a use exactly if it was kept since the use before: between the two it takes a slot after every
step, and it is worth as many pairs as tokens use it then. Choosing what to keep is choosing intervals, at most as many
at a time as there are slots. With a price for each slot and step, intervals do not compete: each is worth its pairs
less the price of its length, if that is above 0. These sums plus the price of all slots are at least what any choice
finds (Lagrangian duality), at every price; the lowest over the prices is the bound. MIN, which maximises the distinct
experts that are found, is no bound for pairs: other choices find more of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import BoolArray, IntArray

_ROUNDS = 60  # of a ternary search over prices: more than a float's digits need


def pairs_kept_at_most(chunks: Iterable[tuple[IntArray, BoolArray]], n_batches: int, n_slots: int) -> float:
    """Pairs that no cache of `n_slots` slots finds which holds only experts that were used.

    chunks: activations [n, n_layers, n_experts] and bool [n], whether a batch's uses count (a prompt's do not, but keep
    an expert in the cache). n_batches: of all chunks.
    """
    value, length, n = _intervals(chunks, n_batches)
    n_places = n_slots * max(n_batches - 1, 0)  # a slot after each step but the last

    def bound(price: float) -> float:
        return price * n_places + float(n @ np.maximum(value - price * length, 0.0))

    low, high = 0.0, float(value.max(initial=0.0))
    for _ in range(_ROUNDS):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, second) if bound(first) <= bound(second) else (first, high)
    return min(bound(0.0), bound(low), bound((low + high) / 2), bound(high))


def _intervals(
    chunks: Iterable[tuple[IntArray, BoolArray]], n_batches: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Of each kind of interval between two uses its pairs, its length in steps, and how many there are."""
    found: dict[int, NDArray[np.int64]] = {}  # by pairs: number by length [n_batches]
    last: NDArray[np.int64] | None = None  # [n], batch of the last use; -1: none
    batch = 0
    for counts, counted in chunks:
        flat = counts.reshape(len(counts), -1)
        last = np.full(flat.shape[1], -1, dtype=np.int64) if last is None else last
        for own, is_counted in zip(flat, counted.tolist(), strict=True):
            used = np.flatnonzero(own)
            if is_counted:
                again = used[last[used] >= 0]
                for pairs in np.unique(own[again]).tolist():
                    lengths = batch - last[again[own[again] == pairs]]
                    number = found.setdefault(pairs, np.zeros(n_batches, dtype=np.int64))
                    number += np.bincount(lengths, minlength=n_batches)
            last[used] = batch
            batch += 1
    pairs = np.array([kind for kind, number in found.items() for _ in np.flatnonzero(number)], dtype=np.float64)
    lengths = [np.flatnonzero(number) for number in found.values()]
    numbers = [number[number > 0] for number in found.values()]
    if not lengths:
        return pairs, np.zeros(0), np.zeros(0)
    return pairs, np.concatenate(lengths).astype(np.float64), np.concatenate(numbers).astype(np.float64)
