"""Cost models of made-up machines."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeedge.policies.cost_model import CostModel


def cost_model(cpu_s: float, device_s: float, transfer_s: float, *, cap: int = 4, **changes: Any) -> CostModel:
    """A machine that takes so long for an expert with one token; further tokens cost less than the first."""
    values: dict[str, Any] = {
        "cpu_expert_s": np.r_[0.0, np.linspace(1.0, 2.0, 9)] * cpu_s,
        "device_expert_s": np.r_[0.0, np.linspace(1.0, 1.5, 9)] * device_s,
        "transfer_expert_s": transfer_s,
        "draft_token_s": 1e-4,
        "block_overhead_s": 1e-5,
        "r_c": np.linspace(0.2, 0.9, cap + 1),
        "r_g": np.linspace(0.9, 0.1, cap + 1),
    }
    return CostModel(**values | changes)
