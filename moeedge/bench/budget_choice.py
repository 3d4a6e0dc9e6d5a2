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

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moeedge.bench.config import MODES
from moeedge.bench.harness import BenchArm, answer_text, rotated
from moeedge.bench.perplexity import measure_perplexity
from moeedge.bench.samples import Sample, quotient
from moeedge.bench.scores import final_part
from moeedge.data.datasets import load_calibration
from moeedge.data.prompts import Prompt
from moeedge.data.texts import EvaluationText, load_calibration_text
from moeedge.engine.layer_choice import session_conditions
from moeedge.engine.layer_search import open_session
from moeedge.engine.loading import resolve_device
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.devices import ResolvedDevice
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from moeedge.notifications import Level, Notification, Notify, ignore
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.scheduler.measurement import measurement_file, parse_measurement, write_measurement
from moeedge.scoring.answers import score_answer

_SCHEMA = 1
_FASTER = 1.03  # times the unbudgeted speed, which a lossy budget must reach: less is within the noise of measuring
_MOST_CANDIDATES = 8
_CONTEXT = 1024  # tokens: the longest conversation of the tasks, with its answers
_LIMIT_S = 300.0  # after which no further task is begun, if there were
_TASKS_MIN = 36  # of them
_WARM_UP_PROMPTS = 4  # whose answers also say how many experts a verification uses
_TEXT_PIECES = 4  # of the text; each is continued
_TEXT_ANSWER_TOKENS = 64
_TOY = "moeedge toy"  # how the names of the bundled pair and of models widened from it begin

OnProgress = Callable[[int, int], None]  # parts done, of how many
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


def find_budget(
    config: EngineConfig, template: ExpertBudget, *, measure_anew: bool = False, notify: Notify = ignore
) -> ExpertBudget | None:
    """`template` with the number of experts that suits the model, its draft and the draft length; None: off.

    As `choose_budget`, whose choice it reports; None with a sentence where there are no experts or no drafts.
    """
    if config.draft is None or config.gamma == 0 or not gguf_file.read_summary(config.model).expert_layers:
        missing = "experts" if config.draft is not None and config.gamma else "drafts to verify"
        notify(Notification(f"Expert budget off, chosen by auto: there are no {missing}.", Level.WARNING))
        return None
    choice = choose_budget(config, template, measure_anew=measure_anew, notify=notify)
    notify(Notification(choice.sentence()))
    return None if choice.best.budget is None else replace(template, budget=choice.best.budget)


def choose_budget(
    config: EngineConfig,
    template: ExpertBudget,
    *,
    measure_anew: bool = False,
    notify: Notify = ignore,
    on_progress: OnProgress = lambda done, total: None,
) -> BudgetChoice:
    """What an earlier run chose under the same conditions, or else a new measurement, kept for later runs.

    template: ranking and coverage; its number of experts is not read. Raises InputError without experts or
    drafts, KeyboardInterrupt where Ctrl-C ended the measurement.
    """
    device = resolve_device(config)
    choice = None if measure_anew else read_choice(config, template, device)
    if choice is not None:
        return choice
    if config.draft is None or config.gamma == 0:
        raise InputError(
            "An expert budget limits verifications of drafts, and there are none.", "Give a draft with -md."
        )
    notify(Notification("Measuring the score and speed of expert budgets, once for this model: this takes minutes."))
    # the session must begin with a budget; the trials set theirs
    config_of_trials = replace(config, n_ctx=_CONTEXT, expert_budget=template, cpu_fallback=False)
    with open_session(config_of_trials, notify=notify) as session:
        if session.model.info.n_experts == 0:
            raise InputError(
                "The model is dense: it has no experts to leave out.", "Give a Mixture-of-Experts model with -m."
            )
        choice = Trials(session, template, on_progress).run()
    try:
        write_choice(choice, config, template, device)
    except OSError:
        text = "The result cannot be saved (folder: MOEEDGE_CACHE): the next start measures expert budgets again."
        notify(Notification(text, Level.WARNING))
    return choice


def is_toy(model: Model) -> bool:
    """Whether the tasks of the bundled pair suit the model: the bundled target, or one widened from it."""
    return (model.metadata("general.name") or "").startswith(_TOY)


@dataclass
class _Tally:
    """What one budget has done so far."""

    budget: int | None
    scores: list[float] = field(default_factory=list)  # of the tasks, in order
    samples: list[Sample] = field(default_factory=list)


class Trials:
    """Tries budgets in an open session that began with one."""

    def __init__(self, session: Session, template: ExpertBudget, on_progress: OnProgress) -> None:
        self._session = session
        self._template = template
        self._on_progress = on_progress
        self._arm = BenchArm(MODES["moeedge"], session)

    def run(self) -> BudgetChoice:
        """Measures unbudgeted verification and all candidates."""
        start_s = time.perf_counter()
        kind: ScoreKind = "tasks" if is_toy(self._session.model) else "likelihood"
        if kind == "tasks":
            tasks = load_calibration()
            trials, name = self._try_tasks(tasks.prompts, tasks.answer_tokens), tasks.name
        else:
            text = load_calibration_text()
            trials, name = self._try_text(text), text.name
        return BudgetChoice(tuple(trials), kind, name, self._session.gamma, time.perf_counter() - start_s)

    # tasks

    def _try_tasks(self, prompts: Sequence[Prompt], n_predict: int) -> list[BudgetTrial]:
        self._set_budget(None)
        warm = [s for prompt in prompts[:_WARM_UP_PROMPTS] for s in self._converse(prompt, n_predict)[1]]
        tallies = [_Tally(None), *(_Tally(budget) for budget in self._candidates(warm))]
        running = list(tallies)
        end_s = time.perf_counter() + _LIMIT_S
        for index, prompt in enumerate(prompts):
            for tally in rotated(running, index):
                self._set_budget(tally.budget)
                score, samples = self._converse(prompt, n_predict)
                tally.scores.append(score)
                tally.samples += samples
            base = tallies[0].scores
            running = [tally for tally in running if not lost_too_many(tally.scores, base, len(prompts))]
            self._on_progress(index + 1, len(prompts))
            if index + 1 >= _TASKS_MIN and time.perf_counter() > end_s:
                break
        return [_task_trial(tally, tallies[0]) for tally in tallies]

    def _converse(self, prompt: Prompt, n_predict: int) -> tuple[float, list[Sample]]:
        """The mean score of the answers of one conversation, which goes on from them, and their samples."""
        self._session.reset()
        messages: list[dict[str, str]] = []
        scores, samples = [], []
        for turn, new_messages in enumerate(prompt.turns):
            messages += [message.as_dict() for message in new_messages]
            tokens = self._arm.prompt_tokens(messages)
            sample = self._arm.answer(tokens, n_predict=n_predict, prompt=prompt.id, turn=turn)
            text = answer_text(self._session.model, sample.tokens)
            reference = prompt.reference(turn)
            assert reference is not None  # tests/data checks the tasks
            scores.append(score_answer(reference, final_part(text)).value or 0.0)
            samples.append(sample)
            messages.append({"role": "assistant", "content": text})
        return statistics.fmean(scores), samples

    # a text

    def _try_text(self, text: EvaluationText) -> list[BudgetTrial]:
        """From the largest budget down, until one loses too much: what is smaller loses more, nearly always."""
        self._set_budget(None)
        pieces = self._pieces(text)
        warm = [self._continued(piece) for piece in pieces]
        base = self._likelihood(None, text)
        trials = [base]
        candidates = self._candidates(warm)
        n_parts = len(candidates) + len(pieces)
        for index, budget in enumerate(reversed(candidates)):
            trials.append(self._likelihood(budget, text))
            self._on_progress(index + 1, n_parts)
            if trials[-1].score < base.score - base.score_stddev:
                break
        kept = [trial for trial in trials if trial.score >= base.score - base.score_stddev]
        tallies = {trial.budget: _Tally(trial.budget) for trial in kept}
        for index, piece in enumerate(pieces):
            for tally in rotated(list(tallies.values()), index):
                self._set_budget(tally.budget)
                self._session.reset()
                tally.samples.append(self._continued(piece))
            self._on_progress(len(candidates) + index + 1, n_parts)
        base_samples = tallies[None].samples
        timed = [
            _timed(trial, tallies[trial.budget].samples, base_samples) if trial.budget in tallies else trial
            for trial in trials
        ]
        return [timed[0], *reversed(timed[1:])]

    def _likelihood(self, budget: int | None, text: EvaluationText) -> BudgetTrial:
        self._set_budget(budget)
        found = measure_perplexity(self._session.target, text, batch_tokens=self._session.gamma + 1)
        assert found is not None  # nobody cancels
        return BudgetTrial(budget, -found.nll, found.nll_stderr, found.n_tokens)

    def _continued(self, piece: Sequence[int]) -> Sample:
        return self._arm.answer(piece, n_predict=_TEXT_ANSWER_TOKENS, ignore_eos=True)

    def _pieces(self, text: EvaluationText) -> list[list[int]]:
        tokens = self._session.model.tokenize(text.text)
        most = min(len(tokens) // _TEXT_PIECES, self._session.target.n_ctx - 2 * _TEXT_ANSWER_TOKENS)
        return [tokens[i * len(tokens) // _TEXT_PIECES :][:most] for i in range(_TEXT_PIECES)]

    # both

    def _candidates(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        """Budgets below the experts of an unbudgeted verification."""
        info = self._session.model.info
        steps = sum(sample.steps for sample in samples)
        experts = sum(sample.experts_sum for sample in samples) / max(1, steps)
        return candidate_budgets(info.n_expert_used, min(experts, info.n_experts))

    def _set_budget(self, budget: int | None) -> None:
        self._session.set_expert_budget(None if budget is None else replace(self._template, budget=budget))


def _task_trial(tally: _Tally, unbudgeted: _Tally) -> BudgetTrial:
    n = len(tally.scores)
    stddev = statistics.stdev(tally.scores) / math.sqrt(n) if n > 1 else 0.0
    known = {sample.key for sample in tally.samples}
    base = [sample for sample in unbudgeted.samples if sample.key in known]
    return _timed(BudgetTrial(tally.budget, statistics.fmean(tally.scores), stddev, n), tally.samples, base)


def _timed(trial: BudgetTrial, samples: Sequence[Sample], unbudgeted: Sequence[Sample]) -> BudgetTrial:
    """`trial` with the speed of its answers; `unbudgeted`: the answers to the same prompts."""

    def total(own: Sequence[Sample], name: str) -> float:
        return float(sum(getattr(sample, name) for sample in own))

    tokens, steps = total(samples, "decode_tokens"), total(samples, "steps")
    tg_ts = quotient(tokens, total(samples, "decode_s"))
    base_ts = quotient(total(unbudgeted, "decode_tokens"), total(unbudgeted, "decode_s"))
    return replace(
        trial,
        tg_ts=tg_ts,
        ratio=tg_ts / base_ts if tg_ts and base_ts else None,
        tokens_per_step=quotient(tokens, steps),
        experts=quotient(total(samples, "experts_sum"), steps),
    )
