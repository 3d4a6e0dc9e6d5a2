"""Scheduling policies, one file each, behind the interface of moeedge.scheduler.policy; chosen here by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeedge.policies.config import PolicyConfig
from moeedge.policies.lru import Lru
from moeedge.policies.none import Nothing
from moeedge.policies.spac import Spac
from moeedge.policies.spac_paper import SpacPaper
from moeedge.policies.static import Static
from moeedge.scheduler.ablations import ABLATIONS
from moeedge.scheduler.policy import CacheShape, Policy

__all__ = ["ABLATIONS", "POLICIES", "PolicyConfig", "ignored_ablations", "make_policy"]

POLICIES: dict[str, str] = {
    "spac": "decayed activation counts, and lookahead by what the draft's tokens activated before",
    "spac-paper": "Algorithm 1 of MoE-SpAc as printed",
    "lru": "what was used last stays",
    "static": "the most used experts of a profile, or of the first steps, for good",
    "none": "nothing on the device",
}

_OF_ENGINE = frozenset({"no-sd"})
_HEEDED: dict[str, frozenset[str]] = {  # ablations that change something; none for a policy that is not listed
    "spac": frozenset(ABLATIONS),
    "spac-paper": frozenset(ABLATIONS),
    "lru": frozenset({"no-prefetch", "no-evict"}),
}

_CLASSES: dict[str, Callable[[CacheShape, PolicyConfig], Policy]] = {
    "spac": Spac,
    "spac-paper": SpacPaper,
    "lru": Lru,
    "static": Static,
    "none": Nothing,
}


def make_policy(name: str, shape: CacheShape, config: PolicyConfig | None = None) -> Policy:
    """The policy of that name. Raises ValueError for an unknown one."""
    config = config or PolicyConfig()
    if config.profile is not None and np.shape(config.profile) != (shape.n_layers, shape.n_experts):
        raise ValueError(f"the profile has shape {np.shape(config.profile)}, the model has other layers and experts")
    if name not in _CLASSES:
        raise ValueError(f'unknown policy "{name}"; there are {", ".join(POLICIES)}')
    return _CLASSES[name](shape, config)


def ignored_ablations(name: str, ablations: frozenset[str]) -> list[str]:
    """Those that the policy of that name has no part for, in alphabetical order."""
    return sorted(ablations - _HEEDED.get(name, frozenset()) - _OF_ENGINE)
