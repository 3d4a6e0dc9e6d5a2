"""Modes of a model that is larger than the memory: measured one after the other, each with the memory to itself.

Stock modes map the file and live from the page cache, ours load experts into slots: open at once, each would take the
memory that the other needs. So in every repetition each mode is opened, measured and closed, in rotated order, with
the model's file dropped from the page cache before. What earlier runs have used is neither read nor kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType

from moeedge.bench.config import REFERENCE, BenchMode, BenchPlan, SyntheticTest
from moeedge.bench.harness import BenchArm, answer_text, open_arm, rotated, run_conversations, warm_up
from moeedge.bench.passes import Pass
from moeedge.bench.samples import Sample
from moeedge.bench.synthetic import SyntheticRun, synthetic_modes
from moeedge.data import Prompt
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.llama.gguf_file import expert_tensors
from moeedge.notifications import Notification

NOTE = (
    "The model does not fit the memory, so modes are measured one after the other. Before each of them the model is "
    "loaded again; neither the page cache nor what earlier runs kept helps it."
)


class ArmsInTurn:
    """A context manager with the interface of `Arms`: one pass, of whose arms only one is open at a time.

    base: with the context size of the run. report: gets sentences for the user.
    Raises InputError on entering where no mode can run.
    """

    def __init__(self, base: EngineConfig, modes: Sequence[BenchMode], report: Callable[[Sequence[str]], None]) -> None:
        ram = "on" if base.ram == "auto" else base.ram  # what the run begins with, whatever is free later
        self._base = replace(base, ram=ram, placement=replace(base.placement, warm_start=False))
        self._modes = modes
        self._report = report
        self._measured: dict[str, BenchArm] = {}  # as they were opened last
        self._reference: BenchArm | None = None
        self._resources = ExitStack()
        self.passes: list[Pass] = []

    def __enter__(self) -> ArmsInTurn:
        kept = [mode for mode in self._modes if mode.method == "shared"]
        self._report([NOTE])
        self._report([
            f"{mode.label} is left out: it has no meaning where experts are loaded into RAM."
            for mode in self._modes
            if mode not in kept
        ])  # fmt: skip
        if not kept:
            raise InputError("No mode is left to measure.", "Choose from stock-ar, stock-sd, moeedge and moeedge-ar.")
        kept.sort(key=lambda mode: mode.label != REFERENCE)  # the others go on from its answers
        self.passes = [Pass(tuple(kept))]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def stock(self, label: str) -> BenchArm:
        """The reference, opened again: for logits, when nothing is measured any more."""
        if self._reference is None:
            mode = next(mode for mode in self.passes[0].modes if mode.label == label)
            self._reference = self._resources.enter_context(self._opened(mode))
        return self._reference

    @contextmanager
    def opened(self, current: Pass) -> Iterator[None]:
        """Nothing is opened for the entire pass."""
        yield
        current.arms = [self._measured[mode.label] for mode in current.modes if mode.label in self._measured]

    def measured(self, mode: BenchMode) -> BenchArm:
        """The arm that was measured; its session is closed, but tells what it had."""
        return self._measured[mode.label]

    @contextmanager
    def recorder(self, mode: BenchMode) -> Iterator[BenchArm]:
        """The mode, opened once more."""
        with self._opened(mode) as arm:
            yield arm

    @contextmanager
    def _opened(self, mode: BenchMode) -> Iterator[BenchArm]:
        _drop_page_cache(self._base)
        with ExitStack() as stack:
            arm = self._measured[mode.label] = open_arm(self._base, mode, stack, notify=self._notify)
            self._report(arm.session.info.notes)
            yield arm

    def _notify(self, note: Notification) -> None:
        self._report([note])

    def samples(
        self,
        plan: BenchPlan,
        prompts: Sequence[Prompt],
        cancel: Callable[[], bool],
        finish: Callable[[BenchArm], None],
        done: Mapping[str, Sequence[Sample]],
    ) -> Iterator[tuple[str, Sample]]:
        """Yields the name of a test and a sample, for all tests; ends early when `cancel` returns True.

        finish: called with each arm before it is closed. done: by test, samples that were measured before.
        """
        done = {test: tuple(samples) for test, samples in done.items()}  # without those of this run
        modes = self.passes[0].modes
        synthetic = synthetic_modes(modes)[0]
        answers: dict[tuple[str, int], str] = {}
        for repetition in range(plan.repetitions):
            for place, mode in enumerate(rotated(modes, repetition)):
                if cancel():
                    return
                own = {
                    test: [sample for sample in samples if (sample.mode, sample.repetition) == (mode.label, repetition)]
                    for test, samples in done.items()
                }
                n_turns = sum(len(prompt.turns) for prompt in prompts) if plan.dataset is not None else 0
                tests = plan.tests if mode in synthetic else ()
                is_done = all(own.get(test.name) for test in tests) and (
                    plan.dataset is None or len(own.get(plan.dataset.name, ())) == n_turns
                )
                if is_done and repetition < plan.repetitions - 1:
                    continue  # the last repetition opens every mode, for what its row says about it
                with self._opened(mode) as arm:
                    _take_answers(arm, plan, done, answers)
                    for test, sample in _measure(arm, plan, prompts, answers, cancel, own, tests):
                        yield test, replace(sample, repetition=repetition, order=place)
                    finish(arm)


def _measure(
    arm: BenchArm,
    plan: BenchPlan,
    prompts: Sequence[Prompt],
    answers: dict[tuple[str, int], str],
    cancel: Callable[[], bool],
    done: Mapping[str, Sequence[Sample]],
    tests: Sequence[SyntheticTest],
) -> Iterator[tuple[str, Sample]]:
    """One repetition of all tests in one arm. done: by test, its samples of this repetition."""
    skip = {(s.prompt, 0) for s in done.get(plan.dataset.name, ())} if plan.dataset is not None else set()
    if plan.dataset is not None and len(skip) < len(prompts):
        if plan.warm_up:
            warm_up([arm], prompts[0], cancel=cancel)
        for sample in run_conversations(
            [arm],
            prompts,
            repetitions=1,
            n_predict=plan.n_predict,
            ignore_eos=plan.ignore_eos,
            warmed_up=plan.warm_up,
            cancel=cancel,
            answers=answers,
            skip=skip,
        ):
            yield plan.dataset.name, sample
    synthetic = SyntheticRun([arm], 1, warm_up=plan.warm_up, cancel=cancel, delay_s=plan.delay_s)
    for test in tests:
        for sample in synthetic.samples(test, {0} if done.get(test.name) else ()):
            yield test.name, sample


def _take_answers(
    arm: BenchArm, plan: BenchPlan, done: Mapping[str, Sequence[Sample]], answers: dict[tuple[str, int], str]
) -> None:
    """Adds the reference's answers of an interrupted run, from which all modes continue."""
    for sample in done.get(plan.dataset.name, ()) if plan.dataset is not None else ():
        if sample.mode == REFERENCE:
            answers.setdefault((sample.prompt, sample.turn), answer_text(arm.session.model, sample.tokens))


def _drop_page_cache(config: EngineConfig) -> None:
    """Takes the model's files out of the page cache, where the system can; nothing may map them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in expert_tensors(config.model)[1]:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
