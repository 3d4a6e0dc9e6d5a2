"""What can be left out of MoE-SpAc, by the names of its Table 4; no imports, so that `--help` stays quick.

What every scheduling policy is: it sees the activations of each step and says what should lie on the device.

The engine calls it, and so will a replay and a simulator; a policy is pure NumPy with no clock, file or thread. Twice
per step: after verification `observe` and `plan`, and, once the draft's tokens are known, `plan` again, so that what
the next verification will need can be moved in time.

    policy.observe(observation)                     # the verification that just ended
    plan = policy.plan(resident, upcoming)          # upcoming: [the token that the target added]
    plan = policy.plan(resident, upcoming, hints)   # upcoming: [that token, then the drafts]

Some systems plan once more before every layer of the verification (`LayerPolicy`), from predictions that need hidden
states. Whoever drives the policy makes those and hands them in as `Hints`; a policy says in `needs` what it would like
to have, and does without where there is none. `traits` says how a system executes what it plans, as far as that differs
from the engine's rules (experts that are not resident are computed on the CPU, one pool of slots for all layers): the
replay and the simulator obey them, the engine has its own rules.

Utilities lie in 0..K (MoE-SpAc, section 3.2); tau in {1..K} separates hot from cold, layer by layer. K + 1 is the score
of an expert in use (Appendix D): the native library gives it, by pinning the slots that a computation reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

ABLATIONS: dict[str, str] = {
    "no-spec-ue": "binary utilities: used in the last step or not (K = 1)",
    "no-ada-bc": "fixed boundaries of the utility's transitions, 3 up and 1 down (spac-paper); nothing fitted (spac)",
    "no-het-wb": "a fixed threshold, tau = 2",
    "no-prefetch": "what was used first stays for good",
    "no-evict": "nothing makes room for anything once the slots are full",
    "no-sd": "no speculation (the engine's draft length is 0)",
}


IntArray = NDArray[np.integer[Any]]
Resident = NDArray[np.bool_] | NDArray[np.uint8]  # [n_layers, n_experts]: 0 absent, 1 resident, 2 on its way

REQUIRED_INPUTS: dict[str, str] = {
    "draft-inputs": "the draft's attention outputs, put through the target's routers (SP-MoE)",
    "block-inputs": "the input of each MoE block, put through the next layers' routers (Fate, AdapMoE, HybriMoE)",
    "router-scores": "the router's probabilities of all experts (Observation.router_scores)",
    "draft-states": "the draft's last hidden states, one per token that it was given (Hints.states)",
}


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class CacheShape:
    """The slots that there are: layers whose experts are alike form a group, which has one pool of slots."""

    n_layers: int
    n_experts: int
    group: NDArray[np.int32]  # [n_layers], -1: a layer without experts
    capacity: NDArray[np.int32]  # [n_groups], slots

    def __post_init__(self) -> None:
        if self.n_layers < 1 or self.n_experts < 1:
            raise ValueError(f"no cache has {self.n_layers} layers of {self.n_experts} experts")
        if self.group.shape != (self.n_layers,):
            raise ValueError(f"group must have shape ({self.n_layers},), not {self.group.shape}")
        if self.group.min() < -1 or self.group.max() >= self.capacity.size:
            raise ValueError(f"a group is not in -1..{self.capacity.size - 1}")
        if self.capacity.size and self.capacity.min() < 0:
            raise ValueError("a capacity is negative")

    @classmethod
    def uniform(cls, n_layers: int, n_experts: int, n_slots: int) -> CacheShape:
        """All layers alike: one group of `n_slots` slots."""
        return cls(n_layers, n_experts, np.zeros(n_layers, dtype=np.int32), np.array([n_slots], dtype=np.int32))

    @property
    def n_groups(self) -> int:
        """Pools of slots."""
        return int(self.capacity.size)


@dataclass(frozen=True, eq=False)
class Observation:
    """What one verification, plain decode or prefill told.

    `ids` and `weights` hold the experts of every token of the batch, the router's first choice first; a layer that saw
    only some of the tokens holds -1 for the others. The batch is the token emitted last and the drafts behind it, of
    which the first `n_accepted` became text.
    """

    counts: IntArray  # [n_layers, n_experts], activations
    n_tokens: int  # of the batch
    n_accepted: int  # drafts that became text
    tokens: NDArray[np.int32] | None = None  # [n_tokens], vocabulary ids
    ids: NDArray[np.int32] | None = None  # [n_layers, n_tokens, k], -1: unused
    weights: NDArray[np.float32] | None = None  # the same shape
    prefill: bool = False
    router_scores: NDArray[np.float32] | None = None  # [n_layers, n_tokens, n_experts], probabilities


@dataclass(frozen=True, eq=False)
class ExpertPrediction:
    """Which experts the tokens to come will use, foretold outside the policy, from hidden states.

    A layer or token of which nothing is known holds -1. `layer_ids[layer]` says nothing about how far ahead the
    prediction was made: before layer l of a verification, "next-gate" fills the rows behind l that it can reach.
    """

    layer_ids: NDArray[np.int32]  # [n_layers, n_tokens, k], the likeliest first, -1: unknown
    source: str  # "draft-router", "next-gate", "stand-in", "draft-states"
    scores: NDArray[np.float32] | None = None  # the same shape, the router's probabilities
    hidden_states: NDArray[np.float32] | None = (
        None  # [n_states, n_embd], the draft's, of the first tokens of the batch
    )

    @classmethod
    def of_hidden_states(cls, hidden_states: NDArray[np.float32], n_layers: int) -> ExpertPrediction:
        """The draft's hidden states, which foretell no expert by themselves."""
        return cls(
            layer_ids=np.empty((n_layers, 0, 0), dtype=np.int32), source="draft-states", hidden_states=hidden_states
        )


@dataclass(frozen=True)
class ExecutionModel:
    """How a system executes its plans; the defaults are the engine's rules."""

    # experts that are missing are loaded on demand and computed on the device, through a staging buffer: each is one
    # transfer. What then stays is what the plan after `observe` uploads: no second transfer for those just used.
    device_only: bool = False
    per_layer_slots: bool = False  # the policy keeps to an even share of its pool for every layer
    layerwise: bool = False  # a layer's experts are all on one side
    prefetch_within_step: bool = False  # a LayerPolicy: plans again before every layer of a verification
    batched_io: bool = False  # one transfer for all that one plan uploads, without waiting between them
    speculation: bool = True  # made for, or at least run with, a draft model


@dataclass(frozen=True, eq=False)
class Plan:
    """What should happen until the next plan; it replaces what the last one left undone.

    Arrays may be reused by the policy's next plan: whoever keeps a plan copies it.
    """

    tau: NDArray[np.float32]  # [n_layers], 1..K
    utility: NDArray[np.float32]  # [n_layers, n_experts], 0..K
    uploads: NDArray[np.int32]  # [n, 2] layer and expert, in queue order
    priority: NDArray[np.uint8]  # [n], K first; first in, first out by layer within a level
    victims: NDArray[np.int32]  # [m, 2] layer and expert, lowest utility first
    victim_utility: NDArray[np.float32]  # [m]
    # [n_layers, n_experts], activations that the next batch is expected to bring, of a policy that estimates them. Who
    # asks whether an expert is called hot (used at least once) reads this, or else whether its utility is at least 1.
    expected: NDArray[np.float32] | None = None


class Policy(Protocol):
    """Decides which experts live on the device."""

    name: str
    execution_model: ExecutionModel
    required_inputs: frozenset[str]  # of NEEDS

    def observe(self, observation: Observation) -> None:
        """Takes in what a step activated."""

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """What to move now; `upcoming` are the token ids known of the next batch, none at worst."""

    def reset(self) -> None:
        """A new conversation starts; what was learned about the model may stay."""


@runtime_checkable
class LayerPolicy(Policy, Protocol):
    """One that plans within a verification, too (`traits.prefetch_within_step`)."""

    def plan_layer(self, layer: int, resident: Resident, hints: ExpertPrediction | None = None) -> Plan:
        """What to move while `layer` is computed, mostly for the layers behind it; nothing of `layer` is a victim.

        The plan before layer 0 is that of `plan`. Where time plays no part (replay), calling this for every layer, or
        `plan` once with the hints of all layers, comes to the same experts as far as slots are kept per layer.
        """


def check_plan(plan: Plan, shape: CacheShape, resident: Resident, cap: int) -> None:
    """Raises ValueError where a plan breaks a rule that the mover relies on. For tests: it takes its time."""
    cells = (shape.n_layers, shape.n_experts)
    for name, array, dtype, want in (
        ("tau", plan.tau, np.float32, (shape.n_layers,)),
        ("utility", plan.utility, np.float32, cells),
        ("uploads", plan.uploads, np.int32, (plan.priority.size, 2)),
        ("levels", plan.priority, np.uint8, (len(plan.uploads),)),
        ("victims", plan.victims, np.int32, (plan.victim_utility.size, 2)),
        ("victim_utility", plan.victim_utility, np.float32, (len(plan.victims),)),
    ):
        _require(array.dtype == dtype, f"{name} is {array.dtype}, not {np.dtype(dtype)}")
        _require(array.shape == want, f"{name} has shape {array.shape}, not {want}")
        _require(array.flags.c_contiguous, f"{name} is not contiguous")
    _require(bool(np.isfinite(plan.utility).all()), "a utility is not finite")
    _require(plan.utility.min() >= 0 and plan.utility.max() <= cap, f"a utility is not in 0..{cap}")
    _require(plan.tau.min() > 0 and plan.tau.max() <= cap, f"a tau is not in 1..{cap}")
    up, down = tuple(plan.uploads.T), tuple(plan.victims.T)
    for name, pairs in (("upload", plan.uploads), ("victim", plan.victims)):
        _require(bool((pairs >= 0).all() and (pairs < cells).all()), f"an {name} does not exist")
        _require(len({tuple(pair) for pair in pairs.tolist()}) == len(pairs), f"an {name} occurs twice")
    _require(bool((shape.group[plan.uploads[:, 0]] >= 0).all()), "an upload is of a layer without experts")
    _require(not np.any(resident[up]), "an upload is already there, or on its way")
    _require(bool(np.all(resident[down] == 1)), "a victim is not resident")
    _require(bool(np.all(np.diff(plan.priority.astype(int)) <= 0)), "levels rise")
    _require(
        plan.priority.size == 0 or 1 <= plan.priority.min() <= plan.priority.max() <= cap, f"a level is not in 1..{cap}"
    )
    same_level = np.diff(plan.priority.astype(int)) == 0
    _require(bool(np.all(np.diff(plan.uploads[:, 0])[same_level] >= 0)), "a level is not in the order of layers")
    _require(bool(np.all(np.diff(plan.victim_utility) >= 0)), "victims are not in the order of their utility")
    for group, capacity in enumerate(shape.capacity):
        layers = shape.group == group
        n_in = int(np.count_nonzero(layers[plan.uploads[:, 0]]))
        n_out = int(np.count_nonzero(layers[plan.victims[:, 0]]))
        free = int(capacity) - int(np.count_nonzero(resident[layers]))
        _require(n_in <= max(free, 0) + n_out, f"group {group}: {n_in} uploads into {free} free slots, {n_out} victims")


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise ValueError(message)
