"""The interface of a scheduling policy, which observes routing and plans which experts to keep on the device.

A policy is pure NumPy, without clock, files or threads. `moeedge.scheduler.driver.StepDriver` calls it in the order
given there. A policy lists in `required_inputs` what it reads, and works without an input that is missing.
`execution_model` states how the published system executes its plans, where that differs from the engine's rules (the
CPU computes experts that are not resident; all layers share one pool of slots); replay and simulator follow it.

Utilities are in 0..K (MoE-SpAc, section 3.2); tau in {1..K} separates hot from cold, per layer. The score K + 1 of an
expert in use (Appendix D) is the native library's pin on its slot. A flat expert index is layer * n_experts + expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import require
from moeedge.experts import BoolArray, FloatArray, IndexArray, IntArray, Resident
from moeedge.policies.cost_model import CostModel
from moeedge.records import figure
from moeedge.run import Decision
from moeedge.speculation import check_gamma

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
        n_layers, n_experts = self.n_layers, self.n_experts
        require(n_layers >= 1 and n_experts >= 1, f"a cache needs layers and experts, not {n_layers} and {n_experts}")
        require(self.group.shape == (n_layers,), f"group must have shape ({n_layers},), not {self.group.shape}")
        is_valid = self.group.min() >= -1 and self.group.max() < self.n_groups
        require(is_valid, f"a group is not in -1..{self.n_groups - 1}")
        require((self.capacity >= 0).all(), "a capacity is negative")

    @classmethod
    def uniform(cls, n_layers: int, n_experts: int, n_slots: int) -> CacheShape:
        """One group of all layers with `n_slots` slots."""
        return cls(n_layers, n_experts, np.zeros(n_layers, dtype=np.int32), np.array([n_slots], dtype=np.int32))

    @property
    def n_groups(self) -> int:
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
    cutoff_layer: int | None = None  # layers that sp-moe* prefetch for; None: derived from the cost model
    # per step, of all layers, that the link carries; None: not limited or not known. Loads on demand are not limited
    max_uploads: float | None = None

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        require(1 <= self.cap <= 64, f"the utility cap (-K) must be from 1 to 64, not {self.cap}")
        text = f"the forgetting factor (--forgetting) must be from 0 to 1, not {self.forgetting:g}"
        require(0 <= self.forgetting <= 1, text)
        require((self.cutoff_layer or 0) >= 0, f"the cutoff layer must be >= 0, not {self.cutoff_layer}")
        # NaN fails, too
        require((self.max_uploads or 0) >= 0, f"the uploads per step must be >= 0, not {self.max_uploads}")
        require(self.predictor_bytes >= 0, f"the memory of predictors must be >= 0 bytes, not {self.predictor_bytes}")
        if unknown := sorted(self.ablations - set(ABLATIONS)):
            raise ValueError(f"--ablate does not know '{unknown[0]}'; choose from: {', '.join(ABLATIONS)}")

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
    """Experts that the next tokens are predicted to use, made outside the policy from hidden states."""

    layer_ids: NDArray[np.int32]  # [n_layers, n_tokens, k], most likely first; -1 without a prediction
    hidden_states: NDArray[np.float32] | None = None  # [n_states, n_embd] of the draft, for the batch's first tokens


@dataclass(frozen=True)
class ExecutionModel:
    """How a system executes its plans. The defaults are the engine's rules."""

    # missing experts are loaded on demand into a staging buffer and computed on the device: one transfer each. Those
    # that the plan after `observe` uploads are copied from there, without a second transfer.
    device_only: bool = False
    layerwise: bool = False  # all experts of a layer are resident, or none
    prefetch_within_step: bool = False  # plans again before every layer of a verification
    refills_within_step: bool = False  # the same, in replay and simulator alone: the engine plans between steps
    batched_io: bool = False  # one transfer for all uploads of a plan, without waiting between them
    speculation: bool = True  # runs with a draft model
    # experts loaded on demand take slots at once. The host waits for each layer's routing
    keeps_loads: bool = False
    cached_tokens_max: int | None = None  # of a batch; a larger one uses what is resident and leaves nothing behind


@dataclass(frozen=True, eq=False)
class Plan:
    """Transfers until the next plan, which replaces what is still queued and may reuse the arrays."""

    tau: NDArray[np.float32]  # [n_layers], 1..K
    utility: NDArray[np.float32]  # [n_layers, n_experts], 0..K
    uploads: NDArray[np.int32]  # [n, 2] layer and expert, in queue order
    priority: NDArray[np.uint8]  # [n], K first; uploads of equal priority in the order of layers
    victims: NDArray[np.int32]  # [m, 2] layer and expert, lowest utility first
    victim_utility: NDArray[np.float32]  # [m]
    # [n_layers, n_experts], activations expected in the next batch, from policies that estimate them. An expert is
    # predicted hot (used at least once) by this array, or, without it, by a utility of at least 1.
    expected: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class LookaheadStatus:
    """A policy's use of the drafts, which it reads where this is measured to pay, in the session that runs."""

    used: bool = figure("Whether it is in use, by the newest plan that knew drafts")
    gain: float | None = figure("Hits with it over those without, minus 1; null: not judged", default=None, least=None)
    reason: str = figure("Why it is not used, a clause; empty where it is", default="")
    reads_drafts: bool = figure("Whether plans read the drafts", default=True)

    @property
    def decision(self) -> Decision:
        """Whether experts are predicted from the draft; compares hits."""
        if self.gain is None:
            return Decision.switch("lookahead", self.used, None, self.reason)
        return Decision.switch("lookahead", self.used, 1 + self.gain, "measured", self.reason, "as many hits")


class Policy:
    """Decides which experts live on the device, by a score; arrays [n_layers, n_experts].

    A subclass sets `name`, and in `observe` or `plan` the scores and the utilities.
    """

    name: str
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset()  # keys of REQUIRED_INPUTS

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        self.shape = shape
        self._score: FloatArray = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        self._utility: FloatArray = np.zeros(self._score.shape, dtype=np.float32)
        self._tau: FloatArray = np.ones(shape.n_layers, dtype=np.float32)
        self._cap = config.cap
        self._pair_of = np.stack(np.divmod(np.arange(self._score.size), shape.n_experts), axis=1).astype(np.int32)
        # of a plan: the best of more than the link carries, which with unused time carries a part of an expert more
        self._max_uploads = None if config.max_uploads is None else math.ceil(config.max_uploads)

    @property
    def score(self) -> FloatArray:
        """By what experts are ordered, float32 [n_layers, n_experts]; of the last step or plan."""
        return self._score

    @property
    def lookahead(self) -> LookaheadStatus | None:
        """The newest judgement of a policy that decides whether it plans by the drafts; None for others."""
        return None

    def observe(self, observation: Observation) -> None:
        """Learns from the routing of a step."""

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans transfers; `tokens` are the known vocabulary ids of the next batch, possibly none."""
        raise NotImplementedError

    def _make_plan(
        self, up: IndexArray, priority: NDArray[np.uint8], down: IndexArray, expected: FloatArray | None = None
    ) -> Plan:
        """The plan of uploads, in the order of layers, and victims, lowest utility first: flat ids."""
        order = (self._cap - priority).argsort(kind="stable")
        return Plan(
            tau=self._tau,
            utility=self._utility,
            uploads=self._pair_of.take(up.take(order), axis=0),
            priority=priority.take(order),
            victims=self._pair_of.take(down, axis=0),
            victim_utility=self._utility.reshape(-1).take(down),
            expected=expected,
        )

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        """Plans transfers for the layers after `layer`, none of whose experts is a victim, while it is computed.

        Only with `prefetch_within_step` or `refills_within_step`: called before each layer with experts, the first one
        included, after the plans of `plan`. Without time (replay) its uploads are there for the next layer.
        """
        raise NotImplementedError

    def plan_load(self, layer: int, counts: IntArray, resident: Resident) -> Plan | None:
        """Uploads of the experts that `layer` lacks now, and victims, with `ExecutionModel.keeps_loads`.

        counts: activations [n_experts]. None: the layer bypasses the cache.
        """
        raise NotImplementedError

    def cutoff(self, n_critical: int) -> int:
        """Layers with experts that it prefetches for, where each token has `n_critical` critical experts per layer."""
        return self.shape.expert_layers.size

    def reset(self) -> None:
        """A new conversation begins. What was learned about the model may stay."""


def limit_uploads(plan: Plan, score: FloatArray, max_uploads: int | None, staged: BoolArray | None = None) -> Plan:
    """The plan with at most `max_uploads` transfers: the uploads of the highest `score` [n_layers, n_experts].

    staged: bool [n_layers, n_experts], loaded on demand by the last step, so that keeping them costs no transfer.
    """
    if max_uploads is None or len(plan.uploads) <= max_uploads:
        return plan
    layers, experts = plan.uploads.T
    chosen = np.zeros(len(layers), dtype=np.bool_) if staged is None else staged[layers, experts]
    moved = np.flatnonzero(~chosen)
    chosen[moved[np.argsort(-score[layers[moved], experts[moved]], kind="stable")[:max_uploads]]] = True
    return replace(plan, uploads=plan.uploads[chosen], priority=plan.priority[chosen])
