"""Speculative utility of every expert, estimated from the activation counts of verification steps (pure NumPy).

MoE-SpAc, section 3.2, Algorithm 1, for all layers and experts at once. Per expert and verification step, with f_t the
number of the step's gamma+1 tokens that used it and d = f_t - f_{t-1}:

  transition   d >= up: s = min(K, s + 1);  else -d >= down: s = max(0, s - 1);  else s stays         (Eq. 6)
  calibration  d > 0: up = floor((1 - l) * up + l * d);  d < 0: down = floor((1 - l) * down + l * |d|)

Both boundaries start at floor(gamma / 2) and the transition uses those from before the calibration. Three variants:

  "floor"   as printed. With l = 0.1 and gamma = 8 a boundary only falls: from b it would rise at d >= 10 + b, but
            d <= 9. It ends at 1, where every fluctuation triggers.
  "float"   the moving average is kept as a real number, so that it can rise again.
  "fixed"   no calibration: up = 3, down = 1 (Table 4, "w/o AdaBC").

`counts` is integer [n_layers, n_experts] (any leading shape works), as are the state's arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import require
from moeedge.speculation import check_gamma

Boundaries = Literal["floor", "float", "fixed"]
IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.float64]

# (1 - 0.1) * 3 + 0.1 * 3 is 3.0000000000000004 in binary, other pairs fall just short of the integer: floor above that
_FLOOR_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class UtilityConfig:
    """Hyper-parameters of Algorithm 1. The defaults are the paper's (section 4.1). Raises ValueError out of range."""

    gamma: int = 8  # draft length; sets the initial boundaries only
    cap: int = 4  # K, the highest utility
    forgetting: float = 0.1  # lambda
    boundaries: Boundaries = "floor"
    fixed: tuple[int, int] = (3, 1)  # up and down, where boundaries are fixed

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        require(self.cap >= 1, f"the utility cap K must be >= 1, not {self.cap}")
        require(0 <= self.forgetting <= 1, f"the forgetting factor must be in [0, 1], not {self.forgetting}")
        is_valid = self.boundaries in get_args(Boundaries)
        require(is_valid, f"boundaries must be floor, float or fixed, not {self.boundaries}")


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class UtilityState:
    """State of Algorithm 1 between steps, per layer and expert."""

    utility: NDArray[np.int16]  # s, 0..K
    up: FloatArray  # boundary of the upward transition, in activations
    down: FloatArray  # of the downward one
    counts: NDArray[np.int32]  # f_{t-1}


def initial_state(shape: tuple[int, ...], config: UtilityConfig) -> UtilityState:
    """The state before the first step (lines 2-3): utility 0, boundaries floor(gamma / 2), no activations yet."""
    up, down = config.fixed if config.boundaries == "fixed" else (config.gamma // 2, config.gamma // 2)
    zeros = np.zeros(shape, dtype=np.int16)
    return UtilityState(zeros, np.full(shape, float(up)), np.full(shape, float(down)), zeros.astype(np.int32))


def observe(state: UtilityState, counts: IntArray, config: UtilityConfig) -> UtilityState:
    """One step of Algorithm 1 (lines 5-25): the state after `counts` [n_layers, n_experts]."""
    require(counts.shape == state.counts.shape, f"counts have shape {counts.shape}, the state has {state.counts.shape}")
    now = counts.astype(np.int32)
    change = now - state.counts
    rises = change >= state.up
    falls = (-change >= state.down) & ~rises  # line 11 is an "else if"
    utility = np.minimum(np.maximum(state.utility + rises - falls.astype(np.int16), 0), config.cap).astype(np.int16)
    if config.boundaries == "fixed":
        return UtilityState(utility, state.up, state.down, now)
    grew, shrank = change > 0, change < 0
    # lines 18 and 22; an expert moves at most one of its boundaries, towards the size of the fluctuation
    before = np.where(grew, state.up, state.down)
    moved = (1.0 - config.forgetting) * before + config.forgetting * np.abs(change)
    if config.boundaries == "floor":
        moved = np.floor(moved + _FLOOR_SLACK)
    return UtilityState(utility, np.where(grew, moved, state.up), np.where(shrank, moved, state.down), now)
