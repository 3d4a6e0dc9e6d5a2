"""Which expert budget a model's answers get with --expert-budget auto: the rule, and the choice kept for later runs.

The rule is that of MoE-Spec, Section 4.2: the budget with the highest speed whose score stays within one standard
deviation of unbudgeted verification's. The paper takes the deviation from runs with five seeds; here answers are
greedy, so it is that of the mean over the tasks, or over the tokens of a text: what choosing others would change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from moeedge.engine.layer_choice import session_conditions
from moeedge.engine.types import EngineConfig
from moeedge.hardware.devices import ResolvedDevice
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.scheduler.measurement import measurement_file, parse_measurement, write_measurement

_SCHEMA = 1
_FASTER = 1.03  # times the unbudgeted speed, which a lossy budget must reach: less is within the noise of measuring
_MOST_CANDIDATES = 8

ScoreKind = Literal["tasks", "likelihood"]


@dataclass(frozen=True)
class BudgetTrial:
    """What one budget did to the calibration's score and speed."""

    budget: int | None  # experts per layer; None: unbudgeted
    score: float  # mean: share of the tasks that were solved, or log-likelihood of a text's token in nats
    score_stddev: float  # of that mean
    n_scored: int  # tasks or tokens; fewer than in the unbudgeted trial: it was stopped, as it lost too many tasks
    tg_ts: float | None = None  # tokens/s; None: not measured, as the score ruled the budget out
    ratio: float | None = None  # decoding speed over unbudgeted verification's in the same answers
    tokens_per_step: float | None = None
    experts: float | None = None  # distinct experts per layer and verification


@dataclass(frozen=True)
class BudgetChoice:
    """The trials under one set of conditions, and what the rule makes of them."""

    trials: tuple[BudgetTrial, ...]  # the first is unbudgeted
    score_kind: ScoreKind
    calibrated_on: str  # name of the tasks or the text
    gamma: int
    seconds: float  # that measuring took
    from_file: bool = False

    @property
    def unbudgeted(self) -> BudgetTrial:
        """The trial that the others are compared with."""
        return self.trials[0]

    @property
    def least_score(self) -> float:
        """The lowest score within one standard deviation."""
        return self.unbudgeted.score - self.unbudgeted.score_stddev

    @property
    def kept(self) -> tuple[BudgetTrial, ...]:
        """The budgets whose score is within one standard deviation; not those that were stopped, on easier tasks."""
        whole = (trial for trial in self.trials[1:] if trial.n_scored >= self.unbudgeted.n_scored)
        return tuple(trial for trial in whole if trial.score >= self.least_score)

    @property
    def best(self) -> BudgetTrial:
        """The fastest of them, if it is clearly faster than unbudgeted verification; else the unbudgeted trial."""
        fastest = max(self.kept, key=lambda trial: trial.ratio or 0.0, default=self.unbudgeted)
        return fastest if (fastest.ratio or 0.0) >= _FASTER else self.unbudgeted

    def sentence(self) -> str:
        """One line for the user: what was chosen, and why."""
        when = "measured before" if self.from_file else f"measured in {self.seconds:.0f} s"
        best = self.best
        if best.budget is not None:
            found = f"{best.ratio:.2f} times the speed of verification without a budget, {self._compared(best)}"
            return f"Expert budget {best.budget} (lossy), chosen by auto: {found}; {when}."
        if len(self.trials) == 1:
            reason = (
                f"a verification uses {self.unbudgeted.experts or 0:.1f} experts per layer, too few to leave some out"
            )
        elif not self.kept:
            least = max(self.trials[1:], key=lambda trial: trial.score)
            reason = (
                f"no budget keeps the score within one standard deviation; with {least.budget} {self._compared(least)}"
            )
        else:
            fastest = max(self.kept, key=lambda trial: trial.ratio or 0.0)
            reason = (
                f"no budget that keeps the score is faster by {_FASTER - 1:.0%}; "
                f"{fastest.budget} has {fastest.ratio or 0:.2f} times the speed of verification without a budget"
            )
        return f"Expert budget off, chosen by auto: {reason}; {when}."

    def _compared(self, trial: BudgetTrial) -> str:
        base = self.unbudgeted
        if self.score_kind == "likelihood":
            limit = math.exp(-self.least_score)
            unbudgeted = math.exp(-base.score)
            return f"perplexity {math.exp(-trial.score):.2f}, without a budget {unbudgeted:.2f}, limit {limit:.2f}"
        return f"{trial.score:.3f} of the tasks solved, without a budget {base.score:.3f}, limit {self.least_score:.3f}"

    def to_json(self) -> str:
        """One JSON object that `from_json` reads."""
        fields = asdict(self) | {"schema": _SCHEMA, "budget": self.best.budget, "least_score": self.least_score}
        del fields["from_file"]
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> BudgetChoice:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""

        def make(fields: dict[str, Any]) -> BudgetChoice:
            del fields["budget"], fields["least_score"]
            trials = tuple(BudgetTrial(**trial) for trial in fields.pop("trials"))
            if not trials:
                raise ValueError("this measurement has no trial")
            return cls(trials=trials, **fields, from_file=True)

        return parse_measurement(text, _SCHEMA, make)


def candidate_budgets(n_expert_used: int, experts: float) -> tuple[int, ...]:
    """The budgets to try, ascending: multiples of half of a token's experts, below the `experts` of a verification.

    experts: distinct experts per layer and unbudgeted verification, mean. A larger budget rarely changes anything.
    """
    step = max(1, n_expert_used // 2)
    grid = range(n_expert_used, math.ceil(experts), step)
    if len(grid) <= _MOST_CANDIDATES:
        return tuple(grid)
    last = len(grid) - 1
    return tuple(grid[round(i * last / (_MOST_CANDIDATES - 1))] for i in range(_MOST_CANDIDATES))


def lost_too_many(scores: Sequence[float], unbudgeted: Sequence[float], n_tasks: int) -> bool:
    """Whether a budget has lost so many tasks that measuring it further is pointless.

    scores: of the tasks so far, unbudgeted: of the same. A mean of `n_tasks` scores between 0 and 1 has a standard
    deviation of at most 0.5 / sqrt(n_tasks); a budget may lose so much. One that has lost twice that already, in sum
    sqrt(n_tasks) tasks, will hardly win them back.
    """
    return sum(unbudgeted) - sum(scores) > math.sqrt(n_tasks)


def choice_file(config: EngineConfig, template: ExpertBudget, device: ResolvedDevice) -> Path:
    """Where the choice under these conditions is kept; `template` has everything but the number of experts.

    Raises OSError without a cache folder.
    """
    placement = asdict(config.placement) | {"ablations": sorted(config.placement.ablations)}
    del placement["measure_anew"], placement["calibrate"]
    conditions = session_conditions(config, device) | {
        "schema": _SCHEMA,
        "n_cpu_moe": config.n_cpu_moe,
        "placement": placement,
        "ranking": template.ranking,
        "coverage": template.coverage,
    }
    return measurement_file(f"{config.model.name}-budget", conditions)


def read_choice(config: EngineConfig, template: ExpertBudget, device: ResolvedDevice) -> BudgetChoice | None:
    """What an earlier run measured under the same conditions; None without it."""
    with suppress(OSError, ValueError):
        return BudgetChoice.from_json(choice_file(config, template, device).read_text(encoding="utf-8"))
    return None


def write_choice(choice: BudgetChoice, config: EngineConfig, template: ExpertBudget, device: ResolvedDevice) -> None:
    """Keeps the choice for later runs. Raises OSError where it cannot be written."""
    write_measurement(choice_file(config, template, device), choice.to_json())
