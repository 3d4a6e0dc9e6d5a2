"""Scheduling policies, one file each, behind the interface of moeedge.scheduler.policy; chosen here by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moeedge.policies.adapmoe import AdapMoe
from moeedge.policies.base import ABLATIONS, CacheShape, Policy
from moeedge.policies.bounds import Belady, Oracle
from moeedge.policies.config import PolicyConfig
from moeedge.policies.fate import Fate
from moeedge.policies.hybrimoe import HybriMoe
from moeedge.policies.layer_lru import MixtralOffloading
from moeedge.policies.lfu import Lfu
from moeedge.policies.lru import Lru
from moeedge.policies.moe_infinity import MoeInfinity
from moeedge.policies.sp_moe import SpMoe
from moeedge.policies.spac.paper import SpacPaper, SpacProgram
from moeedge.policies.spac.spac import Spac
from moeedge.policies.static import Fiddler, Nothing, Static
from moeedge.policies.whole_layers import Accelerate, LlamaCpp, LlamaCppSd, Vllm

__all__ = [
    "ABLATIONS",
    "ALL_POLICIES",
    "BOUNDS",
    "POLICIES",
    "SIMULATED",
    "PolicyConfig",
    "foresees",
    "ignored_ablations",
    "make_policy",
    "reads_hidden_states",
    "reads_tokens",
    "takes_profile",
]

# The engine runs these, with its own rule for what is missing (the CPU computes it); replay and simulation, too
POLICIES: dict[str, str] = {
    "spac": "decayed activation counts, and lookahead by what contexts alike activated before",
    "spac-paper": "Algorithm 1 of MoE-SpAc as printed",
    "lru": "what was used last stays",
    "lfu": "what is used most often lately stays",
    "static": "the most used experts of a profile, or of the first steps, for good",
    "moe-infinity": "what the most similar earlier text used",
    "fate": "the next layer's gate on this layer's input; ARC per layer",
    "adapmoe": "the next layer's gate, one expert ahead; LRU per layer",
    "hybrimoe": "averaged routing scores; a queue shares each layer between CPU and GPU",
    "fiddler": "the most popular experts for good, as Fiddler places them",
    "sp-moe": "the target's routers on the draft's attention outputs, up to a cutoff layer; LRU per layer",
    "none": "nothing on the device",
}
# Only the replay and the simulator run these: systems whose execution the engine has no part for, and one variant
SIMULATED: dict[str, str] = {
    "spac-program": "MoE-SpAc as its published program updates utilities",
    "llama-cpp": "llama.cpp: the last layers whole, no draft",
    "llama-cpp-sd": "llama.cpp with a draft model",
    "mixtral-offloading": "LRU per layer and two guesses; every miss is loaded, the GPU computes all",
    "vllm": "vLLM's offload: the GPU reads the first layers over the link",
    "accelerate": "Accelerate's offload: the last layers are brought for each pass",
}
# And these, which see the future (PolicyConfig.future)
BOUNDS: dict[str, str] = {
    "oracle": "bound: knows the next step",
    "belady": "bound: what is used again last makes room",
}
ALL_POLICIES: dict[str, str] = POLICIES | SIMULATED | BOUNDS

_FROM_HIDDEN_STATES = frozenset({"draft-inputs", "block-inputs"})
_FROM_TOKENS = frozenset({"spac"})
_FROM_PROFILE = frozenset({"static", "fiddler"})
_OF_ENGINE = frozenset({"no-sd"})
_HEEDED: dict[str, frozenset[str]] = {  # ablations that change something; none for a policy that is not listed
    "spac": frozenset(ABLATIONS),
    "spac-paper": frozenset(ABLATIONS),
    "spac-program": frozenset(ABLATIONS),
    "lru": frozenset({"no-prefetch", "no-evict"}),
    "lfu": frozenset({"no-prefetch", "no-evict"}),
    "moe-infinity": frozenset({"no-prefetch", "no-evict"}),
    "oracle": frozenset({"no-prefetch", "no-evict"}),
    "belady": frozenset({"no-prefetch", "no-evict"}),
}

_CLASSES: dict[str, Callable[[CacheShape, PolicyConfig], Policy]] = {
    "spac": Spac,
    "spac-paper": SpacPaper,
    "spac-program": SpacProgram,
    "lru": Lru,
    "lfu": Lfu,
    "static": Static,
    "moe-infinity": MoeInfinity,
    "fate": Fate,
    "adapmoe": AdapMoe,
    "hybrimoe": HybriMoe,
    "fiddler": Fiddler,
    "sp-moe": SpMoe,
    "none": Nothing,
    "llama-cpp": LlamaCpp,
    "llama-cpp-sd": LlamaCppSd,
    "mixtral-offloading": MixtralOffloading,
    "vllm": Vllm,
    "accelerate": Accelerate,
    "oracle": Oracle,
    "belady": Belady,
}


def make_policy(name: str, shape: CacheShape, config: PolicyConfig | None = None) -> Policy:
    """The policy of that name. Raises ValueError for an unknown one."""
    config = config or PolicyConfig()
    if config.profile is not None and np.shape(config.profile) != (shape.n_layers, shape.n_experts):
        raise ValueError(f"the profile has shape {np.shape(config.profile)}, the model has other layers and experts")
    if name not in _CLASSES:
        raise ValueError(f'unknown policy "{name}"; there are {", ".join(ALL_POLICIES)}')
    return _CLASSES[name](shape, config)


def named(names: Sequence[str]) -> list[str]:
    """The names, "all" among them standing for every system: all policies but the bounds and `none`."""
    if "all" in names:
        return [name for name in (*POLICIES, *SIMULATED) if name not in BOUNDS and name != "none"]
    return list(names)


def foresees(name: str) -> bool:
    """Whether the policy of that name wants predictions made from hidden states."""
    return bool(getattr(_CLASSES.get(name), "required_inputs", frozenset()) & _FROM_HIDDEN_STATES)


def reads_tokens(name: str) -> bool:
    """Whether the policy of that name looks ahead by the vocabulary ids of the next batch."""
    return name in _FROM_TOKENS


def reads_hidden_states(name: str) -> bool:
    """Whether the policy of that name looks ahead by the draft's hidden states, too, where they are known."""
    return "draft-states" in getattr(_CLASSES.get(name), "required_inputs", frozenset())


def takes_profile(name: str) -> bool:
    """Whether the policy of that name goes by a profile (PolicyConfig.profile), else by the first steps."""
    return name in _FROM_PROFILE


def ignored_ablations(name: str, ablations: frozenset[str]) -> list[str]:
    """Those that the policy of that name has no part for, in alphabetical order."""
    return sorted(ablations - _HEEDED.get(name, frozenset()) - _OF_ENGINE)
