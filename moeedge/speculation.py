"""The gain of speculative decoding: the formulas of three papers, as functions of numbers.

  MoE-SpAc               section 2.1 and Appendix A.1
  MoESD                  "MoESD: Unveil Speculative Decoding's Potential for Accelerating Sparse MoE", section 3.1
  the production study   "Why MoE models get more from speculative decoding", section "Amdahl's Law decomposition"

Notation: gamma drafts per step, alpha the chance that a draft is accepted after all before it were, T_T, T_D and T_rej
the seconds of target, draft and rejection sampling. A verification computes gamma + 1 tokens: the drafts and the token
emitted last. MoESD writes T_T(B, gamma) for it, the production study T(K + 1).

More formulas of distinct experts are in `moeedge.analysis.routing_curves`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from moeedge.errors import require
from moeedge.records import quotient

# of every record that counts drafted and accepted tokens
acceptance_rate = quotient("accepted", "drafted", "Accepted over drafted tokens; null without drafts", most=1)


def check_gamma(gamma: int, *, least: int = 0, most: int | None = None, auto: bool = False) -> None:
    """Raises ValueError for a draft length out of its range. auto: the option takes that word, too."""
    words = f"{'auto or ' * auto}{least} or more" if most is None else f"{'auto or ' * auto}from {least} to {most}"
    require(least <= gamma <= (gamma if most is None else most), f"gamma (--draft-max) must be {words}, not {gamma}")


def expected_tokens(gamma: int, acceptance: float) -> float:
    """Expected tokens per verification of gamma drafts: Omega of Leviathan et al. 2023 (MoE-SpAc, Eq. 1)."""
    return sum(acceptance**n for n in range(gamma + 1))


def expected_tokens_by_position(acceptances: Sequence[float]) -> list[float]:
    """Expected tokens for gamma = 0, 1, ..., len(acceptances), where draft i has the chance acceptances[i - 1]."""
    return list(accumulate(accumulate(acceptances, mul), initial=1.0))


def acceptance_for(gamma: int, n_tokens: float) -> float:
    """The acceptance at which a verification of gamma drafts gives `n_tokens`: the inverse of `expected_tokens`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(gamma, middle) < n_tokens else (low, middle)
    return (low + high) / 2


def sigma(gamma: int, acceptance: float) -> float:
    """Tokens of a step over the most that it can give, gamma + 1 (MoESD, Eq. 5)."""
    return expected_tokens(gamma, acceptance) / (gamma + 1)


def speed_up(
    n_tokens: float, gamma: float, *, target_s: float, verify_s: float, draft_s: float, reject_s: float
) -> float:
    """Speculative over plain decoding (MoESD, Eq. 4).

    n_tokens: of a step, sigma * (gamma + 1). gamma: drafts of a step; a mean where some end early. target_s: a plain
    step, T_T(B, 1). verify_s, draft_s, reject_s: a verification, a pass of the draft, rejection sampling of a step.
    """
    return n_tokens / ((gamma * draft_s + verify_s + reject_s) / target_s)


def speed_up_by_cost(gamma: int, acceptance: float, draft_cost: float) -> float:
    """Speculative over plain decoding where T_V = T_T and draft_cost c = T_D / T_V (MoE-SpAc, section 2.1)."""
    return expected_tokens(gamma, acceptance) / (gamma * draft_cost + 1)


def target_efficiency(target_s: float, verify_s: float) -> float:
    """Time of a plain step over that of a verification, T_T(B, 1) / T_T(B, gamma) (MoESD, section 3.1)."""
    return target_s / verify_s


def speculation_pays(expert_ratio: float, gamma: int, acceptance: float) -> bool:
    """Whether a / b < Omega, with expert_ratio a / b of a verification over a plain step (MoE-SpAc, Eq. 17)."""
    return expert_ratio < expected_tokens(gamma, acceptance)


def uniform_unique(n_experts: int, n_used: int, n_tokens: float) -> float:
    """Expected distinct experts of B tokens: N * (1 - (1 - k/N)^B), MoESD's N(t) in Eq. 8. Raises ValueError."""
    check_expert_shape(n_experts, n_used)
    return n_experts * (1.0 - math.pow(1.0 - n_used / n_experts, n_tokens))


def check_expert_shape(n_experts: int, n_used: int) -> None:
    """Raises ValueError unless 0 < k <= N."""
    require(0 < n_used <= n_experts, f"experts per token must be in 1..{n_experts}, not {n_used}")


def verification_ratio(expert_share: float, expert_ratio: float) -> float:
    """T(K + 1) / T(1) = f * unique(K + 1) / k + 1 - f (the production study, Amdahl's law).

    expert_share: f, the share of a plain step that loads routed experts. expert_ratio: unique(K + 1) / k.
    """
    return expert_share * expert_ratio + (1 - expert_share)


def expert_share_for(ratio: float, expert_ratio: float) -> float:
    """The f at which `verification_ratio` gives `ratio`; raises ValueError where expert_ratio is 1."""
    require(expert_ratio != 1, "an expert ratio of 1 says nothing about the share of experts")
    return (ratio - 1) / (expert_ratio - 1)


def arithmetic_intensity(n_tokens: float, n_used: int, n_experts: int, n_shared: int = 0) -> float:
    """Operations per loaded weight of a MoE layer, T * (k + S) / (N + S), all experts loaded (the production study)."""
    return n_tokens * (n_used + n_shared) / (n_experts + n_shared)
