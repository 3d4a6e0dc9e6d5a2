"""Finds the expert budget that --expert-budget auto uses, by trials on data that no benchmark's table is made of.

All budgets take turns in one session: the same KV cache, the same experts on the device. The score is
- for the bundled pair and models widened from it the share of held-back tasks that are solved (`load_calibration`);
- for other models the log-likelihood of a fixed text, decoded in batches as large as a verification. No task is known
  that any model solves, and a greedy answer's agreement with the unbudgeted one has no deviation to compare with.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moeedge.bench.budget_choice import (
    BudgetChoice,
    BudgetTrial,
    candidate_budgets,
    lost_too_many,
    read_choice,
    write_choice,
)
from moeedge.bench.config import MODES
from moeedge.bench.harness import BenchArm, answer_text, never, rotated
from moeedge.bench.perplexity import measure_perplexity
from moeedge.bench.samples import Sample
from moeedge.bench.scores import final_part
from moeedge.data import EvaluationText, Prompt, load_calibration, load_calibration_text
from moeedge.engine.layer_search import open_session
from moeedge.engine.loading import resolve_device
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.llama import gguf_file
from moeedge.llama.model import Model
from moeedge.notifications import Level, Notification, Notify, ignore
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.scoring.answers import score_answer

_CONTEXT = 1024  # tokens: the longest conversation of the tasks, with its answers
_LIMIT_S = 300.0  # after which no further task is begun, if there were
_TASKS_MIN = 36  # of them
_WARM_UP_PROMPTS = 4  # whose answers also say how many experts a verification uses
_TEXT_PIECES = 4  # of the text; each is continued
_TEXT_ANSWER_TOKENS = 64
_TOY = "moeedge toy"  # how the names of the bundled pair and of models widened from it begin

OnProgress = Callable[[int, int], None]  # parts done, of how many


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
        notify(
            Notification(
                "The result cannot be saved (folder: MOEEDGE_CACHE): the next start measures expert budgets again.",
                Level.WARNING,
            )
        )
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
        if is_toy(self._session.model):
            tasks = load_calibration()
            trials, name = self._try_tasks(tasks.prompts, tasks.answer_tokens), tasks.name
        else:
            text = load_calibration_text()
            trials, name = self._try_text(text), text.name
        return BudgetChoice(
            trials=tuple(trials),
            score_kind="tasks" if is_toy(self._session.model) else "likelihood",
            calibrated_on=name,
            gamma=self._session.gamma,
            seconds=time.perf_counter() - start_s,
        )

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
            sample = self._answer(self._arm.prompt_tokens(messages), n_predict, prompt=prompt.id, turn=turn)
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
        warm = [self._answer(piece, _TEXT_ANSWER_TOKENS, ignore_eos=True) for piece in pieces]
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
                tally.samples.append(self._answer(piece, _TEXT_ANSWER_TOKENS, ignore_eos=True))
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

    def _answer(
        self, prompt_ids: Sequence[int], n_predict: int, *, ignore_eos: bool = False, prompt: str = "", turn: int = 0
    ) -> Sample:
        return self._arm.answer(
            prompt_ids, n_predict=n_predict, ignore_eos=ignore_eos, cancel=never, prompt=prompt, turn=turn
        )


def _task_trial(tally: _Tally, unbudgeted: _Tally) -> BudgetTrial:
    n = len(tally.scores)
    stddev = statistics.stdev(tally.scores) / math.sqrt(n) if n > 1 else 0.0
    known = {sample.key for sample in tally.samples}
    base = [sample for sample in unbudgeted.samples if sample.key in known]
    return _timed(BudgetTrial(tally.budget, statistics.fmean(tally.scores), stddev, n), tally.samples, base)


def _timed(trial: BudgetTrial, samples: Sequence[Sample], unbudgeted: Sequence[Sample]) -> BudgetTrial:
    """`trial` with the speed of its answers; `unbudgeted`: the answers to the same prompts."""
    steps = sum(sample.steps for sample in samples)
    tg_ts, base_ts = _speed(samples), _speed(unbudgeted)
    return replace(
        trial,
        tg_ts=tg_ts,
        ratio=tg_ts / base_ts if tg_ts and base_ts else None,
        tokens_per_step=sum(sample.decode_tokens for sample in samples) / steps if steps else None,
        experts=sum(sample.experts_sum for sample in samples) / steps if steps else None,
    )


def _speed(samples: Sequence[Sample]) -> float | None:
    """Tokens/s of all answers together."""
    seconds = sum(sample.decode_s for sample in samples)
    return sum(sample.decode_tokens for sample in samples) / seconds if seconds > 0 else None
