"""Heterogeneous workload balancer: the threshold tau of every layer (pure NumPy, all layers at once).

MoE-SpAc, section 3.3, Eq. 7-12, solved by the closed form of Appendix C.2, Eq. 37-39:

  T_cpu(tau) = r_c(tau) * n_pairs * T_u_cpu          n_pairs: the paper's gamma * k activated experts
  T_gpu(tau) = r_g(tau) * b * T_u_gpu                b: distinct ones among them
  minimise |T_cpu - T_gpu| over tau in {1..K}, subject to
    T_u_io * n(tau) <= max(T_cpu, T_gpu) + gamma * T_u_draft / L      (Eq. 10)
    n(tau) <= room(tau)                                               (Eq. 11, in slots)

A higher tau leaves fewer experts hot: r_c rises, r_g and n fall, so T_cpu - T_gpu rises and its absolute value has one
valley. The best integer is one of the two around the crossing, or the end of the feasible range nearest to it. No tau
feasible: tau = K, which moves least.

Eq. 10's right side is not monotonic (the larger of a rising and a falling time), so the feasible set need not be the
contiguous range that Eq. 37 takes it for. The two candidates are therefore the feasible tau next to the crossing on
either side, which is Eq. 39 where the set is contiguous and exact where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Workload:
    """What each choice of tau would mean; [..., j] is tau = j + 1, K of them, in any leading shape, usually [n_layers].

    `cpu_s` must not fall and `device_s` and `n_uploads` must not rise with tau.
    """

    cpu_s: FloatArray  # T_cpu
    device_s: FloatArray  # T_gpu
    n_uploads: FloatArray  # n(tau), hot experts that are absent
    room: FloatArray  # slots that may be filled; broadcast against the others

    @classmethod
    def of_ratios(
        cls,
        r_c: FloatArray,
        r_g: FloatArray,
        n_pairs: FloatArray,
        n_distinct: FloatArray,
        cpu_expert_s: float | FloatArray,
        device_expert_s: float | FloatArray,
        n_uploads: FloatArray,
        room: FloatArray,
    ) -> Workload:
        """Eq. 7 and 8: from the ratios [..., K], the activated experts [...] and the unit times in seconds."""
        cpu_s = r_c * (n_pairs * cpu_expert_s)[..., None]
        device_s = r_g * (n_distinct * device_expert_s)[..., None]
        return cls(cpu_s, device_s, n_uploads, room)


def feasible(work: Workload, transfer_expert_s: float, draft_share_s: float) -> NDArray[np.bool_]:
    """Eq. 10-12 and Eq. 37, bool [..., K].

    draft_share_s: gamma * T_u_draft / L_target, each layer's share of the drafting time.
    """
    window_s = np.maximum(work.cpu_s, work.device_s)
    window_s += draft_share_s
    allowed = work.n_uploads * transfer_expert_s <= window_s
    return np.asarray(allowed & (work.n_uploads <= work.room), dtype=np.bool_)


def thresholds(work: Workload, transfer_expert_s: float, draft_share_s: float) -> NDArray[np.float32]:
    """tau* of Eq. 39, float32 [...] with integer values in 1..K. Of two equally good ones the lower: more is hot."""
    fits = feasible(work, transfer_expert_s, draft_share_s)
    n_tau = fits.shape[-1]
    difference = work.cpu_s - work.device_s  # rises with tau
    if fits[..., 0].all() and (difference[..., 0] > 0).all():  # the crossing lies below tau = 1, as with fast devices
        return np.ones(fits.shape[:-1], dtype=np.float32)
    before = fits & (difference <= 0)
    after = fits & (difference > 0)
    floor = n_tau - 1 - before[..., ::-1].argmax(axis=-1)  # the last feasible one before the crossing
    ceiling = after.argmax(axis=-1)  # the first behind it
    gap = np.where(fits, np.abs(difference), np.inf).reshape(-1)
    first = np.arange(0, gap.size, n_tau).reshape(floor.shape)
    # where one side is empty, argmax names an end of the range, which is worse or infeasible or the same tau
    best = np.where(gap.take(first + floor) <= gap.take(first + ceiling), floor, ceiling)
    best[~fits.any(axis=-1)] = n_tau - 1
    return np.asarray(best + 1, dtype=np.float32)
