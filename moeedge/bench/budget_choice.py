"""The expert budget that --expert-budget auto uses: trials on data that no benchmark's table is made of, and the rule.

The rule is that of MoE-Spec, Section 4.2: the budget with the highest speed whose score stays within one standard
deviation of unbudgeted verification's. The paper takes the deviation from runs with five seeds; here answers are
greedy, so it is that of the mean over the tasks, or over the tokens of a text: what choosing others would change.

All budgets take turns in one session: the same KV cache, the same experts on the device. The score is
- for the bundled pair and models widened from it the share of held-back tasks that are solved (`load_calibration`);
- for other models the log-likelihood of a fixed text, decoded in batches as large as a verification. No task is known
  that any model solves, and a greedy answer's agreement with the unbudgeted one has no deviation to compare with.
The choice is kept for later runs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from moeedge.bench.config import MODES
from moeedge.bench.experiment import BenchArm, Conversations, answer_text
from moeedge.bench.quality import AnswerScorer, measure_perplexity
from moeedge.bench.samples import Sample, Samples, mean_and_error
from moeedge.data.datasets import load_calibration, load_calibration_text
from moeedge.data.prompts import Dataset, EvaluationText, Prompt
from moeedge.engine.layer_choice import session_conditions
from moeedge.engine.layer_search import open_session
from moeedge.engine.loading import resolve_device
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError, require
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.records import combine
from moeedge.run import Decision, Level, Progress, Run, rotated, within
from moeedge.scheduler.calibration import Measurement, keep, measurement_file, read_measurement

_FASTER = 1.03  # times the unbudgeted speed, which a lossy budget must reach: less is within the noise of measuring
_MOST_CANDIDATES = 8
_CONTEXT = 1024  # tokens: the longest conversation of the tasks, with its answers
_LIMIT_S = 300.0  # after which no further task is begun, if there were
_TASKS_MIN = 36  # of them
_WARM_UP_PROMPTS = 4  # whose answers also say how many experts a verification uses
_TEXT_PIECES = 4  # of the text; each is continued
_TEXT_ANSWER_TOKENS = 64
_BUDGET = "expert budget"  # in decisions
_TOY = "moeedge toy"  # how the names of the bundled pair and of models widened from it begin


@dataclass(frozen=True)
class BudgetTrial:
    """The score and the speed of the calibration under one budget."""

    budget: int | None  # experts per layer; None: unbudgeted
    score: float  # mean: share of the tasks that were solved, or log-likelihood of a text's token in nats
    score_stddev: float  # of that mean
    n_scored: int  # tasks or tokens; fewer than in the unbudgeted trial: it was stopped, as it lost too many tasks
    tg_ts: float | None = None  # tokens/s; None: not measured, as the score ruled the budget out
    ratio: float | None = None  # decoding speed over unbudgeted verification's in the same answers
    tokens_per_step: float | None = None
    experts: float | None = None  # distinct experts per layer and verification


@dataclass(frozen=True, kw_only=True)
class BudgetChoice(Measurement):
    """The trials under one set of conditions, and the choice by the rule. Raises ValueError without trials."""

    SCHEMA: ClassVar[int] = 1
    ALSO_KEPT: ClassVar[tuple[str, ...]] = ("budget", "least_score")

    trials: tuple[BudgetTrial, ...]  # the first is unbudgeted
    score_kind: Literal["tasks", "likelihood"]
    calibrated_on: str  # name of the tasks or the text
    gamma: int

    def __post_init__(self) -> None:
        require(self.trials, "this measurement has no trial")

    @property
    def budget(self) -> int | None:
        """The best budget; None: off."""
        return self.best.budget

    @property
    def unbudgeted(self) -> BudgetTrial:
        """The trial that the others are compared with."""
        return self.trials[0]

    @property
    def least_score(self) -> float:
        """The lowest score within one standard deviation."""
        return self.unbudgeted.score - self.unbudgeted.score_stddev

    @property
    def allowed(self) -> tuple[BudgetTrial, ...]:
        """The budgets whose score is within one standard deviation; not those that were stopped, on easier tasks."""
        complete = (trial for trial in self.trials[1:] if trial.n_scored >= self.unbudgeted.n_scored)
        return tuple(trial for trial in complete if trial.score >= self.least_score)

    @property
    def fastest(self) -> BudgetTrial:
        """The fastest of them; the unbudgeted trial where there is none."""
        return max(self.allowed, key=lambda trial: trial.ratio or 0.0, default=self.unbudgeted)

    @property
    def best(self) -> BudgetTrial:
        """`fastest`, if it is clearly faster than unbudgeted verification; else the unbudgeted trial."""
        return self.fastest if (self.fastest.ratio or 0.0) >= _FASTER else self.unbudgeted

    @property
    def decision(self) -> Decision:
        """What was chosen, and why."""
        trial, chosen, gain, over = self.fastest, "off", None, ""
        if self.best.budget is not None:
            chosen, gain, over, why = f"{trial.budget} (lossy)", trial.ratio, "without", self._compared(trial)
        elif len(self.trials) == 1:
            experts = self.unbudgeted.experts or 0
            why = f"a verification uses {experts:.1f} experts per layer, too few to leave some out"
        elif not self.allowed:
            least = max(self.trials[1:], key=lambda trial: trial.score)
            lost = f"with {least.budget} {self._compared(least)}"
            why = f"no budget keeps the score within one standard deviation; {lost}"
        else:
            gain, over = 1 / trial.ratio if trial.ratio else None, f"{trial.budget}"
            why = f"none that keeps the score is faster by {_FASTER - 1:.0%}"
        return self.decided(Decision(_BUDGET, chosen, gain, over, why=why))

    def _compared(self, trial: BudgetTrial) -> str:
        base = self.unbudgeted
        if self.score_kind == "likelihood":
            limit = math.exp(-self.least_score)
            unbudgeted = math.exp(-base.score)
            return f"perplexity {math.exp(-trial.score):.2f}, without a budget {unbudgeted:.2f}, limit {limit:.2f}"
        return f"{trial.score:.3f} of the tasks solved, without a budget {base.score:.3f}, limit {self.least_score:.3f}"


def candidate_budgets(n_expert_used: int, experts: float) -> tuple[int, ...]:
    """The budgets to try, ascending: multiples of half of a token's experts, below the `experts` of a verification."""
    grid = range(n_expert_used, math.ceil(experts), max(1, n_expert_used // 2))
    n = min(len(grid), _MOST_CANDIDATES)
    return tuple(grid[round(i * (len(grid) - 1) / max(n - 1, 1))] for i in range(n))


def lost_too_many(scores: Sequence[float], unbudgeted: Sequence[float], n_tasks: int) -> bool:
    """Whether a budget has lost so many tasks that measuring it further is pointless; both scores: of the same tasks.

    A mean of `n_tasks` scores has a standard deviation of at most 0.5 / sqrt(n_tasks), which a budget may lose. One
    that has lost twice that already, sqrt(n_tasks) tasks, will hardly win them back.
    """
    return sum(unbudgeted) - sum(scores) > math.sqrt(n_tasks)


def choice_file(config: EngineConfig, template: ExpertBudget, device: ResolvedDevice) -> Path:
    """The file of the choice under these conditions, `budget` of `template` aside. Raises OSError without a folder."""
    placement = asdict(config.placement) | {"ablations": sorted(config.placement.ablations)}
    del placement["measure_anew"], placement["calibrate"]
    conditions = session_conditions(config, device) | {
        "schema": BudgetChoice.SCHEMA,
        "n_cpu_moe": config.n_cpu_moe,
        "placement": placement,
        "ranking": template.ranking,
        "coverage": template.coverage,
    }
    return measurement_file(f"{config.model.name}-budget", conditions)


def find_budget(config: EngineConfig, template: ExpertBudget, run: Run) -> ExpertBudget | None:
    """`template` with the number of experts that `choose_budget` chooses; None: off, or no experts or drafts."""
    if config.draft is None or config.gamma == 0 or not gguf_file.read_summary(config.model).expert_layers:
        missing = "experts" if config.draft is not None and config.gamma else "drafts to verify"
        run.say(Decision(_BUDGET, "off", why=f"there are no {missing}").sentence(), Level.WARNING)
        return None
    choice = choose_budget(config, template, run)
    run.say(choice.decision.sentence(), choice.level)
    return None if choice.budget is None else replace(template, budget=choice.budget)


def choose_budget(
    config: EngineConfig, template: ExpertBudget, run: Run, *, measure_anew: bool = False
) -> BudgetChoice:
    """Reads the choice of an earlier run under the same conditions, or else measures, and keeps it for later runs.

    template: ranking and coverage; its number of experts is not read. Raises InputError without experts or
    drafts, KeyboardInterrupt where Ctrl-C ended the measurement.
    """
    file = partial(choice_file, config, template, resolve_device(config))
    choice = None if measure_anew else read_measurement(BudgetChoice, file)
    if choice is not None:
        return choice
    if config.draft is None or config.gamma == 0:
        reason = "An expert budget limits verifications of drafts, and there are none."
        raise InputError(reason, "Give a draft with -md.")
    run.say("Measuring the score and speed of expert budgets, once for this model: this takes minutes.")
    # the session must begin with a budget; the trials set theirs
    config_of_trials = replace(config, n_ctx=_CONTEXT, expert_budget=template, cpu_fallback=False)
    with open_session(config_of_trials, run=run) as session:
        if session.model.info.n_experts == 0:
            reason = "The model is dense: it has no experts to leave out."
            raise InputError(reason, "Give a Mixture-of-Experts model with -m.")
        choice = Trials(session, template, run.progress).run()
    return keep(choice, file)


def is_toy(model: Model) -> bool:
    """Whether the tasks of the bundled pair suit the model: the bundled target, or one widened from it."""
    return (model.metadata("general.name") or "").startswith(_TOY)


class Trials:
    """Tries budgets in an open session that began with one."""

    def __init__(self, session: Session, template: ExpertBudget, progress: Progress) -> None:
        self._session, self._template, self._progress = session, template, progress
        self._arm = BenchArm(MODES["moeedge"], session)

    def run(self) -> BudgetChoice:
        start_s = time.perf_counter()
        source = load_calibration() if is_toy(self._session.model) else load_calibration_text()
        is_tasks = isinstance(source, Dataset)
        trials = tuple(self._try_tasks(source) if isinstance(source, Dataset) else self._try_text(source))
        return BudgetChoice(
            trials=trials,
            score_kind="tasks" if is_tasks else "likelihood",
            calibrated_on=source.name,
            gamma=self._session.gamma,
            seconds=time.perf_counter() - start_s,
        )

    def _try_tasks(self, tasks: Dataset) -> list[BudgetTrial]:
        self._set_budget(None)
        model, prompts = self._session.model, tasks.prompts

        def answers_to(prompts: Sequence[Prompt]) -> list[Sample]:
            work = Conversations(name="", warms_up=False, prompts=prompts, n_predict=tasks.answer_tokens)
            return list(work.samples([self._arm], [0]))

        scorer = AnswerScorer(tasks, lambda sample: answer_text(model, sample.tokens), run_code=False)
        warm = answers_to(prompts[:_WARM_UP_PROMPTS])
        scores: dict[int | None, list[float]] = {budget: [] for budget in (None, *self._candidates(warm))}
        samples: dict[int | None, list[Sample]] = {budget: [] for budget in scores}
        running = list(scores)
        self._progress.start("measuring", len(prompts))
        for index, prompt in enumerate(within(_LIMIT_S, prompts, at_least=_TASKS_MIN)):
            for budget in rotated(running, index):
                self._set_budget(budget)
                answers = [scorer.scored(sample) for sample in answers_to([prompt])]
                scores[budget].append(statistics.fmean(answer.score or 0.0 for answer in answers))
                samples[budget] += answers
            running = [each for each in running if not lost_too_many(scores[each], scores[None], len(prompts))]
            self._progress.add()
        return [_task_trial(budget, scores[budget], samples[budget], samples[None]) for budget in scores]

    def _try_text(self, text: EvaluationText) -> list[BudgetTrial]:
        """From the largest budget down, until one loses too much: what is smaller loses more, nearly always."""
        self._set_budget(None)
        tokens = self._session.model.tokenize(text.text)
        most = min(len(tokens) // _TEXT_PIECES, self._session.target.n_ctx - 2 * _TEXT_ANSWER_TOKENS)
        pieces = [tokens[i * len(tokens) // _TEXT_PIECES :][:most] for i in range(_TEXT_PIECES)]
        warm = [self._continued(piece) for piece in pieces]
        base = self._likelihood(None, text)
        trials = [base]
        candidates = self._candidates(warm)
        least_score = base.score - base.score_stddev
        self._progress.start("measuring", len(candidates) + len(pieces))
        for candidate in reversed(candidates):
            trials.append(self._likelihood(candidate, text))
            self._progress.add()
            if trials[-1].score < least_score:
                break
        self._progress.add(len(candidates) - len(trials) + 1)  # those that need no measurement
        samples: dict[int | None, list[Sample]] = {each.budget: [] for each in trials if each.score >= least_score}
        for index, piece in enumerate(pieces):
            for budget in rotated(list(samples), index):
                self._set_budget(budget)
                self._session.reset()
                samples[budget].append(self._continued(piece))
            self._progress.add()
        timed = [_timed(each, samples.get(each.budget, []), samples[None]) for each in trials]
        return [timed[0], *reversed(timed[1:])]

    def _likelihood(self, budget: int | None, text: EvaluationText) -> BudgetTrial:
        self._set_budget(budget)
        perplexity = measure_perplexity(self._session.target, text, batch_tokens=self._session.gamma + 1)
        assert perplexity is not None  # it is not cancelled
        return BudgetTrial(budget, -perplexity.nll, perplexity.nll_stderr, perplexity.n_tokens)

    def _continued(self, piece: Sequence[int]) -> Sample:
        return self._arm.answer(piece, n_predict=_TEXT_ANSWER_TOKENS, ignore_eos=True)

    def _candidates(self, samples: Samples) -> tuple[int, ...]:
        """Budgets below the experts of an unbudgeted verification."""
        info, experts = self._session.model.info, combine(samples).experts_per_verification or 0.0
        return candidate_budgets(info.n_expert_used, min(experts, info.n_experts))

    def _set_budget(self, budget: int | None) -> None:
        self._session.set_expert_budget(None if budget is None else replace(self._template, budget=budget))


def _task_trial(budget: int | None, scores: Sequence[float], samples: Samples, unbudgeted: Samples) -> BudgetTrial:
    mean, stddev = mean_and_error(scores)
    keys = {sample.key for sample in samples}
    trial = BudgetTrial(budget, mean or 0.0, stddev or 0.0, len(scores))
    return _timed(trial, samples, [sample for sample in unbudgeted if sample.key in keys])


def _timed(trial: BudgetTrial, samples: Samples, unbudgeted: Samples) -> BudgetTrial:
    """`trial` with the speed of its answers, if there are any; `unbudgeted`: the answers to the same prompts."""
    if not samples:
        return trial
    own = combine(samples)
    base = combine(unbudgeted).tg_ts if unbudgeted else None
    trial = replace(trial, tg_ts=own.tg_ts, ratio=own.tg_ts / base if own.tg_ts and base else None)
    return replace(trial, tokens_per_step=own.tokens_per_step, experts=own.experts_per_verification)
