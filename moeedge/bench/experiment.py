"""One experiment: arms take turns at a work, and every turn gives a sample.

An arm is a mode with its session; `BenchArm.answer` is the only place where answers are timed. A work is the prompts of
a dataset, answered one by one (Conversations) or several at once (Together), a test of llama-bench with random tokens
(SyntheticWork), or answers whose drafts are accepted as a script says (ScriptedWork). `Work.samples` rotates the arms,
warms them up, leaves out what an interrupted run has done, and ends when it is cancelled. `moeedge bench`, the choice
of an expert budget and `lab ablate` measure this way.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from moeedge.bench.config import REFERENCE, BenchMode, ScriptedTest, SyntheticTest
from moeedge.bench.samples import Counters, Sample, counted, disk_bytes_read, from_stats, grouped
from moeedge.data.prompts import Prompt
from moeedge.engine.answer import ParallelGeneration
from moeedge.engine.drafts import Script
from moeedge.engine.session import Session
from moeedge.engine.types import SamplingConfig
from moeedge.hardware.host import LoadReading
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.run import Run, rotated, seconds_of
from moeedge.scheduler.stats import StepRecord

GREEDY = SamplingConfig(temperature=0.0, seed=0)
_PAUSE_S = 0.5  # the shortest of a user between two turns, in which experts may still move
# long enough to take every path once (prefill, draft, verification, plain decoding), and short
_WARM_UP_TOKENS = 16
_WARM_UP_TOKENS_TOGETHER = 8
_SEED = 1  # of random tokens
_SLICE_TOKENS = 16


class Meter:
    """Measures a `with` block of a session: seconds, processor time of us and of others, bytes read, cache counters."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.seconds = self.cpu_s = self.others_s = 0.0
        self.read_bytes: int | None = None  # by this process from disks

    def __enter__(self) -> Meter:
        self._placement, self._read = self._session.placement_stats(), disk_bytes_read()
        self._load, self._cpu_s, self._start_s = LoadReading.now(), time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds, self.cpu_s = time.perf_counter() - self._start_s, time.process_time() - self._cpu_s
        self.others_s = LoadReading.now().others_s_since(self._load)
        read = disk_bytes_read()
        self.read_bytes = None if read is None or self._read is None else read - self._read

    def counters(self) -> Counters | None:
        """The expert cache's counters from the beginning of the block to now."""
        return counted(self._placement, self._session.placement_stats())


@dataclass(frozen=True, eq=False)
class BenchArm:
    """A mode and its session. Several arms share the models; each has contexts and an expert cache of its own."""

    mode: BenchMode
    session: Session
    own_target: bool = False  # its target has other layers on a GPU than that of the other modes

    def answer(
        self,
        prompt_ids: Sequence[int],
        *,
        n_predict: int,
        ignore_eos: bool = False,
        run: Run | None = None,
        drain: bool = True,
        on_step: Callable[[StepRecord], None] | None = None,
        **about: Any,
    ) -> Sample:
        """Answers greedily and returns the timed sample; the KV caches keep what they hold of the prompt.

        drain: end the transfers of this answer before returning, timed apart from it. on_step: called with each step
        after the prompt, scheduling included in its observe_s. about: fields of the sample that name its work.
        Raises KeyboardInterrupt where Ctrl-C ended the answer; without that the measurement would go on.
        """
        session = self.session
        with Meter(session) as prefill:
            generation = session.generate(
                prompt_ids, n_predict=n_predict, sampling=GREEDY, run=run, ignore_eos=ignore_eos
            )
            next(iter(generation), None)  # the first token ends it
        prefill_placement = prefill.counters()
        with Meter(session) as decoding:
            for record in generation:
                if on_step is not None:
                    on_step(record)
        if generation.stop_reason == "interrupted" and not (run and run.cancelled()):
            raise KeyboardInterrupt
        drain_s = self.drain_transfers() if drain else 0.0
        return from_stats(
            generation.stats,
            mode=self.mode.label,
            **{"prompt": "", "turn": 0, "repetition": 0, "order": 0} | about,
            cpu_s=prefill.cpu_s + decoding.cpu_s,
            others_s=prefill.others_s + decoding.others_s,
            prefill_read_bytes=prefill.read_bytes,
            decode_read_bytes=decoding.read_bytes,
            drain_s=drain_s,
            prefill_placement=prefill_placement,
            placement=decoding.counters(),
            stop_reason=generation.stop_reason,
            tokens=list(generation.tokens),
            prompt_ids=list(prompt_ids),
        )

    def drain_transfers(self) -> float:
        """Ends a sample's transfers, which would slow down the next arm; returns the seconds that this took."""
        placement = self.session.placement
        return 0.0 if placement is None else seconds_of(partial(placement.drain_transfers, _PAUSE_S))


def answer_text(model: Model, tokens: Sequence[int]) -> str:
    """Returns the text of an answer without a character that its end cut, which could take more tokens than planned."""
    return b"".join(model.piece(token) for token in tokens).decode("utf-8", "ignore")


# what every arm does once before the next round begins: a sample, or None where nothing is measured
Round = tuple[int, Callable[[BenchArm], Sample | None]]  # with the rotation of the arms


@dataclass(kw_only=True)
class Work(ABC):
    """Work of arms that take turns; `--resume` measures each part and repetition completely or not at all."""

    name: str  # the test of the samples
    warms_up: bool = True  # every arm once before the first sample
    measured: list[Sample] = field(default_factory=list)  # also by an interrupted run: it is not measured again
    run: Run = field(default_factory=Run)  # of `samples`

    def modes(self, modes: Sequence[BenchMode]) -> list[BenchMode]:
        """Returns the modes for which the work makes sense."""
        return list(modes)

    @property
    def parts(self) -> dict[str, int]:
        """Samples of a mode in one repetition, by prompt; "" where samples have no prompt of their own."""
        return {"": 1}

    @property
    def n_samples(self) -> int:
        return sum(self.parts.values())

    def take_over(self, samples: Sequence[Sample], modes: Sequence[BenchMode], *, by_mode: bool) -> None:
        """Takes an interrupted run's samples of the parts and repetitions that all modes finished, or each mode."""
        n_modes = 1 if by_mode else len(self.modes(modes))
        groups = grouped(samples, attrgetter("prompt", "repetition", *(["mode"] if by_mode else [])))
        complete = (own for (part, *_), own in groups.items() if len(own) == n_modes * self.parts.get(part, 0))
        self.measured = [sample for own in complete for sample in own]

    @abstractmethod
    def rounds(self, arms: Sequence[BenchArm], left: Sequence[tuple[int, str]]) -> Iterator[Round]:
        """Yields the rounds of the repetitions and parts that are left, those that warm up first."""

    def samples(
        self, arms: Sequence[BenchArm], repetitions: Sequence[int], *, first_place: int = 0, run: Run | None = None
    ) -> Iterator[Sample]:
        """Yields the samples of each round, the arms in rotated order; ends early when `run` is cancelled.

        first_place: of these arms among those that take turns.
        """
        self.run = run or Run()
        labels = {arm.mode.label for arm in arms}
        skip = {(sample.repetition, sample.prompt) for sample in self.measured if sample.mode in labels}
        left = [(n, part) for n in repetitions for part in self.parts if (n, part) not in skip]
        for rotation, measure in self.rounds(arms, left) if left and arms else ():
            for place, arm in enumerate(rotated(arms, rotation)):
                if self.run.cancelled():
                    return
                sample = measure(arm)
                if self.run.cancelled():  # it may be cut short: no sample
                    return
                if sample is not None and sample.repetition >= 0:  # below 0: it warms up
                    is_warm = self.warms_up or sample.repetition > min(repetition for repetition, _ in left)
                    self.measured.append(replace(sample, order=first_place + place, warm=is_warm))
                    yield self.measured[-1]


@dataclass(kw_only=True)
class Conversations(Work):
    """The prompts of a dataset, answered turn by turn; the arms take turns within a turn of the conversation.

    Each arm's KV cache is empty at the first turn and then holds the conversation so far. All continue from the
    reference's answer, so that the next turn asks all of them the same, whatever they answered.
    """

    prompts: Sequence[Prompt]
    n_predict: int
    ignore_eos: bool = False
    answers: dict[tuple[str, int], str] = field(default_factory=dict)  # by prompt and turn, to go on from

    @property
    def parts(self) -> dict[str, int]:
        """Turns by prompt."""
        return {prompt.id: len(prompt.turns) for prompt in self.prompts}

    def rounds(self, arms: Sequence[BenchArm], left: Sequence[tuple[int, str]]) -> Iterator[Round]:
        """A round is a turn; the first turn of the first prompt warms up."""
        reference = next((arm for arm in arms if arm.mode.label == REFERENCE), arms[0])
        if self.warms_up:
            yield 0, self._warm_up
        for repetition, part in left:
            index, prompt = next(item for item in enumerate(self.prompts) if item[1].id == part)
            for arm in arms:
                arm.session.reset()
            messages: list[dict[str, str]] = []
            for turn in range(len(prompt.turns)):
                messages += prompt.messages(turn)
                about = {"prompt": part, "category": prompt.category, "turn": turn, "repetition": repetition}
                prompt_ids = reference.session.model.chat_tokens(messages)
                yield repetition + index, partial(self._answer, reference, prompt_ids, about)
                messages.append({"role": "assistant", "content": self.answers[part, turn]})

    def _answer(self, reference: BenchArm, prompt_ids: Sequence[int], about: dict[str, Any], arm: BenchArm) -> Sample:
        lengths: dict[str, Any] = {"n_predict": self.n_predict, "ignore_eos": self.ignore_eos}
        sample = arm.answer(prompt_ids, run=self.run, **lengths, **about)
        if arm is reference and not self.run.cancelled():
            text = answer_text(arm.session.model, sample.tokens)
            self.answers.setdefault((sample.prompt, sample.turn), text)
        return sample

    def _warm_up(self, arm: BenchArm) -> None:
        """Touches memory, starts threads, fills caches."""
        arm.session.reset()
        tokens = arm.session.model.chat_tokens(self.prompts[0].messages(0))
        arm.answer(tokens, n_predict=_WARM_UP_TOKENS, ignore_eos=self.ignore_eos, run=self.run)


@dataclass(kw_only=True)
class Together(Work):
    """The first turns of all prompts, answered by arms that decode N texts at a time: a sample per repetition and arm.

    Texts wait in a queue and join where one ends; only steps with N texts count.
    """

    prompts: Sequence[Prompt]
    n_predict: int
    ignore_eos: bool = False

    def rounds(self, arms: Sequence[BenchArm], left: Sequence[tuple[int, str]]) -> Iterator[Round]:
        """A round is a repetition."""
        tokens = [arms[0].session.model.chat_tokens(prompt.messages(0)) for prompt in self.prompts]
        if self.warms_up:
            yield 0, partial(self._warm_up, tokens)
        for repetition, _ in left:
            yield repetition, partial(self._answer, tokens, repetition)

    def _answer(self, tokens: Sequence[Sequence[int]], repetition: int, arm: BenchArm) -> Sample:
        """Answers all prompts; the sample holds the steps with N texts."""
        label, n_parallel = arm.mode.label, arm.mode.n_parallel or 1
        with Meter(arm.session) as meter:
            generation = self._generate(arm, tokens, self.n_predict)
        drain_s, stats, own = arm.drain_transfers(), generation.stats, generation.of_texts[n_parallel]
        texts = []
        for prompt, prompt_ids, answer in zip(self.prompts, tokens, generation.answers, strict=True):
            text = Sample(label, prompt.id, 0, repetition, 0, stop_reason=answer.stop_reason)
            texts.append(replace(text, tokens=list(answer.tokens), prompt_ids=list(prompt_ids)))
        names = ("decode_s", "drafted", "accepted", "draft_s", "verify_s", "observe_s")
        return Sample(
            *(label, "", 0, repetition, 0),
            prompt_tokens=sum(map(len, tokens)),
            prefill_tokens=stats.prefill_tokens,
            prefill_s=stats.prefill_s,
            generated_tokens=sum(len(answer.tokens) for answer in generation.answers),
            decode_tokens=own.generated_tokens,
            all_decode_s=stats.decode_s,
            drain_s=drain_s,
            steps=n_parallel * own.steps,
            experts_sum=n_parallel * own.experts_sum,
            **{name: getattr(own, name) for name in names},
            cpu_s=meter.cpu_s,
            others_s=meter.others_s,
            placement=meter.counters(),
            texts=texts,
        )

    def _warm_up(self, tokens: Sequence[Sequence[int]], arm: BenchArm) -> None:
        self._generate(arm, tokens[: arm.mode.n_parallel], _WARM_UP_TOKENS_TOGETHER)

    def _generate(self, arm: BenchArm, prompts: Sequence[Sequence[int]], n_predict: int) -> ParallelGeneration:
        """Answers the prompts from empty KV caches. Raises KeyboardInterrupt where Ctrl-C ended an answer."""
        arm.session.reset()
        generation = arm.session.generate_parallel(
            prompts, n_predict=n_predict, sampling=GREEDY, run=self.run, ignore_eos=self.ignore_eos
        )
        for _ in generation:
            pass
        if not self.run.cancelled() and any(answer.stop_reason == "interrupted" for answer in generation.answers):
            raise KeyboardInterrupt
        return generation


def synthetic_modes(modes: Sequence[BenchMode]) -> tuple[list[BenchMode], list[str]]:
    """Returns one mode per engine and expert cache, and one sentence for each mode that would repeat another one."""
    firsts: dict[tuple[object, ...], BenchMode] = {}
    notes = []
    for mode in modes:
        first = firsts.setdefault((mode.engine, mode.method, mode.policy, mode.cache_ratio), mode)
        if first is not mode:
            notes.append(f"{mode.label} is left out of pp and tg: without drafts it is the same as {first.label}.")
    return list(firsts.values()), notes


@dataclass(kw_only=True)
class SyntheticWork(Work):
    """A test of llama-bench: N random tokens as a prompt (ppN), one by one (tgN), or both, at a depth of D (@ dD).

    It times the target alone, without sampling and drafts: random tokens cannot be guessed. With an expert cache, the
    policy observes and experts move as in an answer.
    """

    test: SyntheticTest
    delay_s: float = 0.0  # a pause before each repetition of an arm

    def modes(self, modes: Sequence[BenchMode]) -> list[BenchMode]:
        """Returns one mode per engine and expert cache."""
        return synthetic_modes(modes)[0]

    @property
    def parts(self) -> dict[str, int]:
        """Slices where tokens are decoded alone."""
        return {"": 1 if self.test.n_prompt else -(-self.test.n_gen // _SLICE_TOKENS)}

    def rounds(self, arms: Sequence[BenchArm], left: Sequence[tuple[int, str]]) -> Iterator[Round]:
        """A round is a repetition of a prompt, or a slice of tokens that are decoded alone, close in time to others.

        Each arm continues in its own KV cache. Warming up takes a prompt, or one slice.
        """
        tokens, n_slices = self._tokens(arms[0], self.test.n_gen), 0
        for repetition in ([-1] if self.warms_up else []) + [repetition for repetition, _ in left]:
            if self.test.n_prompt:
                yield repetition + 1, partial(self._prompt, tokens, repetition)
                continue
            yield 0, partial(self._fill, repetition)
            n_measured = self.test.n_gen if repetition >= 0 else min(self.test.n_gen, _SLICE_TOKENS)
            for index, first in enumerate(range(0, n_measured, _SLICE_TOKENS)):
                part = tokens[first : first + _SLICE_TOKENS]
                yield n_slices, partial(self._slice, part, index, repetition)
                n_slices += 1

    def _fill(self, repetition: int, arm: BenchArm) -> None:
        """Empties the KV cache and fills it to the test's depth."""
        arm.session.reset()
        arm.session.follow(None, repetition)
        end_s = time.monotonic() + self.delay_s
        while not self.run.cancelled() and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.1))
        if self.test.depth and not self.run.cancelled():
            _decode(arm, self._tokens(arm, self.test.depth))
            arm.drain_transfers()

    def _prompt(self, following: Sequence[int], repetition: int, arm: BenchArm) -> Sample | None:
        """ppN, ppN+tgM."""
        self._fill(repetition, arm)
        if self.run.cancelled():
            return None
        tokens = self._tokens(arm, self.test.n_prompt)
        with Meter(arm.session) as meter:
            _decode(arm, tokens)
        counters = meter.counters()
        decoded = self._slice(following, 0, repetition, arm, drains=False) if following else None
        sample = decoded or Sample(arm.mode.label, "", 0, repetition, 0)
        return replace(
            sample,
            drain_s=arm.drain_transfers(),
            prompt_tokens=len(tokens),
            prefill_tokens=len(tokens),
            prefill_s=meter.seconds,
            cpu_s=sample.cpu_s + meter.cpu_s,
            others_s=sample.others_s + meter.others_s,
            prefill_read_bytes=meter.read_bytes,
            prefill_placement=counters,
        )

    def _slice(
        self, tokens: Sequence[int], index: int, repetition: int, arm: BenchArm, *, drains: bool = True
    ) -> Sample | None:
        """Decodes `tokens` one by one; None where it was cancelled."""
        with Meter(arm.session) as meter:
            for token in tokens:
                if self.run.cancelled():
                    return None
                _decode(arm, [token], Phase.DECODE)
        n, drain_s = len(tokens), arm.drain_transfers() if drains else 0.0
        return Sample(
            arm.mode.label, "", index, repetition, 0,
            generated_tokens=n, decode_tokens=n, decode_s=meter.seconds, steps=n, cpu_s=meter.cpu_s,
            others_s=meter.others_s, drain_s=drain_s, decode_read_bytes=meter.read_bytes, placement=meter.counters(),
        )  # fmt: skip

    def _tokens(self, arm: BenchArm, n: int) -> list[int]:
        """Returns `n` random token ids, the same on every run and in every mode."""
        n_vocab = arm.session.model.info.n_vocab
        return [int(token) for token in np.random.default_rng(_SEED).integers(0, n_vocab, n)]


@dataclass(kw_only=True)
class ScriptedWork(Work):
    """A random text in each repetition, whose drafts are accepted at a given rate. All modes decode the same tokens."""

    test: ScriptedTest

    def rounds(self, arms: Sequence[BenchArm], left: Sequence[tuple[int, str]]) -> Iterator[Round]:
        """A round is a repetition."""
        for arm in arms:
            if arm.session.governor is not None:  # what it has learned of another rate would mislead it
                arm.session.set_draft_length(arm.session.gamma)
                arm.session.set_draft_length("auto")
        for repetition in ([-1] if self.warms_up else []) + [repetition for repetition, _ in left]:
            yield repetition + 1, partial(self._answer, repetition)

    def _answer(self, repetition: int, arm: BenchArm) -> Sample:
        session, test = arm.session, self.test
        # the text that warms up is another one: experts and acceptance of the others are not known before
        script = Script.draw(session.model, test.n_ctx, test.acceptance, test.confidences, _SEED + 1 + repetition)
        session.reset()
        session.follow(script, repetition)
        n_predict = test.n_gen if repetition >= 0 else min(_WARM_UP_TOKENS, test.n_gen)
        try:
            prompt = script.text[: test.n_before].tolist()
            return arm.answer(prompt, n_predict=n_predict, ignore_eos=True, run=self.run, repetition=repetition)
        finally:
            session.follow(None)


def _decode(arm: BenchArm, tokens: Sequence[int], phase: Phase = Phase.PREFILL) -> None:
    """Decodes a batch, lets the policy observe it, and starts the transfers of its plan, as the engine's loop does."""
    target, placement = arm.session.target, arm.session.placement
    seconds = seconds_of(partial(target.decode, tokens, phase=phase, logits="last"))
    if placement is None or target.sensor is None:
        return
    n_verified = int(phase == Phase.DECODE)
    record = StepRecord(tokens=list(tokens[-1:]), n_verified=n_verified, verify_s=n_verified * seconds)
    placement.after_verification(target.sensor.read_counts(), tokens, record)
