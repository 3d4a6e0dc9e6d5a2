"""Scheduling policies, one file each, behind the interface of moeedge.scheduler.policy; chosen here by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.scheduler.policy import CacheShape, Policy
from moeedge.scheduler.units import Units

POLICIES: dict[str, str] = {
    "spac": "decayed activation counts, and lookahead by what the draft's tokens activated before",
    "spac-paper": "Algorithm 1 of MoE-SpAc as printed",
    "lru": "what was used last stays",
    "static": "the most used experts of a profile, or of the first steps, for good",
    "none": "nothing on the device",
}

ABLATIONS: dict[str, str] = {  # MoE-SpAc, Table 4
    "no-spec-ue": "binary utilities: used in the last step or not (K = 1)",
    "no-ada-bc": "fixed boundaries of the utility's transitions, 3 up and 1 down (spac-paper)",
    "no-het-wb": "a fixed threshold, tau = 2",
    "no-prefetch": "what was used first stays for good",
    "no-evict": "nothing makes room for anything once the slots are full",
    "no-sd": "no speculation (the engine's draft length is 0)",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyConfig:
    """What a policy may be told; the defaults are MoE-SpAc's (section 4.1)."""

    gamma: int = 8  # draft length
    cap: int = 4  # K, the highest utility
    forgetting: float = 0.1  # lambda: how fast spac-paper's boundaries move
    ablations: frozenset[str] = frozenset()
    units: Units | None = None  # None: no balancing, every expert likely to be used is hot
    profile: NDArray[Any] | None = None  # [n_layers, n_experts] activations, for static
    lookahead_bytes: int = 64 << 20  # memory of spac's table of tokens; 0: no lookahead

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ValueError(f"gamma must be >= 0, not {self.gamma}")
        if not 1 <= self.cap <= 64:
            raise ValueError(f"the utility cap K must be in 1..64, not {self.cap}")
        if not 0 <= self.forgetting <= 1:
            raise ValueError(f"the forgetting factor must be in [0, 1], not {self.forgetting}")
        if self.lookahead_bytes < 0:
            raise ValueError(f"the lookahead table cannot have {self.lookahead_bytes} bytes")
        unknown = sorted(self.ablations - set(ABLATIONS))
        if unknown:
            raise ValueError(f'unknown ablation "{unknown[0]}"; there are {", ".join(ABLATIONS)}')


def make_policy(name: str, shape: CacheShape, config: PolicyConfig | None = None) -> Policy:
    """The policy of that name. Raises ValueError for an unknown one."""
    config = config or PolicyConfig()
    if config.profile is not None and np.shape(config.profile) != (shape.n_layers, shape.n_experts):
        raise ValueError(f"the profile has shape {np.shape(config.profile)}, the model has other layers and experts")
    if name == "spac":
        from moeedge.policies.spac import Spac

        return Spac(shape, config)
    if name == "spac-paper":
        from moeedge.policies.spac_paper import SpacPaper

        return SpacPaper(shape, config)
    if name == "lru":
        from moeedge.policies.lru import Lru

        return Lru(shape, config)
    if name == "static":
        from moeedge.policies.static import Static

        return Static(shape, config)
    if name == "none":
        from moeedge.policies.none import Nothing

        return Nothing(shape, config)
    raise ValueError(f'unknown policy "{name}"; there are {", ".join(POLICIES)}')
