"""Experts of a model: arrays about them, where each of them is, and how often a router chose each of them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]
IndexArray = NDArray[np.intp]
IntArray = NDArray[np.integer[Any]]
Resident = NDArray[np.bool_] | NDArray[np.uint8]  # [n_layers, n_experts], bool or values of Residency


class Residency:
    """enum moeedge_residency: where an expert is, as uint8 arrays [n_layers, n_experts] hold it.

    Plain integers: NumPy takes 8 times as long to compare a uint8 array with a member of an IntEnum.
    """

    ABSENT: Final = 0
    RESIDENT: Final = 1
    IN_FLIGHT: Final = 2


def count_ids(
    ids: IntArray, n_experts: int, *, rows: IntArray | None = None, n_rows: int | None = None
) -> NDArray[np.int64]:
    """Activations int64 [n_rows, n_experts] in `ids`, negative ids left out.

    ids: expert numbers of any shape; without `rows` [n_rows, ...], e.g. [n_layers, n_tokens, k]. rows: the row that
    each id is counted in, in a shape that broadcasts to that of `ids`; then `n_rows` says how many there are.
    """
    if rows is None or n_rows is None:
        n_rows = len(ids)
        ids = ids.reshape(n_rows, -1)
        rows = np.arange(n_rows)[:, None]
    flat_ids = rows * n_experts + ids
    counted = flat_ids.reshape(-1) if ids.min(initial=0) >= 0 else flat_ids[ids >= 0]
    return np.bincount(counted, minlength=n_rows * n_experts).reshape(n_rows, n_experts)
