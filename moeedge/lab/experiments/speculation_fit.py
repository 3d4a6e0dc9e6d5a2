"""`moeedge lab fit`: measures a model with its draft, fits MoESD's model of a step, and predicts what drafts gain.

docs/lab/speed-model.md has the order of the measurements. Answers go on after a stop token up to the requested length:
the model knows no short last steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import moeedge
from moeedge.bench.experiment import GREEDY
from moeedge.bench.roofline import Weights
from moeedge.data.prompts import Prompt
from moeedge.engine.head_draft import HeadDraft
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, EngineInfo
from moeedge.errors import ContextTooSmallError, InputError, MeasurementError, require
from moeedge.lab.analysis.step_fit import (
    Acceptance,
    AmdahlRow,
    DraftCount,
    StepFit,
    StepTimes,
    amdahl,
    count_acceptance,
    expert_share,
    expert_share_measured,
    fit_steps,
)
from moeedge.lab.experiments.step_times import StepTimer, this_machine
from moeedge.llama.gguf_file import read_experts_used
from moeedge.records import filled
from moeedge.run import Progress, Run
from moeedge.speculation import check_gamma

MAX_ERROR = 0.15  # of times left out, median; with more there are no predictions
_TOKENS_EACH = (1, 2, 3, 5, 9)  # of one of several sequences: a plain step, verifications of 1, 2, 4 and 8 drafts
_TOKENS_MAX = 63  # of several sequences; llama.cpp's attention computes more in another way, which the fit knows not
_MIN_TIMES = 6  # of the target, for a fit
_MAX_DEPTH = 128  # tokens before a timed batch: 32 sequences of them need 32 times their memory


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """Choices of `moeedge lab fit`."""

    tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48)  # in a batch
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    n_used: tuple[int, ...] = ()  # experts per token; empty: the model's, and half of them
    repetitions: int = 5
    n_predict: int = 96  # tokens per answer

    def __post_init__(self) -> None:
        is_enough = len(set(self.tokens)) >= _MIN_TIMES and min(self.tokens) == 1
        require(is_enough, f"--batch-tokens must be at least {_MIN_TIMES} numbers, the first of them 1")
        require(max(self.tokens) <= 64, "--batch-tokens must be at most 64, the longest verification but one")
        check_gamma(min(self.gammas, default=0), least=1)
        require(min(self.batch_sizes, default=0) >= 1, "--batch-sizes must be at least 1")
        require(self.repetitions >= 1, f"--repetitions must be at least 1, not {self.repetitions}")


@dataclass(frozen=True)
class SpeedUp:
    """Predicted speed of speculative over plain decoding in one setting."""

    batch_size: int  # sequences
    gamma: int
    tokens_per_step: float  # of one sequence, from the acceptance of the longest drafts
    target_efficiency: float
    speed_up: float
    beyond_measured: bool  # the verification has more tokens than any batch that was measured


@dataclass(frozen=True)
class FitReport:
    """Everything that was measured, fitted and predicted."""

    info: EngineInfo
    times: StepTimes
    fit: StepFit  # of the form that predicts better
    other_fit: StepFit  # of the other form
    acceptance: Acceptance
    share_fitted: float  # f of the production study, by the fit
    share_measured: float | None  # f by the slope over the active experts
    amdahl: tuple[AmdahlRow, ...]
    speed_ups: tuple[SpeedUp, ...]  # by batch size, the first 1, and draft length

    @classmethod
    def of(
        cls, info: EngineInfo, times: StepTimes, acceptance: Acceptance, gammas: Sequence[int], sizes: Sequence[int]
    ) -> FitReport:
        """Fits the times in both forms and predicts with the one that misses less of what it was not given."""
        fits = [fit_steps(times, in_sequence=in_sequence) for in_sequence in (False, True)]
        fit, other = sorted(fits, key=lambda fit: fit.left_out_error or fit.fit_error)
        fitted, sloped = expert_share(fit.model), expert_share_measured(times)
        max_tokens = max(point.n_tokens for point in times.target)
        speed_ups = []
        for size, gamma in itertools.product(dict.fromkeys((1, *sizes)), gammas):
            n_tokens, efficiency = acceptance.tokens(gamma), fit.model.target_efficiency(size, gamma)
            gain = fit.model.speed_up(n_tokens, acceptance.drafts(gamma), size)
            speed_ups.append(SpeedUp(size, gamma, n_tokens, efficiency, gain, size * (gamma + 1) > max_tokens))
        laws = amdahl(times, fitted if sloped is None else sloped)
        return cls(info, times, fit, other, acceptance, fitted, sloped, tuple(laws), tuple(speed_ups))

    @property
    def share(self) -> float:
        """f: measured where that was possible."""
        return self.share_fitted if self.share_measured is None else self.share_measured

    @property
    def error(self) -> float:
        """Median error of the times left out; of those fitted where there were too few to leave any out."""
        return self.fit.fit_error if self.fit.left_out_error is None else self.fit.left_out_error

    @property
    def is_usable(self) -> bool:
        """Whether the fit says enough about the times to predict others."""
        return self.error <= MAX_ERROR

    def unusable(self) -> MeasurementError:
        """Why there are no predictions."""
        return MeasurementError(
            f"There are no predictions: the fit misses the times left out by {self.error:.0%} (median), and more than "
            f"{MAX_ERROR:.0%} is too much. Samples of one batch differ by a factor of {self.spread:.2f}.",
            "Repeat it on a quiet machine, or with more repetitions (-r). -o json keeps the times.",
        )

    @property
    def spread(self) -> float:
        """Median over the target's times of the largest over the smallest sample: 1 on a quiet machine."""
        return median(max(point.samples_s) / min(point.samples_s) for point in self.times.target)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds. A fit that is not usable has its times and errors, and no predictions."""
        fit, other, model = self.fit, self.other_fit, self.fit.model
        return {
            "version": moeedge.__version__,
            "model": self.info.model,
            "draft": self.info.draft,
            "device": self.info.device,
            "threads": self.info.n_threads,
            "usable": self.is_usable,
            "times": asdict(self.times),
            "acceptance": asdict(self.acceptance),
            "parameters": {name: getattr(model, name) for name in fit.lower},
            "lower_bounds": fit.lower,
            "upper_bounds": {name: value for name, value in fit.upper.items() if value != float("inf")},
            "experts_in_sequence": model.in_sequence,
            "other_form": {
                "experts_in_sequence": other.model.in_sequence,
                "fit_error": other.fit_error,
                "left_out_error": other.left_out_error,
                "parameters": {name: getattr(other.model, name) for name in fit.lower},
            },
            "ridge_point_tokens": model.ridge_point,
            **{name: getattr(fit, name) for name in ("fit_error", "left_out_error", "draft_error", "reject_error")},
            "spread": self.spread,
            "fitted": [asdict(point) for point in fit.fitted],
            "left_out": [asdict(point) for point in fit.left_out],
            "parts_s": {str(n): model.parts_s(n) for n in sorted({point.n_tokens for point in self.times.target})},
            "expert_share_fitted": self.share_fitted,
            "expert_share_measured": self.share_measured,
            "amdahl": [asdict(row) for row in self.amdahl if self.is_usable],
            "speed_up": [asdict(row) for row in self.speed_ups if self.is_usable],
        }


def run_fit(config: EngineConfig, prompts: Sequence[Prompt], plan: FitPlan, run: Run) -> FitReport:
    """Measures, fits and predicts. config.n_expert_used is ignored.

    run: its progress is in passes. Raises InputError for a model without experts, and without a draft that has a time
    of its own.
    """
    progress = run.progress
    most_drafts, tokens = max(plan.gammas), sorted(set(plan.tokens))
    sizes = tuple(size for size in {1, *plan.batch_sizes} if size <= _TOKENS_MAX)
    with _open(config, most_drafts, None, run) as session:
        info, weights = session.info, Weights.read(session.model)
        _check_draft(session)
        used = _experts_used(plan, info, config.model)
        progress.start("answering", len(prompts))
        steps, text, depth = _answer(session, prompts, most_drafts, plan.n_predict, progress)
        room = 2 * max(_TOKENS_EACH)  # of each sequence's context, after the tokens before a batch
        depth = max(1, min(depth, _MAX_DEPTH, len(text) - max(*plan.tokens, room + 1)))
        machine = this_machine(session, weights, text)
        timer_of = partial(StepTimer, text=text, depth=depth, repetitions=plan.repetitions, progress=progress)
        alone = timer_of(session=session, shapes=[(1, each) for each in tokens])
        progress.start(f"timing, {info.n_expert_used} experts per token", alone.n_passes)
        target, reject = alone.target(), alone.reject()
        # a session of their own on the same models, whose short contexts take little memory
        shapes = [(size, each) for size in sizes for each in _TOKENS_EACH if 1 < size <= _TOKENS_MAX // each]
        many = replace(config, gamma=most_drafts, n_expert_used=None, n_parallel=max(sizes), n_ctx=depth + room)
        draft_model = session.draft_context.model if session.draft_context is not None else None
        draft_bytes = Weights.read(draft_model).dense_bytes if draft_model is not None else 0
        with Session.open(many, model=session.model, draft_model=draft_model) as parallel:
            together = timer_of(session=parallel, shapes=shapes, draft_sizes=sizes)
            progress.start(f"timing, up to {max(sizes)} sequences", together.n_passes)
            target += together.target()
            draft = together.draft()
    for n_used in used[1:]:
        with _open(config, 0, n_used, run) as other:
            alone = timer_of(session=other, shapes=[(1, each) for each in tokens])
            progress.start(f"timing, {n_used} experts per token", alone.n_passes)
            target += alone.target()
    times = filled(
        StepTimes,
        *(info, weights),
        n_used=info.n_expert_used,
        target=tuple(target),
        draft=tuple(draft),
        reject=tuple(reject),
        machine=machine,
        draft_bytes=draft_bytes,
        depth=depth,
    )
    acceptance = count_acceptance(steps, most_drafts)
    return FitReport.of(info, times, acceptance, plan.gammas, plan.batch_sizes)


def _open(config: EngineConfig, gamma: int, n_used: int | None, run: Run) -> Session:
    session = Session.open(replace(config, gamma=gamma, n_expert_used=n_used), run=run)
    if session.info.n_experts == 0 or not session.model.can_roll_back:
        session.close()
        why = "has no experts" if session.info.n_experts == 0 else "cannot take tokens back"
        raise InputError(
            f"{config.model.name} {why}: there is nothing to fit.", "Give a Mixture-of-Experts model with -m."
        )
    return session


def _check_draft(session: Session) -> None:
    """Raises InputError where drafts are not known to be accepted, or have no time of their own."""
    if session.info.draft == "none":
        raise InputError(
            "Without a draft it is not known how many drafted tokens the model would accept.", "Give a draft with -md."
        )
    if isinstance(session.draft, HeadDraft):
        raise InputError(
            f"{session.info.draft} is a head, which reads the target's states: it has no time of its own to fit.",
            "Compare lengths with moeedge bench --modes stock-ar,moeedge:1-8.",
        )


def _experts_used(plan: FitPlan, info: EngineInfo, path: Path) -> tuple[int, ...]:
    """Experts per token to measure with, the model's own first. Raises InputError for numbers it does not allow."""
    own = info.n_expert_used
    if len(read_experts_used(path)[1]) > 1:  # llama.cpp cannot override a list
        if set(plan.n_used) - {own}:
            raise InputError(f"{info.model} has a number of experts per token for each layer, which stays as it is.")
        return (own,)
    for n_used in plan.n_used:
        if not 1 <= n_used <= own:
            raise InputError(
                f"{info.model} has {info.n_experts} experts, {own} per token: {n_used} per token are not possible.",
                f"Choose from 1 to {own}.",
            )
    return tuple(dict.fromkeys((own, *(plan.n_used or (max(1, own // 2),)))))


def _answer(
    session: Session, prompts: Sequence[Prompt], gamma: int, n_predict: int, progress: Progress
) -> tuple[list[DraftCount], list[int], int]:
    """The drafts of every step, prompts and answers one after the other, and how many tokens a step has before it."""
    steps: list[DraftCount] = []
    text: list[int] = []
    depths: list[int] = []
    session.gamma = gamma
    for prompt in prompts:
        session.reset()
        tokens = session.model.chat_tokens(prompt.messages(0))
        try:
            generation = session.generate(tokens, n_predict=n_predict, sampling=GREEDY, ignore_eos=True)
        except ContextTooSmallError:
            progress.add()
            continue
        room = n_predict
        for record in generation:
            if record.n_verified:
                # the end of the answer cuts drafts; a shorter one was ended by the draft itself
                steps.append(DraftCount(min(gamma, room - 1), record.n_drafted, record.n_accepted))
                depths.append(session.target.n_past - record.n_accepted - 1)
            room -= len(record.tokens)
        text += [*tokens, *generation.tokens]
        progress.add()
    if not text:
        raise InputError("No prompt fits the context.", "Use a larger -c.")
    return steps, text, round(median(depths or [0]))
