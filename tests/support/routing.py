"""Activations of made-up routing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def count(ids: NDArray[np.int32], n_experts: int) -> NDArray[np.uint32]:
    """Activations [n_layers, n_experts] of ids [n_layers, n_tokens, k]."""
    flat_ids = np.arange(ids.shape[0])[:, None, None] * n_experts + ids
    counted = np.bincount(flat_ids[ids >= 0], minlength=ids.shape[0] * n_experts)
    return counted.reshape(ids.shape[0], n_experts).astype(np.uint32)
