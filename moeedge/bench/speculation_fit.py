"""`moeedge fit`: measures a model with its draft, fits MoESD's model of a step, and predicts what speculation gains.

1. The prompts are answered with the longest drafts: which share is accepted, and a text to measure on.
2. The parts of a step are timed on windows of that text (step_times.py), once for each number of active experts.
3. The times are fitted (analysis/step_fit.py).
4. If asked for, plain and speculative decoding of the same prompts take turns: the speed-ups that were predicted.

Answers go on after a stop token up to the requested length: the model knows no short last steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moeedge import speculation
from moeedge.analysis.step_fit import StepTimes, TimePoint, amdahl, expert_share, expert_share_measured, fit_steps
from moeedge.analysis.step_model import Machine, StepModel
from moeedge.analysis.what_if import Acceptance, DraftCount, count_acceptance, outlooks
from moeedge.bench.fit_report import FitReport, SpeedUp
from moeedge.bench.harness import GREEDY, never, rotated
from moeedge.bench.sequence_times import MAX_TOKENS, N_CTX, SequenceTimer
from moeedge.bench.step_times import StepTimer, read_weights, this_machine
from moeedge.data.prompts import Prompt
from moeedge.engine.head_draft import HeadDraft
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, EngineInfo
from moeedge.errors import ContextTooSmallError, InputError
from moeedge.notifications import Notify, ignore
from moeedge.scheduler.stats import StepRecord

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)
GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_MIN_TIMES = 6  # of the target, for a fit


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """What `moeedge fit` measures and predicts."""

    tokens: tuple[int, ...] = TOKENS  # in a batch
    gammas: tuple[int, ...] = GAMMAS
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    n_used: tuple[int, ...] = ()  # experts per token; empty: the model's, and half of them
    repetitions: int = 5
    n_predict: int = 96  # tokens per answer
    measure_speed_up: bool = True
    what_if_used: tuple[int, ...] = ()  # experts per token; empty: powers of two
    others: tuple[Machine, ...] = ()  # to predict for; they hold the entire model
    acceptance_chance: float | None = None  # of each draft; None: counted

    def __post_init__(self) -> None:
        if len(set(self.tokens)) < _MIN_TIMES or min(self.tokens) != 1:
            raise ValueError(f"--batch-tokens must be at least {_MIN_TIMES} numbers, the first of them 1")
        if max(self.tokens) > 64:
            raise ValueError("--batch-tokens must be at most 64, the tokens of the longest verification but one")
        if not self.gammas or min(self.gammas) < 1:
            raise ValueError("--draft-max must be at least 1 here")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError("--batch-sizes must be at least 1")
        if self.repetitions < 1:
            raise ValueError(f"--repetitions must be at least 1, not {self.repetitions}")


def run_fit(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    plan: FitPlan,
    *,
    notify: Notify = ignore,
    cancel: Callable[[], bool] = never,
    on_part: Callable[[str, int], None] = lambda _label, _total: None,
    on_pass: Callable[[], None] = lambda: None,
) -> FitReport:
    """Measures, fits and predicts. config.n_expert_used is ignored.

    cancel: True ends the measurement; what was measured is fitted if it suffices. on_part: called with what is measured
    next and the number of its passes, on_pass: after each. Raises InputError for a model without experts or where too
    little was measured.
    """
    most_drafts = max(plan.gammas)
    with ExitStack() as stack:
        session = stack.enter_context(_open(config, most_drafts, None, notify))
        info, weights = session.info, read_weights(config.model)
        if info.draft == "none" and plan.acceptance_chance is None:
            raise InputError(
                "Without a draft it is not known how many drafted tokens the model would accept.",
                "Give a draft with -md, or --acceptance-chance A.",
            )
        if isinstance(session.draft, HeadDraft):
            raise InputError(
                f"{info.draft} is a head, which reads the target's states: it has no time of its own to fit.",
                "Compare lengths with moeedge bench --modes stock-ar,moeedge:1-8, or fit without a draft: -md none "
                "--acceptance-chance A.",
            )
        used = _experts_used(plan, info)
        on_part("answering", len(prompts))
        steps, text = _answer(session, prompts, most_drafts, plan.n_predict, cancel, on_pass)
        machine = this_machine(session, weights, text)
        timer = StepTimer(
            session, text, tokens=plan.tokens, repetitions=plan.repetitions, cancel=cancel, on_pass=on_pass
        )
        n_passes = plan.repetitions * len(set(plan.tokens))
        on_part(f"timing, {info.n_expert_used} experts per token", n_passes)
        target, reject = timer.target(), timer.reject()
        together, draft = _time_sequences(session, config, plan, text, on_part, cancel, on_pass)
        target += together
        measured: list[tuple[int, SpeedUpSample]] = []
        if plan.measure_speed_up and info.draft != "none" and not cancel():
            gammas = (0, *plan.gammas)
            on_part("decoding, plain and speculative", len(prompts) * len(gammas))
            measured = list(_decode(session, prompts, gammas, plan.n_predict, cancel, on_pass))
    for n_used in used:
        if n_used == info.n_expert_used or cancel():
            continue
        with _open(config, 0, n_used, notify) as other:
            on_part(f"timing, {n_used} experts per token", n_passes)
            target += StepTimer(
                other, text, tokens=plan.tokens, repetitions=plan.repetitions, cancel=cancel, on_pass=on_pass
            ).target()
    if len(target) < _MIN_TIMES or not reject:
        raise InputError("The measurement was stopped before there was anything to fit.")
    times = StepTimes(
        n_experts=info.n_experts,
        n_used=info.n_expert_used,
        target=tuple(target),
        draft=tuple(draft),
        reject=tuple(reject),
        machine=machine,
        dense_bytes=weights.dense_bytes,
        expert_bytes=weights.expert_bytes,
        draft_bytes=_draft_bytes(config),
        bytes_per_weight=weights.bytes_per_weight,
    )
    acceptance = count_acceptance(steps, most_drafts)
    if plan.acceptance_chance is not None:
        chances = tuple(plan.acceptance_chance**n for n in range(1, most_drafts + 1))
        acceptance = Acceptance(chances, (1.0,) * most_drafts, 0)
    return _report(info, times, acceptance, measured, plan, interrupted=cancel())


@dataclass(frozen=True)
class SpeedUpSample:
    """One answer at one draft length."""

    gamma: int
    decode_s: float
    tokens: int
    steps: int


def _report(
    info: EngineInfo,
    times: StepTimes,
    acceptance: Acceptance,
    measured: Sequence[tuple[int, SpeedUpSample]],
    plan: FitPlan,
    *,
    interrupted: bool,
) -> FitReport:
    fits = [fit_steps(times, in_sequence=in_sequence) for in_sequence in (False, True)]
    fit, other = sorted(fits, key=lambda found: found.left_out_error or found.fit_error)
    fitted, sloped = expert_share(fit.model), expert_share_measured(times)
    n_used = plan.what_if_used or _powers_of_two(info.n_experts, info.n_expert_used)
    return FitReport(
        info=info,
        times=times,
        fit=fit,
        other_fit=other,
        acceptance=acceptance,
        share_fitted=fitted,
        share_measured=sloped,
        amdahl=tuple(amdahl(times, fitted if sloped is None else sloped)),
        speed_ups=tuple(_speed_up(gamma, fit.model, times, acceptance, measured) for gamma in plan.gammas),
        outlooks=tuple(
            outlooks(
                fit.model,
                acceptance,
                gammas=plan.gammas,
                batch_sizes=plan.batch_sizes,
                n_used=n_used,
                measured=times.machine,
                others=plan.others,
                max_tokens=max(point.n_tokens for point in times.target),
            )
        ),
        interrupted=interrupted,
    )


def _speed_up(
    gamma: int,
    model: StepModel,
    times: StepTimes,
    acceptance: Acceptance,
    measured: Sequence[tuple[int, SpeedUpSample]],
) -> SpeedUp:
    n_tokens = acceptance.tokens(gamma)
    plain = {prompt: sample for prompt, sample in measured if sample.gamma == 0}
    own = {prompt: sample for prompt, sample in measured if sample.gamma == gamma and prompt in plain}
    row = SpeedUp(
        gamma,
        n_tokens,
        model.target_efficiency(1, gamma),
        model.speed_up(n_tokens, acceptance.drafts(gamma)),
        _from_times(acceptance.drafts(gamma), n_tokens, times),
    )
    if not own:
        return row

    def speed(samples: Sequence[SpeedUpSample]) -> float:
        return sum(sample.tokens for sample in samples) / sum(sample.decode_s for sample in samples)

    return replace(
        row,
        measured=speed(list(own.values())) / speed([plain[prompt] for prompt in own]),
        measured_tokens_per_step=sum(s.tokens for s in own.values()) / sum(s.steps for s in own.values()),
        pairs=tuple(speed([sample]) / speed([plain[prompt]]) for prompt, sample in own.items()),
    )


def _from_times(n_drafts: float, n_tokens: float, times: StepTimes) -> float | None:
    """Eq. 4 of MoESD with measured times of one sequence, between two of them on a line."""
    plain, draft = times.target_at(1), next((point.seconds for point in times.draft if point.n_tokens == 1), None)
    verify_s = _between([p for p in times.target if p.n_sequences == 1 and p.n_used == times.n_used], n_drafts + 1)
    reject_s = _between(times.reject, n_drafts + 1)
    if plain is None or draft is None or verify_s is None or reject_s is None:
        return None
    return speculation.speed_up(
        n_tokens, n_drafts, target_s=plain.seconds, verify_s=verify_s, draft_s=draft, reject_s=reject_s
    )


def _between(points: Sequence[TimePoint], n_tokens: float) -> float | None:
    """Seconds for so many tokens; None beyond the largest batch."""
    known = sorted((point.n_tokens, point.seconds) for point in points)
    if not known or not known[0][0] <= n_tokens <= known[-1][0]:
        return None
    tokens, seconds = zip(*known, strict=True)
    return float(np.interp(n_tokens, tokens, seconds))


def _time_sequences(
    session: Session,
    config: EngineConfig,
    plan: FitPlan,
    text: Sequence[int],
    on_part: Callable[[str, int], None],
    cancel: Callable[[], bool],
    on_pass: Callable[[], None],
) -> tuple[list[TimePoint], list[TimePoint]]:
    """Times of target and draft with several sequences in one batch; that of the draft with one, too.

    The sequences have a session of their own on the same models, whose short contexts take little memory.
    """
    if cancel():
        return [], []
    sizes = tuple(size for size in {1, *plan.batch_sizes} if size <= MAX_TOKENS)
    together = replace(config, gamma=max(plan.gammas), n_expert_used=None, n_parallel=max(sizes), n_ctx=N_CTX)
    draft_model = session.draft_context.model if session.draft_context is not None else None
    with Session.open(together, model=session.model, draft_model=draft_model) as parallel:
        timer = SequenceTimer(
            parallel, text, batch_sizes=sizes, repetitions=plan.repetitions, cancel=cancel, on_pass=on_pass
        )
        on_part(f"timing, up to {max(sizes)} sequences", timer.n_passes)
        return timer.target(), timer.draft()


def _open(config: EngineConfig, gamma: int, n_used: int | None, notify: Notify) -> Session:
    session = Session.open(replace(config, gamma=gamma, n_expert_used=n_used), notify=notify)
    if session.info.n_experts == 0 or not session.model.can_roll_back:
        session.close()
        why = "has no experts" if session.info.n_experts == 0 else "cannot take tokens back"
        raise InputError(
            f"{config.model.name} {why}: there is nothing to fit.", "Give a Mixture-of-Experts model with -m."
        )
    return session


def _answer(
    session: Session,
    prompts: Sequence[Prompt],
    gamma: int,
    n_predict: int,
    cancel: Callable[[], bool],
    on_pass: Callable[[], None],
) -> tuple[list[DraftCount], list[int]]:
    """The drafts of every step, and prompts and answers one after the other."""
    session.gamma = gamma if session.info.draft != "none" else 0
    steps: list[DraftCount] = []
    text: list[int] = []
    for prompt in prompts:
        if cancel():
            break
        room = n_predict
        for record in _generate(session, prompt, n_predict, cancel, text):
            if record.n_verified:
                # the end of the answer cuts drafts; a shorter one was ended by the draft itself
                steps.append(DraftCount(min(gamma, room - 1), record.n_drafted, record.n_accepted))
            room -= len(record.tokens)
        on_pass()
    if not text:
        raise InputError("No prompt fits the context.", "Use a larger -c.")
    return steps, text


def _generate(
    session: Session, prompt: Prompt, n_predict: int, cancel: Callable[[], bool], text: list[int]
) -> Iterator[StepRecord]:
    """Answers the first turn of a prompt; `text` gets prompt and answer."""
    session.reset()
    tokens = _prompt_tokens(session, prompt)
    try:
        generation = session.generate(tokens, n_predict=n_predict, sampling=GREEDY, cancel=cancel, ignore_eos=True)
    except ContextTooSmallError:
        return
    yield from generation
    text += [*tokens, *generation.tokens]


def _decode(
    session: Session,
    prompts: Sequence[Prompt],
    gammas: Sequence[int],
    n_predict: int,
    cancel: Callable[[], bool],
    on_pass: Callable[[], None],
) -> Iterator[tuple[int, SpeedUpSample]]:
    """Answers each prompt with every draft length in turn: (prompt, sample). An answer of one token gives none."""
    for index, prompt in enumerate(prompts):
        for gamma in rotated(gammas, index):
            if cancel():
                return
            session.gamma = gamma if session.info.draft != "none" else 0
            session.reset()
            try:
                generation = session.generate(
                    _prompt_tokens(session, prompt),
                    n_predict=n_predict,
                    sampling=GREEDY,
                    cancel=cancel,
                    ignore_eos=True,
                )
            except ContextTooSmallError:
                continue
            for _ in generation:
                pass
            stats = generation.stats
            on_pass()
            if stats.steps and stats.generated_tokens > 1 and not cancel():
                yield index, SpeedUpSample(gamma, stats.decode_s, stats.generated_tokens - 1, stats.steps)


def _prompt_tokens(session: Session, prompt: Prompt) -> list[int]:
    messages = [message.as_dict() for message in prompt.turns[0]]
    return session.model.tokenize(session.model.render_chat(messages))


def _experts_used(plan: FitPlan, info: EngineInfo) -> tuple[int, ...]:
    """Experts per token to measure with, the model's own first. Raises InputError for numbers it does not allow."""
    own = info.n_expert_used
    for asked, most in ((plan.n_used, own), (plan.what_if_used, info.n_experts)):
        for n_used in asked:
            if not 1 <= n_used <= most:
                raise InputError(
                    f"{info.model} has {info.n_experts} experts, {own} per token: {n_used} per token are not possible.",
                    f"Choose from 1 to {most}.",
                )
    return tuple(dict.fromkeys((own, *(plan.n_used or (max(1, own // 2),)))))


def _draft_bytes(config: EngineConfig) -> float:
    """That one pass of the draft reads."""
    return read_weights(config.draft).dense_bytes if isinstance(config.draft, Path) else 0.0


def _powers_of_two(n_experts: int, n_used: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to twice the model's number, which is among them."""
    found = {n_used}
    used = 1
    while used <= min(n_experts, 2 * n_used):
        found.add(used)
        used *= 2
    return tuple(sorted(found))
