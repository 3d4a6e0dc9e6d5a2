"""MoESD's model of a step's time: ten parameters, from which speed-ups at any batch size and draft length follow.

"MoESD: Unveil Speculative Decoding's Potential for Accelerating Sparse MoE", section 3.3 and Algorithm 1. For t tokens
in one batch, E experts of which K per token are active:

  T_T(t)   = bias + k1 * G(t) + k2 * N(t) + k3 * G(t * K / N(t))
  T_D(t)   = draft_bias + draft_k * G(t)
  T_rej(t) = reject_bias + reject_k * t
  G(t)     = s^t up to the ridge lambda * RP, from there on its tangent: a roofline with a soft knee (Eq. 11)
  N(t)     = E * (1 - (1 - K/E)^t), experts in use (Eq. 8)

On a GPU all experts of a layer are computed at the same time, so that the busiest counts. A CPU computes one after the
other. The form `in_sequence` is ours: its last term is k3 * N(t) * G(t * K / N(t)).

RP is the ridge point of the hardware, here in tokens: how many must share a loaded weight until computing takes as long
as loading. A plain step of B sequences has t = B, its verification t = B * (gamma + 1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeedge import speculation
from moeedge.analysis.expert_counts import tokens_per_expert, uniform_unique

FloatArray = NDArray[np.float64]


def roofline(n_tokens: float | FloatArray, ridge_tokens: float, growth: float) -> FloatArray:
    """G(t) of MoESD, Eq. 11, of any shape: growth^t, and its tangent beyond `ridge_tokens`; 0 for no tokens."""
    tokens = np.asarray(n_tokens, dtype=np.float64)
    log_growth = math.log(growth)
    bent = np.exp(np.minimum(tokens, ridge_tokens) * log_growth)
    values = bent * (1 + np.maximum(tokens - ridge_tokens, 0.0) * log_growth)
    return np.asarray(np.where(tokens > 0, values, 0.0))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a model runs on."""

    bytes_per_s: float  # of memory, for weights
    flops: float  # operations per second, as its kernels reach them

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.flops > 0):
            raise ValueError("bytes_per_s and flops must be > 0")

    def ridge_tokens(self, bytes_per_weight: float) -> float:
        """RP: tokens at which two operations per weight and token take as long as loading the weight."""
        return self.flops / self.bytes_per_s * bytes_per_weight / 2


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """The fitted parameters, times in seconds, of one model with its draft on one machine."""

    n_experts: int  # E
    n_used: int  # K
    ridge_point: float  # RP, tokens
    bias_s: float
    k1_s: float
    k2_s: float
    k3_s: float
    draft_bias_s: float
    draft_k_s: float
    reject_bias_s: float
    reject_k_s: float
    ridge_share: float  # lambda
    growth: float  # s
    in_sequence: bool = False  # experts are computed one after the other; False: as MoESD prints it

    @property
    def ridge_tokens(self) -> float:
        """lambda * RP."""
        return self.ridge_share * self.ridge_point

    def with_used(self, n_used: int) -> StepModel:
        """The same with another number of active experts per token (MoESD, section 4.2)."""
        return replace(self, n_used=n_used)

    def parts_s(self, n_tokens: float) -> dict[str, float]:
        """T_T(t) by its four terms: fixed, dense (k1), experts (k2), load (k3)."""
        n_active = uniform_unique(self.n_experts, self.n_used, n_tokens)
        load = tokens_per_expert(self.n_experts, self.n_used, n_tokens)
        return {
            "fixed": self.bias_s,
            "dense": self.k1_s * self._g(n_tokens),
            "experts": self.k2_s * n_active,
            "load": self.k3_s * self._g(load) * (n_active if self.in_sequence else 1.0),
        }

    def _g(self, n_tokens: float) -> float:
        return float(roofline(n_tokens, self.ridge_tokens, self.growth))

    def target_s(self, n_tokens: float) -> float:
        """T_T(t)."""
        return sum(self.parts_s(n_tokens).values())

    def draft_s(self, n_tokens: float) -> float:
        """T_D(t): one pass of the draft over t sequences."""
        return self.draft_bias_s + self.draft_k_s * self._g(n_tokens)

    def reject_s(self, n_tokens: float) -> float:
        """T_rej(t)."""
        return self.reject_bias_s + self.reject_k_s * n_tokens

    def target_efficiency(self, batch_size: int, gamma: int) -> float:
        """T_T(B, 1) / T_T(B, gamma)."""
        return speculation.target_efficiency(self.target_s(batch_size), self.target_s(batch_size * (gamma + 1)))

    def speed_up(self, n_tokens: float, n_drafts: float, batch_size: int = 1) -> float:
        """Speculative over plain decoding of `batch_size` sequences (Eq. 4).

        n_tokens, n_drafts: of one sequence and step; n_drafts is gamma, or less on average where drafts end early.
        """
        n_verified = batch_size * (n_drafts + 1)
        return speculation.speed_up(
            n_tokens,
            n_drafts,
            target_s=self.target_s(batch_size),
            verify_s=self.target_s(n_verified),
            draft_s=self.draft_s(batch_size),
            reject_s=self.reject_s(n_verified),
        )


@dataclass(frozen=True)
class Acceptance:
    """How many drafts are accepted, counted on steps of the longest drafts."""

    at_least: tuple[float, ...]  # [gamma]: share of steps that accept 1, 2, ... drafts, of those that ask for so many
    drafted: tuple[float, ...]  # [gamma]: share of these steps that have so many: a draft ends with the text
    n_steps: int

    def tokens(self, gamma: int) -> float:
        """Expected tokens of a step with `gamma` drafts, at most as many as were counted. Raises ValueError beyond."""
        self._check(gamma)
        return 1.0 + sum(self.at_least[:gamma])

    def drafts(self, gamma: int) -> float:
        """Expected drafts of such a step. Raises ValueError beyond."""
        self._check(gamma)
        return sum(self.drafted[:gamma])

    def _check(self, gamma: int) -> None:
        if gamma > len(self.at_least):
            raise ValueError(f"acceptance was counted for drafts of up to {len(self.at_least)} tokens, not {gamma}")


@dataclass(frozen=True)
class DraftCount:
    """Drafts of one step."""

    n_asked: int  # at most gamma; fewer at the end of an answer
    n_drafted: int  # fewer where the draft model predicts the end of the text
    n_accepted: int


def count_acceptance(steps: Iterable[DraftCount], gamma: int) -> Acceptance:
    """Counts accepted drafts by place. A draft that ends early is rejected from there on: it gives no more tokens."""
    asked = [0] * gamma
    drafted = [0] * gamma
    accepted = [0] * gamma
    n_steps = 0
    for step in steps:
        n_steps += 1
        for index in range(min(step.n_asked, gamma)):
            asked[index] += 1
            drafted[index] += step.n_drafted > index
            accepted[index] += step.n_accepted > index

    def shares(counts: Sequence[int]) -> tuple[float, ...]:
        return tuple(count / n if n else 0.0 for count, n in zip(counts, asked, strict=True))

    return Acceptance(shares(accepted), shares(drafted), n_steps)


@dataclass(frozen=True)
class Outlook:
    """A predicted speed-up in one setting."""

    batch_size: int
    gamma: int
    tokens_per_step: float
    target_efficiency: float
    speed_up: float
    beyond_measured: bool  # the verification has more tokens than any batch that was measured


def outlooks(
    model: StepModel,
    acceptance: Acceptance,
    *,
    gammas: Sequence[int],
    batch_sizes: Sequence[int],
    max_tokens: int,
) -> list[Outlook]:
    """Predictions for all combinations. max_tokens: of the largest measured batch."""
    return [
        Outlook(
            batch_size,
            gamma,
            acceptance.tokens(gamma),
            model.target_efficiency(batch_size, gamma),
            model.speed_up(acceptance.tokens(gamma), acceptance.drafts(gamma), batch_size),
            batch_size * (gamma + 1) > max_tokens,
        )
        for batch_size, gamma in itertools.product(batch_sizes, gammas)
    ]
