"""Options of commands that read routing traces; of expert budgets every combination of the lists."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeedge.cli.common import names, numbers
from moeedge.cli.engine_options import expect_no_companions, make_budget
from moeedge.cli.options import declare, parse_number
from moeedge.errors import InputError
from moeedge.policies.registry import BOUNDS, POLICIES, SIMULATED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moeedge.policies.expert_budget import ExpertBudget
    from moeedge.trace.steps import RejectedTokenModel as Model


class RejectedTokenModel(str, Enum):
    """How rejected draft tokens route where a trace does not record it; see moeedge.lab.traces.schedule."""

    OPTIMISTIC = "optimistic"
    PESSIMISTIC = "pessimistic"
    BOTH = "both"

    @property
    def models(self) -> tuple[Model, ...]:
        """The models to replay with, one after the other."""
        alone: dict[str, tuple[Model, ...]] = {"optimistic": ("optimistic",), "pessimistic": ("pessimistic",)}
        return alone.get(self.value, ("optimistic", "pessimistic"))


declare(
    """
    [Trace]
    --n-experts N  Experts per layer, if the file does not say. Default: the largest id + 1.
    --expert-bytes N  Size of an expert in bytes, if the trace does not say.
    --acceptance-chance X  Chance that a draft is accepted if all before it were. Default: the trace's own, or 0.8.
        also: --acceptance
    --rejected-token-model optimistic|pessimistic|both  How rejected tokens that the trace does not record route: like
        the tokens that follow (optimistic), like unrelated tokens of the text (pessimistic), or both in turn. Default:
        the recorded steps if there are any, otherwise both.
        also: --tail
    """,
    "info import_ replay simulate",
    expert_bytes={"least": 1, "most": 1 << 48},
)
declare(
    """
    --policy LIST  Policies and systems to compare, separated by commas, or all; docs/policies.md lists them.
    --cache-ratio LIST  Share of all experts that the device holds, 0.17: 17 %. Several, separated by commas, are
        compared.
    --expert-budget LIST  Verifications use at most B experts per layer (MoE-Spec), which changes a model's answers.
        Ranked by the trace's router weights, or by counts where it has none. Several, separated by commas, are
        compared; off: no budget.
    --budget-ranking LIST  Which experts stay: those with the highest weight over the batch, with equal votes of its
        tokens (picks) or as it is (router), or the most used in other texts (static, for replay). Several, separated
        by commas, are compared. Default: picks.
    --budget-policy LIST  ... Several, separated by commas, are compared.
    """,
    "replay simulate",
    read={names: "policy", numbers: "cache_ratio"},
    policy={"names": lambda: (*POLICIES, *SIMULATED, *BOUNDS, "all")},
)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What is simulated, and on what."""

    hardware: str = "rtx4090-pcie4"
    model: str = "qwen3-30b-a3b"
    trace: Path | None = None
    n_predict: int = 512
    max_steps: int | None = None
    acceptance_chance: float = 0.8
    rejected_token_model: RejectedTokenModel | None = None
    seed: int = 0
    policy: Sequence[str] = ("spac",)
    cache_ratio: Sequence[float] = (0.17,)
    draft_max: Sequence[int] = (8,)
    utility_cap: Sequence[int] = (4,)
    link: Sequence[float] = (1,)
    ranges: bool = True
    ablations: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What is replayed, and how."""

    cache_ratio: Sequence[float] = (0.17,)
    policy: Sequence[str] = ("all",)
    max_uploads: Sequence[float] | None = None
    fresh_memory: bool = False
    predictor_accuracy: str | None = None
    profile_texts: int | None = None
    hardware: str | None = None
    model: str = SimulateOptions.model
    draft_max: int | None = None
    acceptance_chance: float | None = None
    rejected_token_model: RejectedTokenModel | None = None
    texts: str | None = None
    limit: int = 0
    n_experts: int | None = None
    expert_bytes: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TraceBudgetOptions:
    """Expert budgets of a trace's verifications."""

    expert_budget: str | None = None
    budget_ranking: str | None = None
    budget_policy: str | None = None

    def budgets(self, profile: NDArray[Any] | None = None) -> tuple[ExpertBudget | None, ...] | None:
        """The budgets in the order of the lists, None for "off" among them; None: none were asked for.

        profile: activations [n_layers, n_experts] elsewhere, which order the experts of the ranking "static". Raises
        InputError.
        """
        if self.expert_budget is None:
            expect_no_companions(self, "LIST")
            return None
        from moeedge.lab.policies.expert_budget import static_order
        from moeedge.lab.sim.expert_budgets import StaticBudget
        from moeedge.policies.expert_budget import ExpertBudget

        rankings = names(self.budget_ranking or ExpertBudget.ranking, "--budget-ranking")
        if "oracle" in rankings:
            raise InputError(
                "A trace lacks the experts' outputs, which the oracle ranking reads.",
                "moeedge lab budget compares the rankings with it.",
            )
        if "static" in rankings and profile is None:
            raise InputError(
                "The ranking static needs the use of experts in other texts.",
                "moeedge lab replay --profile-texts N counts it in the first N texts of the trace.",
            )
        found: list[ExpertBudget | None] = []
        for text in names(self.expert_budget, "--expert-budget"):
            n_experts = parse_number(text)
            if n_experts is None:
                found.append(None)
                continue
            policies = names(self.budget_policy or ExpertBudget.coverage, "--budget-policy")
            for ranking, policy in itertools.product(rankings, policies):
                own = None if ranking == "static" else ranking
                budget = make_budget(n_experts, ranking=own, policy=policy)
                if own is None and profile is not None:
                    budget = StaticBudget(budget=n_experts, coverage=budget.coverage, order=static_order(profile))
                found.append(budget)
        return tuple(found)
