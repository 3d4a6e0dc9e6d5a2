"""Measured constants of one machine, model file and device, from which the balancer works out thresholds.

MoE-SpAc, Table 1: the unit times T_cpu, T_gpu, T_io, T_draft and the warm-up curves r_c(tau), r_g(tau) of Appendix C.1.
The paper's unit times are single numbers; here they are curves over the tokens per expert, because both devices serve
several tokens of one expert for much less than several experts of one token each.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCHEMA = 1
FloatArray = NDArray[np.float64]
_CURVES = ("cpu_expert_s", "device_expert_s")
_RATIOS = ("r_c", "r_g")
_SCALARS = ("transfer_expert_s", "draft_token_s", "block_overhead_s", "layer_rest_s")


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Units:
    """All times in seconds.

    A curve's index is the tokens that one expert serves: [0] is 0, [1] the time of an expert with one token, the last
    holds for more, in proportion. The index of a ratio is tau in 0..K (at tau = 0 everything is hot): `r_c` is the
    share of (token, expert) pairs left to the CPU, `r_g` the share of distinct experts that the device serves.
    """

    cpu_expert_s: FloatArray  # [n]
    device_expert_s: FloatArray  # [n]
    transfer_expert_s: float
    draft_token_s: float  # 0: no draft model
    block_overhead_s: float  # what splitting one MoE block costs
    r_c: FloatArray  # [K + 1]
    r_g: FloatArray  # [K + 1]
    layer_rest_s: float = 0.0  # of a layer beside its experts: attention and the rest, during which experts move, too

    def __post_init__(self) -> None:
        for name in _CURVES:
            curve = getattr(self, name)
            if curve.ndim != 1 or curve.size < 2 or not np.isfinite(curve).all() or curve[0] != 0:
                raise ValueError(f"{name} must be times by tokens per expert, from 0 tokens on")
            if curve[1:].min() <= 0:
                raise ValueError(f"{name} must be > 0 for one token and more")
        for name in _SCALARS:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be >= 0, not {value}")
        if self.r_c.ndim != 1 or self.r_c.size < 2 or self.r_c.shape != self.r_g.shape:
            raise ValueError("r_c and r_g must be curves over tau in 0..K")
        for name in _RATIOS:
            curve = getattr(self, name)
            if not np.isfinite(curve).all() or curve.min() < 0 or curve.max() > 1:
                raise ValueError(f"{name} must lie in 0..1")

    @property
    def cap(self) -> int:
        """K of the ratios."""
        return int(self.r_c.size) - 1

    def cpu_s(self, tokens: float) -> float:
        """Time of one expert that serves `tokens` tokens on the CPU."""
        return _at(self.cpu_expert_s, tokens)

    def device_s(self, tokens: float) -> float:
        """The same on the device."""
        return _at(self.device_expert_s, tokens)

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads."""
        fields: dict[str, Any] = {"schema": SCHEMA}
        fields |= {name: getattr(self, name).tolist() for name in (*_CURVES, *_RATIOS)}
        fields |= {name: getattr(self, name) for name in _SCALARS}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Units:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
            raise ValueError("these are no units of this version")
        try:
            values: dict[str, Any] = {name: np.array(fields[name], dtype=np.float64) for name in (*_CURVES, *_RATIOS)}
            values |= {name: float(fields[name]) for name in _SCALARS}
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"units are incomplete: {error}") from None


def _at(curve: FloatArray, tokens: float) -> float:
    """The curve between its points; beyond the last one in proportion to the tokens."""
    last = curve.size - 1
    if tokens >= last:
        return float(curve[last]) * tokens / last
    return float(np.interp(tokens, np.arange(curve.size), curve))
