"""The largest values of a row of logits, found by the native library in one pass."""

from __future__ import annotations

import ctypes
from typing import Any

from moeedge.native.library import load


class LargestValues:
    """Finds up to `k_max` largest values of rows; its memory is allocated once, as it is asked for in every step."""

    def __init__(self, k_max: int) -> None:
        self._find = load().moeedge_largest_values
        self._ids = (ctypes.c_int32 * k_max)()
        self._values = (ctypes.c_float * k_max)()

    def find(self, row: Any, k: int) -> tuple[list[int], list[float]]:
        """Indices and values of the `k` largest of a ctypes array of floats, k at most `k_max`; fewer if it is shorter.

        In descending order, of equal values the one with the lower index first. Empty where a value is no number.
        """
        n = self._find(row, len(row), k, self._ids, self._values)
        if n < 0:
            raise MemoryError
        return self._ids[:n], self._values[:n]
