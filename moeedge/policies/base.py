"""The interface of a scheduling policy, which observes routing and plans which experts to keep on the device.

A policy is pure NumPy, without clock, files or threads. `moeedge.scheduler.driver.StepDriver` calls it, for the engine,
the replay and the simulator alike:

    policy.observe(observation)                        # the verification that just ended
    plan = policy.plan(resident, tokens)               # tokens: [the token that the target added]
    plan = policy.plan(resident, tokens, prediction)   # tokens: [that token, then the drafts]

Some systems also plan before every layer of the verification (`LayerPolicy`), from predictions that need hidden states.
The caller makes these predictions. A policy lists in `required_inputs` what it reads, and works without an input that
is missing. `execution_model` states how the published system executes its plans, where that differs from the engine's
rules (the CPU computes experts that are not resident; all layers share one pool of slots). The replay and the simulator
follow it.

Utilities are in 0..K (MoE-SpAc, section 3.2); tau in {1..K} separates hot from cold, per layer. An expert in use has
score K + 1 (Appendix D): the native library enforces it by pinning the slots that a computation reads.

A flat expert index, `flat_ids`, is layer * n_experts + expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency
from moeedge.policies.cost_model import CostModel

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]
IndexArray = NDArray[np.intp]
IntArray = NDArray[np.integer[Any]]
Resident = NDArray[np.bool_] | NDArray[np.uint8]  # [n_layers, n_experts], bool or values of Residency

# MoE-SpAc, Table 4
ABLATIONS: dict[str, str] = {
    "no-spec-ue": "binary utilities: used in the last step or not (K = 1)",
    "no-ada-bc": "fixed boundaries of utility transitions, 3 up and 1 down (spac-paper); no fitted weights (spac)",
    "no-het-wb": "a fixed threshold, tau = 2",
    "no-prefetch": "only used experts are uploaded, and they stay",
    "no-evict": "experts are uploaded to free slots only",
    "no-sd": "no speculation: the draft length is 0",
}
_FIXED_TAU = 2.0  # "no-het-wb"

REQUIRED_INPUTS: dict[str, str] = {
    "draft-inputs": "the draft's attention outputs, put through the target's routers (SP-MoE)",
    "block-inputs": "the input of each MoE block, put through the next layers' routers (Fate, AdapMoE, HybriMoE)",
    "router-scores": "the router's probabilities of all experts (Observation.router_scores)",
    "draft-states": "the draft's last hidden states, one per token of its input (ExpertPrediction.hidden_states)",
}


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class CacheShape:
    """Slots of an expert cache. Layers with experts of equal size form a group, which has one pool of slots."""

    n_layers: int
    n_experts: int
    group: NDArray[np.int32]  # [n_layers], -1: a layer without experts
    capacity: NDArray[np.int32]  # [n_groups], slots

    def __post_init__(self) -> None:
        if self.n_layers < 1 or self.n_experts < 1:
            raise ValueError(f"a cache needs layers and experts, not {self.n_layers} and {self.n_experts}")
        if self.group.shape != (self.n_layers,):
            raise ValueError(f"group must have shape ({self.n_layers},), not {self.group.shape}")
        if self.group.min() < -1 or self.group.max() >= self.capacity.size:
            raise ValueError(f"a group is not in -1..{self.capacity.size - 1}")
        if self.capacity.size and self.capacity.min() < 0:
            raise ValueError("a capacity is negative")

    @classmethod
    def uniform(cls, n_layers: int, n_experts: int, n_slots: int) -> CacheShape:
        """One group of all layers with `n_slots` slots."""
        return cls(n_layers, n_experts, np.zeros(n_layers, dtype=np.int32), np.array([n_slots], dtype=np.int32))

    @property
    def n_groups(self) -> int:
        """Number of pools."""
        return int(self.capacity.size)

    @property
    def expert_layers(self) -> IndexArray:
        """Layers that have experts, in order."""
        return np.flatnonzero(self.group >= 0)

    def pools(self) -> Iterator[tuple[IndexArray, int]]:
        """Yields layers and slots of every group that has layers."""
        for group, capacity in enumerate(self.capacity.tolist()):
            layers = np.flatnonzero(self.group == group)
            if layers.size:
                yield layers, capacity


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyConfig:
    """Settings of a policy. The defaults are MoE-SpAc's (section 4.1). Raises ValueError for values out of range."""

    gamma: int = 8  # draft length
    cap: int = 4  # K, the highest utility
    forgetting: float = 0.1  # lambda: how fast spac-paper's boundaries move
    ablations: frozenset[str] = frozenset()
    cost_model: CostModel | None = None  # None: no balancing, every expert that fits is hot
    profile: NDArray[Any] | None = None  # [n_layers, n_experts] activations, for static and fiddler
    predictor_bytes: int = 64 << 20  # memory of each of spac's two predictors; 0: no predictors
    cutoff_layer: int | None = None  # layers that sp-moe prefetches for; None: derived from the cost model
    # per step, of all layers, that the link carries; None: not limited or not known. Loads on demand are not limited
    max_uploads: float | None = None

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ValueError(f"gamma (--draft-max) must be 0 or more, not {self.gamma}")
        if not 1 <= self.cap <= 64:
            raise ValueError(f"the utility cap (-K) must be from 1 to 64, not {self.cap}")
        if not 0 <= self.forgetting <= 1:
            raise ValueError(f"the forgetting factor (--forgetting) must be from 0 to 1, not {self.forgetting:g}")
        if self.cutoff_layer is not None and self.cutoff_layer < 0:
            raise ValueError(f"the cutoff layer must be >= 0, not {self.cutoff_layer}")
        if self.max_uploads is not None and not self.max_uploads >= 0:  # NaN too
            raise ValueError(f"the uploads per step must be >= 0, not {self.max_uploads}")
        if self.predictor_bytes < 0:
            raise ValueError(f"the memory of predictors must be >= 0 bytes, not {self.predictor_bytes}")
        unknown = sorted(self.ablations - set(ABLATIONS))
        if unknown:
            raise ValueError(f"--ablate does not know '{unknown[0]}'; choose from: {', '.join(ABLATIONS)}")

    @property
    def uploads_per_plan(self) -> int | None:
        """The most transfers that one plan can need: a link with unused time carries a part of an expert more."""
        return None if self.max_uploads is None else math.ceil(self.max_uploads)

    @property
    def binary(self) -> bool:
        """Whether utilities say only if the last step used an expert."""
        return "no-spec-ue" in self.ablations

    @property
    def effective_cap(self) -> int:
        """K under the ablations."""
        return 1 if self.binary else self.cap

    @property
    def fixed_tau(self) -> float | None:
        """The threshold that replaces the balancer's; None: the balancer decides."""
        return min(_FIXED_TAU, self.effective_cap) if "no-het-wb" in self.ablations else None

    @property
    def used_only(self) -> bool:
        """Whether only experts of the last step may be uploaded, to free slots."""
        return "no-prefetch" in self.ablations

    @property
    def evicts(self) -> bool:
        """Whether experts may be evicted."""
        return not self.used_only and "no-evict" not in self.ablations


@dataclass(frozen=True, eq=False)
class Observation:
    """Routing of one verification, plain decode or prefill.

    The batch is the token emitted last and the drafts after it, of which the first `n_accepted` became text. `ids` and
    `weights` hold the experts of every token, the router's first choice first; -1 where a layer did not see a token.
    """

    counts: IntArray  # [n_layers, n_experts], activations
    n_tokens: int  # of the batch
    n_accepted: int  # drafts
    tokens: NDArray[np.int32] | None = None  # [n_tokens], vocabulary ids, -1: unknown
    ids: NDArray[np.int32] | None = None  # [n_layers, n_tokens, k]
    weights: NDArray[np.float32] | None = None  # [n_layers, n_tokens, k]
    prefill: bool = False
    router_scores: NDArray[np.float32] | None = None  # [n_layers, n_tokens, n_experts], probabilities


@dataclass(frozen=True, eq=False)
class ExpertPrediction:
    """Experts that the next tokens are predicted to use, made outside the policy from hidden states.

    Layers and tokens without a prediction hold -1. Before layer l of a verification, "next-gate" fills the rows of the
    layers after l that it can reach.
    """

    layer_ids: NDArray[np.int32]  # [n_layers, n_tokens, k], most likely first
    source: str  # "draft-router", "next-gate", "draft-states", or the name of a simulated predictor
    scores: NDArray[np.float32] | None = None  # [n_layers, n_tokens, k], the router's probabilities
    hidden_states: NDArray[np.float32] | None = None  # [n_states, n_embd] of the draft, for the batch's first tokens


@dataclass(frozen=True)
class ExecutionModel:
    """How a system executes its plans. The defaults are the engine's rules."""

    # missing experts are loaded on demand into a staging buffer and computed on the device: one transfer each. Those
    # that the plan after `observe` uploads are copied from there, without a second transfer.
    device_only: bool = False
    per_layer_slots: bool = False  # the policy keeps every layer to an even share of its pool
    layerwise: bool = False  # all experts of a layer are resident, or none
    prefetch_within_step: bool = False  # a LayerPolicy: plans again before every layer of a verification
    batched_io: bool = False  # one transfer for all uploads of a plan, without waiting between them
    speculation: bool = True  # runs with a draft model
    # a DemandPolicy: experts loaded on demand take slots at once. The host waits for each layer's routing
    keeps_loads: bool = False
    cached_tokens_max: int | None = None  # of a batch; a larger one finds no expert resident and leaves none behind


@dataclass(frozen=True, eq=False)
class Plan:
    """Transfers until the next plan, which replaces what is still queued.

    The policy may reuse the arrays for its next plan: copy a plan to keep it.
    """

    tau: NDArray[np.float32]  # [n_layers], 1..K
    utility: NDArray[np.float32]  # [n_layers, n_experts], 0..K
    uploads: NDArray[np.int32]  # [n, 2] layer and expert, in queue order
    priority: NDArray[np.uint8]  # [n], K first; uploads of equal priority in the order of layers
    victims: NDArray[np.int32]  # [m, 2] layer and expert, lowest utility first
    victim_utility: NDArray[np.float32]  # [m]
    # [n_layers, n_experts], activations expected in the next batch, from policies that estimate them. An expert is
    # predicted hot (used at least once) by this array, or, without it, by a utility of at least 1.
    expected: NDArray[np.float32] | None = None


class Policy(Protocol):
    """Decides which experts live on the device."""

    name: str
    execution_model: ExecutionModel
    required_inputs: frozenset[str]  # keys of REQUIRED_INPUTS

    def observe(self, observation: Observation) -> None:
        """Learns from the routing of a step."""

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans transfers; `tokens` are the known vocabulary ids of the next batch, possibly none."""

    def reset(self) -> None:
        """A new conversation begins. What was learned about the model may stay."""


@runtime_checkable
class LayerPolicy(Policy, Protocol):
    """A policy that also plans within a verification (`ExecutionModel.prefetch_within_step`)."""

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        """Plans transfers while `layer` is computed, mostly for the layers after it. No expert of `layer` is a victim.

        Called before each layer with experts, the first one included, after the plans of `plan`. What it uploads is of
        use to later layers alone: without time (replay) it is there for the next one.
        """


@dataclass(frozen=True)
class LookaheadStatus:
    """What a policy makes of the drafts: used where this is measured to pay, in the session that runs."""

    used: bool  # by the newest plan that knew drafts
    # of hits over those of the same policy without it, 0.1: a tenth more; None: not known yet
    gain: float | None = None
    reason: str = ""  # why it is not used, a clause in lower case: "it does not pay here"
    reads_drafts: bool = True  # False: the next batch's drafts change no plan, so that none is made for them


@runtime_checkable
class LookaheadPolicy(Policy, Protocol):
    """A policy that decides whether it plans by the drafts."""

    @property
    def lookahead(self) -> LookaheadStatus:
        """The newest judgement."""


@runtime_checkable
class DemandPolicy(Policy, Protocol):
    """A policy that gives experts loaded on demand their slots within a step (`ExecutionModel.keeps_loads`)."""

    def plan_load(self, layer: int, experts: IndexArray, resident: Resident) -> Plan:
        """Uploads of those of `experts` [n] that are absent, and their victims; `layer` is computed next with them."""


@runtime_checkable
class CutoffPolicy(Policy, Protocol):
    """A policy that prefetches for the first layers only (SP-MoE, section 3.2)."""

    def cutoff(self, n_critical: int) -> int:
        """Layers with experts that it prefetches for, where each token has `n_critical` critical experts per layer."""


class ScoringPolicy:
    """Base of policies that order experts by a score; arrays [n_layers, n_experts].

    A subclass sets `name`, and in `observe` or `plan` the scores and the utilities.
    """

    name: str
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._score: FloatArray = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        self._utility: FloatArray = np.zeros(self._score.shape, dtype=np.float32)

    @property
    def score(self) -> FloatArray:
        """By what experts are ordered, float32 [n_layers, n_experts]; of the last step or plan."""
        return self._score

    def observe(self, observation: Observation) -> None:
        """Learns from the routing of a step."""

    def reset(self) -> None:
        """Keeps what was learned."""


def limit_uploads(plan: Plan, score: FloatArray, max_uploads: int | None, staged: BoolArray | None = None) -> Plan:
    """The plan with at most `max_uploads` transfers: the uploads of the highest `score` [n_layers, n_experts].

    staged: bool [n_layers, n_experts], loaded on demand by the last step, so that keeping them costs no transfer.
    """
    if max_uploads is None or len(plan.uploads) <= max_uploads:
        return plan
    layers, experts = plan.uploads.T
    kept = np.zeros(len(layers), dtype=np.bool_) if staged is None else staged[layers, experts]
    moved = np.flatnonzero(~kept)
    kept[moved[np.argsort(-score[layers[moved], experts[moved]], kind="stable")[:max_uploads]]] = True
    return replace(plan, uploads=plan.uploads[kept], priority=plan.priority[kept])


def check_plan(plan: Plan, shape: CacheShape, resident: Resident, cap: int) -> None:
    """Raises ValueError where a plan breaks a rule that the mover relies on. Slow: for tests."""
    size = (shape.n_layers, shape.n_experts)
    for name, array, dtype, expected_shape in (
        ("tau", plan.tau, np.float32, (shape.n_layers,)),
        ("utility", plan.utility, np.float32, size),
        ("uploads", plan.uploads, np.int32, (plan.priority.size, 2)),
        ("priority", plan.priority, np.uint8, (len(plan.uploads),)),
        ("victims", plan.victims, np.int32, (plan.victim_utility.size, 2)),
        ("victim_utility", plan.victim_utility, np.float32, (len(plan.victims),)),
    ):
        _require(array.dtype == dtype, f"{name} is {array.dtype}, not {np.dtype(dtype)}")
        _require(array.shape == expected_shape, f"{name} has shape {array.shape}, not {expected_shape}")
        _require(array.flags.c_contiguous, f"{name} is not contiguous")
    _require(bool(np.isfinite(plan.utility).all()), "a utility is not finite")
    _require(plan.utility.min() >= 0 and plan.utility.max() <= cap, f"a utility is not in 0..{cap}")
    _require(plan.tau.min() > 0 and plan.tau.max() <= cap, f"a tau is not in 1..{cap}")
    for name, pairs in (("upload", plan.uploads), ("victim", plan.victims)):
        _require(bool((pairs >= 0).all() and (pairs < size).all()), f"an {name} does not exist")
        _require(len({tuple(pair) for pair in pairs.tolist()}) == len(pairs), f"an {name} occurs twice")
    _require(bool((shape.group[plan.uploads[:, 0]] >= 0).all()), "an upload is of a layer without experts")
    _require(not np.any(resident[tuple(plan.uploads.T)]), "an upload is resident or in flight")
    _require(bool(np.all(resident[tuple(plan.victims.T)] == Residency.RESIDENT)), "a victim is not resident")
    priority_step = np.diff(plan.priority.astype(int))
    _require(bool(np.all(priority_step <= 0)), "priorities rise")
    _require(bool(np.all((plan.priority >= 1) & (plan.priority <= cap))), f"a priority is not in 1..{cap}")
    layer_step = np.diff(plan.uploads[:, 0])
    _require(bool(np.all(layer_step[priority_step == 0] >= 0)), "equal priorities are not in the order of layers")
    _require(bool(np.all(np.diff(plan.victim_utility) >= 0)), "victims are not in the order of their utility")
    for group, capacity in enumerate(shape.capacity.tolist()):
        layers = shape.group == group
        n_uploads = int(np.count_nonzero(layers[plan.uploads[:, 0]]))
        n_victims = int(np.count_nonzero(layers[plan.victims[:, 0]]))
        free = max(capacity - int(np.count_nonzero(resident[layers])), 0)
        _require(n_uploads <= free + n_victims, f"group {group}: {n_uploads} uploads, {free} free, {n_victims} victims")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
