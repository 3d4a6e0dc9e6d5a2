"""The most pairs that any policy could find with at most so many uploads, if it knew the entire trace.

A schedule of residencies has a price: `slot_price` for each slot and step, `upload_price` for each upload. At given
prices experts do not compete, so the best schedule is found for each on its own: a maximum over two states, on the
device or not, step by step. What it finds beyond its costs, plus the price of all slots and of all allowed uploads, is
at least what any schedule finds that keeps to the slots and the uploads (Lagrangian duality: a relaxation lets a step
use slots that another leaves empty). The lowest over a grid of prices is the bound. It holds for policies that plan
between steps; one that plans before every layer can use a slot for several layers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.sim.batches import cache_shape
from moeedge.trace.schedule import Schedule

# in activations; a step of gamma 8 activates an expert at most 9 times
_SLOT_PRICES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
_UPLOAD_PRICES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 48.0, 96.0, 200.0)


def pairs_found_at_most(schedule: Schedule, cache_ratio: float, limits: Sequence[float]) -> list[float]:
    """For each limit of uploads per layer and step, pairs that no schedule of uploads exceeds."""
    counts = (chunk.counts[chunk.counted].reshape(-1, chunk.counts[0].size) for chunk in schedule.chunks())
    n_slots = int(cache_shape(schedule.trace, cache_ratio).capacity[0])
    layer_steps = schedule.n_steps * len(schedule.trace.expert_layers())
    slot_price, upload_price, surplus = _surplus([step for chunk in counts for step in chunk])
    with_slots = surplus + slot_price * n_slots * schedule.n_steps
    return [float((with_slots + upload_price * limit * layer_steps).min()) for limit in limits]


def _surplus(
    steps: Sequence[NDArray[np.int32]],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Prices of slots and uploads [n_prices], and what the best schedule finds beyond them; steps: counts [n]."""
    slot_price, upload_price = (prices.reshape(-1) for prices in np.meshgrid(_SLOT_PRICES, _UPLOAD_PRICES))
    size = (slot_price.size, steps[0].size)
    # the most so far, if the expert is on the device after the step or not, [n_prices, n]
    resident, absent = np.full(size, -np.inf), np.zeros(size)
    uploaded = np.empty(size)
    for counts in steps:
        np.subtract(absent, upload_price[:, None], out=uploaded)
        np.maximum(absent, resident, out=absent)
        np.maximum(resident, uploaded, out=resident)
        resident += counts
        resident -= slot_price[:, None]
    return slot_price, upload_price, np.maximum(resident, absent).sum(axis=1)
