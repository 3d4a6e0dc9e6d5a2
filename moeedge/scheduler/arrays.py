"""Weighted sums of rows that stay on the calling thread (pure NumPy).

BLAS libraries spread larger products over threads (OpenBLAS from 9,216 elements of a matrix on), and then wait for
cores that the model is computing on: a sum of 5 microseconds takes 50. Cut into columns it is as fast as it can be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

SERIAL_ELEMENTS = 8192


def weighted_sum(weight: NDArray[Any], rows: FloatArray, out: FloatArray) -> FloatArray:
    """`weight` [m] times `rows` [m, n], in `out` [n], all float32."""
    n_rows, n = rows.shape
    width = max(SERIAL_ELEMENTS // max(n_rows, 1), 1)
    for start in range(0, n, width):
        np.dot(weight, rows[:, start : start + width], out=out[start : start + width])
    return out
