"""What a policy may be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from moeedge.policies.base import ABLATIONS
from moeedge.policies.cost_model import CostModel

_FIXED_TAU = 2.0  # MoE-SpAc, Table 4, "w/o HetWB"


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyConfig:
    """What a policy may be told; the defaults are MoE-SpAc's (section 4.1)."""

    gamma: int = 8  # draft length
    cap: int = 4  # K, the highest utility
    forgetting: float = 0.1  # lambda: how fast spac-paper's boundaries move
    ablations: frozenset[str] = frozenset()
    units: CostModel | None = None  # None: no balancing, every expert likely to be used is hot
    profile: NDArray[Any] | None = None  # [n_layers, n_experts] activations, for static
    lookahead_bytes: int = 64 << 20  # memory of spac's table of tokens; 0: no lookahead
    cutoff_layer: int | None = None  # layers for which sp-moe prefetches; None: worked out from the units
    future: NDArray[Any] | None = None  # [n_steps, n_layers, n_experts] activations to come, for oracle and belady

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ValueError(f"gamma must be >= 0, not {self.gamma}")
        if not 1 <= self.cap <= 64:
            raise ValueError(f"the utility cap K must be in 1..64, not {self.cap}")
        if not 0 <= self.forgetting <= 1:
            raise ValueError(f"the forgetting factor must be in [0, 1], not {self.forgetting}")
        if self.cutoff_layer is not None and self.cutoff_layer < 0:
            raise ValueError(f"the cutoff layer must be >= 0, not {self.cutoff_layer}")
        if self.lookahead_bytes < 0:
            raise ValueError(f"the lookahead table cannot have {self.lookahead_bytes} bytes")
        unknown = sorted(self.ablations - set(ABLATIONS))
        if unknown:
            raise ValueError(f'unknown ablation "{unknown[0]}"; there are {", ".join(ABLATIONS)}')

    @property
    def binary(self) -> bool:
        """Utilities say only whether the last step used an expert."""
        return "no-spec-ue" in self.ablations

    @property
    def reached_cap(self) -> int:
        """The highest utility that is left of K."""
        return 1 if self.binary else self.cap

    @property
    def fixed_tau(self) -> float | None:
        """The threshold where none is worked out."""
        return min(_FIXED_TAU, self.reached_cap) if "no-het-wb" in self.ablations else None

    @property
    def first_come(self) -> bool:
        """Only what was used comes to the device, and stays."""
        return "no-prefetch" in self.ablations

    @property
    def evicts(self) -> bool:
        """Whether anything may leave the device."""
        return not self.first_come and "no-evict" not in self.ablations
