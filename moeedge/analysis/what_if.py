"""What a fitted step model says about settings that were not measured: batch size, draft length, sparsity, device.

The acceptance stays as measured: MoESD's section 4.2 scales speed-ups of other sparsities to one sigma, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moeedge.analysis.expert_counts import full_activation_tokens
from moeedge.analysis.step_model import Machine, StepModel


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
class Outlook:
    """A predicted speed-up in one setting."""

    machine: str
    n_used: int
    batch_size: int
    gamma: int
    tokens_per_step: float
    target_efficiency: float
    speed_up: float
    full_activation_tokens: int  # of tokens in a batch, for 95 % of the experts
    beyond_measured: bool  # the verification has more tokens than any batch that was measured


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


def outlooks(
    model: StepModel,
    acceptance: Acceptance,
    *,
    gammas: Sequence[int],
    batch_sizes: Sequence[int],
    n_used: Sequence[int],
    measured: Machine,
    others: Sequence[Machine] = (),
    max_tokens: int,
) -> list[Outlook]:
    """Predictions for all combinations. max_tokens: of the largest measured batch."""
    rows = []
    for machine in (measured, *others):
        of_machine = model if machine is measured else model.on(machine, measured)
        for used in n_used:
            variant = of_machine.with_used(used)
            threshold = full_activation_tokens(model.n_experts, used)
            for batch_size in batch_sizes:
                for gamma in gammas:
                    n_tokens = acceptance.tokens(gamma)
                    rows.append(
                        Outlook(
                            machine.name,
                            used,
                            batch_size,
                            gamma,
                            n_tokens,
                            variant.target_efficiency(batch_size, gamma),
                            variant.speed_up(n_tokens, acceptance.drafts(gamma), batch_size),
                            threshold,
                            batch_size * (gamma + 1) > max_tokens,
                        )
                    )
    return rows
