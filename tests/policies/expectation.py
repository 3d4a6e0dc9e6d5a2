"""Activations of the next batch by the counts and the predictor together, as the default policy adds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.spac.token_experts import NextBatchPredictor


def expect(
    predictor: NextBatchPredictor,
    rate: NDArray[np.float32],
    tokens: list[int],
    n_batch: float,
    out: NDArray[np.float32],
    hidden_states: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Activations of a batch of `n_batch` tokens, in `out`."""
    np.multiply(rate, np.float32(n_batch), out=out)
    predictor.add(rate, tokens, out, hidden_states)
    return out
