"""The table of scheduling policies, and policies by name.

The names are read without NumPy: help and completion wait for them. A further module of this package whose class has
the module's name as `name` is a policy, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal, get_args

import moeedge.policies
from moeedge.errors import require

if TYPE_CHECKING:
    from moeedge.policies.base import CacheShape, Policy, PolicyConfig

# engine: with its rule for missing experts (the CPU computes them), in replay and simulator, too. simulation: there
# alone, as the engine lacks the system's execution. bound: it knows the future, in the replay alone
RunsIn = Literal["engine", "simulation", "bound"]
EVICTION_ABLATIONS = frozenset({"no-prefetch", "no-evict"})
# no policies, or those of the table
_OTHER_MODULES = {
    *("base", "baselines", "cost_model", "expert_budget", "planner", "registry"),
    *("spac", "token_experts", "utility"),
}


@dataclass(frozen=True)
class PolicyEntry:
    policy: type[Policy] | str  # the class; or its module, after "." of this package, else of the lab's, and its name
    description: str
    runs_in: RunsIn = "engine"
    ablations: frozenset[str] | Literal["all"] = frozenset()  # those that change its plans
    reads_tokens: bool = False  # predicts from the vocabulary ids of the next batch
    takes_profile: bool = False  # places experts by a profile (PolicyConfig.profile), or else by the first steps

    @cached_property
    def make(self) -> type[Policy]:
        """The class; its module is imported by the first use."""
        if not isinstance(self.policy, str):
            return self.policy
        module, _, name = self.policy.partition(":")
        package = "moeedge.policies" if module.startswith(".") else "moeedge.lab.policies."
        kinds = vars(import_module(f"{package}{module}"))
        named = (kind for kind in kinds.values() if isinstance(kind, type) and getattr(kind, "name", "") == name)
        policy: type[Policy] = kinds[name] if name in kinds else next(named)
        return policy


def _simulated(policy: str, description: str) -> PolicyEntry:
    return PolicyEntry(policy, description, "simulation")


def further() -> dict[str, PolicyEntry]:
    """The policies of the package's further modules, which may read the ablations that PooledPolicy reads."""
    names = {info.name for info in iter_modules(moeedge.policies.__path__) if not info.ispkg} - _OTHER_MODULES
    return {name: PolicyEntry(f".{name}:{name}", "", ablations=EVICTION_ABLATIONS) for name in sorted(names)}


TABLE: dict[str, PolicyEntry] = {
    "spac": PolicyEntry(
        ".spac:Spac",
        "activations expected from draft tokens, their hidden states and decayed counts",
        ablations="all",
        reads_tokens=True,
    ),
    "spac-paper": PolicyEntry("spac_paper:SpacPaper", "Algorithm 1 of MoE-SpAc as printed", ablations="all"),
    "spac-program": PolicyEntry(
        "spac_paper:SpacProgram",
        "MoE-SpAc's utilities and constants as in its published program",
        ablations=EVICTION_ABLATIONS | {"no-spec-ue"},
    ),
    "lru": PolicyEntry(".baselines:Lru", "least recently used", ablations=EVICTION_ABLATIONS),
    "lfu": PolicyEntry(".baselines:Lfu", "least frequently used, with decay", ablations=EVICTION_ABLATIONS),
    "static": PolicyEntry(
        ".baselines:Static", "the most used experts of a profile or of the first steps, placed once", takes_profile=True
    ),
    "moe-infinity": PolicyEntry(
        "moe_infinity:MoeInfinity", "activations of the most similar earlier sequence", ablations=EVICTION_ABLATIONS
    ),
    "fate": PolicyEntry("prefetching:Fate", "the next layer's gate on this layer's input; ARC per layer"),
    "adapmoe": PolicyEntry("prefetching:AdapMoe", "the next layer's gate, one expert prefetched; LRU per layer"),
    "hybrimoe": PolicyEntry(
        "hybrimoe:HybriMoe", "averaged routing scores; a queue divides each layer between CPU and GPU"
    ),
    "fiddler": PolicyEntry(
        "placements:Fiddler", "the most popular experts, placed once as Fiddler does", takes_profile=True
    ),
    "sp-moe-prefetch": PolicyEntry(
        "prefetching:SpMoePrefetch",
        "the target's routers on the draft's attention outputs, up to a cutoff layer; LRU per layer",
    ),
    **further(),
    "none": PolicyEntry(".baselines:NoCache", "no expert on the device"),
    "llama-cpp": _simulated("placements:LlamaCpp", "llama.cpp: the last layers on the GPU, no draft model"),
    "llama-cpp-sd": _simulated("placements:LlamaCppSd", "llama.cpp with a draft model"),
    "llama-cpp-cache": _simulated(
        "placements:LlamaCppCache",
        "llama.cpp's --moe-cache-mib: an LRU of all layers; misses are loaded, the GPU computes all",
    ),
    "sp-moe": _simulated("prefetching:SpMoe", "SP-MoE: sp-moe-prefetch; misses are loaded, the GPU computes all"),
    "mixtral-offloading": _simulated(
        "prefetching:MixtralOffloading",
        "LRU per layer, two experts prefetched; misses are loaded, the GPU computes all",
    ),
    "vllm": _simulated("placements:Vllm", "vLLM's offload: the GPU reads the first layers over the link"),
    "accelerate": _simulated("placements:Accelerate", "Accelerate's offload: the last layers are loaded for each pass"),
    # the replay computes their residency: they plan nothing
    "oracle": PolicyEntry(".baselines:NoCache", "bound: the best residency for each step, known in advance", "bound"),
    "belady": PolicyEntry(".baselines:NoCache", "bound: the best that a cache filled by use can keep (MIN)", "bound"),
}

# name -> description
POLICIES, SIMULATED, BOUNDS = (
    {name: entry.description for name, entry in TABLE.items() if entry.runs_in == where} for where in get_args(RunsIn)
)


def make_policy(name: str, shape: CacheShape, config: PolicyConfig | None = None) -> Policy:
    """The policy of that name. Raises ValueError for an unknown name, a bound, or a profile of another shape."""
    from moeedge.policies.base import PolicyConfig

    config = config or PolicyConfig()
    require(name in TABLE, f"Unknown policy '{name}'. Choose from: {', '.join(TABLE)}")
    require(name not in BOUNDS, f"policy '{name}' knows the steps to come: it runs in a replay only")
    if config.profile is not None and config.profile.shape != (shape.n_layers, shape.n_experts):
        raise ValueError(f"the profile has shape {config.profile.shape}, not ({shape.n_layers}, {shape.n_experts})")
    return TABLE[name].make(shape, config)


def where_simulated(name: str) -> str:
    """A sentence on a policy that the engine lacks, after the list of those that it has; empty for unknown names."""
    if name not in SIMULATED:
        return ""
    own = f"; its prefetch alone is {name}-prefetch" if f"{name}-prefetch" in POLICIES else ""
    return f" {name} runs in moeedge lab replay and simulate{own}."


def expand_names(names: Sequence[str]) -> list[str]:
    """The names; "all" among them stands for every policy but the bounds and none."""
    return [name for name in POLICIES | SIMULATED if name != "none"] if "all" in names else list(names)


def ignored_ablations(name: str, ablations: frozenset[str]) -> list[str]:
    """The ablations that do not change the policy of that name, sorted; never "no-sd", which the engine heeds."""
    heeded = TABLE[name].ablations
    return [] if heeded == "all" else sorted(ablations - heeded - {"no-sd"})
