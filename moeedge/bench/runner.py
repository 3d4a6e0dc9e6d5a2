"""The run of `moeedge bench`: loads the models once, interleaves the modes, collects samples, makes rows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.arms import Arms, ArmsInTurn, Pass
from moeedge.bench.config import REFERENCE, BenchMode, BenchPlan, SyntheticTest
from moeedge.bench.figures import budget_figures, over_best_stock, unbudgeted_label
from moeedge.bench.harness import (
    BenchArm,
    answer_text,
    fit_context,
    load_models,
    never,
    rotated,
    run_conversations,
    warm_up,
)
from moeedge.bench.journal import Journal
from moeedge.bench.output_check import OutputCheck, check_answers, logits_in, stop_tokens
from moeedge.bench.perplexity import measure_perplexity
from moeedge.bench.records import (
    ArmEnd,
    BenchRow,
    compare_with_whole_layers,
    describe_setup,
    make_row,
    read_end,
    read_environment,
)
from moeedge.bench.roofline import Roofline, measure_roofline
from moeedge.bench.samples import Sample, common_samples, finished_work
from moeedge.bench.scores import AnswerScorer, Scores, check_scoring
from moeedge.bench.synthetic import SyntheticRun, n_samples, synthetic_modes
from moeedge.data.prompts import Prompt
from moeedge.engine.loading import load_target, resolve_device
from moeedge.errors import ContextTooSmallError, InputError
from moeedge.hardware.machine_load import LoadReading, look
from moeedge.llama.model import Model


class Progress(Protocol):
    """Receives the progress of a run; the command line shows it."""

    def begin(self, total: int) -> None:
        """The run will take `total` samples."""

    def advance(self, sample: Sample, test: str) -> None:
        """A sample is done."""

    def note(self, text: str) -> None:
        """A sentence for the user."""


class Run:
    """What every run has: a context manager that loads, `run` measures, `rows` computes (call it inside)."""

    def __init__(self, plan: BenchPlan, progress: Progress) -> None:
        self.plan = plan
        self._progress = progress
        self._base = plan.base  # with the context that the prompts need
        self._models: tuple[Model, Model | None]
        self._prompts: tuple[Prompt, ...] = ()
        self._n_left_out = 0  # prompts that do not fit it
        self._resources = ExitStack()
        self._environment = read_environment()
        self._notes: set[str] = set()  # those that were reported

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def _fit(self, asked: Sequence[Prompt], n_synthetic: int = 0) -> None:
        """Chooses the context, and the prompts that fit it. n_synthetic: tokens of the largest synthetic test."""
        self._base, self._prompts = fit_context(
            self.plan.base, self._models[0], asked, self.plan.n_predict, n_synthetic
        )
        self._n_left_out = len(asked) - len(self._prompts)
        if self._n_left_out:
            self._report([f"{self._n_left_out} of {len(asked)} prompts exceed the context: left out."])

    def _report(self, notes: Iterable[str]) -> None:
        """Reports each note once."""
        for text in notes:
            if text not in self._notes:
                self._notes.add(text)
                self._progress.note(text)

    @property
    def _dataset(self) -> str | None:
        """The name of the prompts' test."""
        return None if self.plan.dataset is None else self.plan.dataset.name

    @cached_property
    def _end_tokens(self) -> list[int]:
        return stop_tokens(self._models[0])


class Bench(Run):
    """The run of modes that decode one text at a time."""

    def __init__(self, plan: BenchPlan, progress: Progress, journal: Journal | None = None, part: int = 0) -> None:
        """journal: gets every sample, and has those of an interrupted run, as part `part`; None: nothing is kept."""
        super().__init__(plan, progress)
        self._journal = journal or Journal(None, ())
        self._part = part
        self.arms: Arms | ArmsInTurn  # the sessions of the run
        self._scorer: AnswerScorer | None = None
        self._roofline: Roofline | None = None
        self._load_before = look()
        self._load: float | None = None  # of other programs, while the run measured
        self._is_measured = False

    def __enter__(self) -> Bench:
        plan = self.plan
        if plan.score and plan.dataset is not None:
            self._report(check_scoring(plan.dataset, run_code=plan.run_code))
            self._scorer = AnswerScorer(plan.dataset, self._text_of, run_code=plan.run_code)
        n_synthetic = max((test.n_ctx for test in plan.tests), default=0)
        if 0 < plan.base.n_ctx < n_synthetic:
            raise ContextTooSmallError(
                f"The synthetic tests need {n_synthetic:,} tokens, but the context has {plan.base.n_ctx:,}.",
                f"Leave out -c, or use -c {n_synthetic}.",
            )
        with ExitStack() as stack:
            has_drafts = any(mode.drafts for mode in plan.modes)
            device = resolve_device(plan.base if has_drafts else replace(plan.base, draft=None))
            if device.loads_misses:
                raise InputError(
                    f"bench does not measure experts in RAM next to {device.label}.",
                    "Measure one of them: -dev none, or --ram off.",
                )
            in_turn = device.kind == "ram"
            if in_turn:  # each mode loads its own
                self._models = stack.enter_context(load_target(plan.base, device, header_only=True)), None
            else:
                self._models = load_models(plan.base, plan.modes, stack, device)
            self._fit(() if plan.dataset is None else plan.dataset.prompts, n_synthetic)
            if in_turn:
                self.arms = stack.enter_context(ArmsInTurn(self._base, plan.modes, self._report))
            else:
                self.arms = stack.enter_context(Arms(self._base, plan.modes, device, self._models, self._report))
            self._device = device
            self._resources = stack.pop_all()
        return self

    def run(self, cancel: Callable[[], bool] = never) -> bool:
        """Measures all tests; `cancel` is called often, True ends the run. Returns whether everything was measured."""
        self._progress.begin(sum(self._n_samples(current) for current in self.arms.passes))
        begin = LoadReading.now()
        for index, current in enumerate(self.arms.passes):
            if cancel():
                break
            with self.arms.opened(current):
                self._measure_roofline(current)
                self._measure(current, index, cancel)
        self._load = LoadReading.now().others_since(begin)
        self._is_measured = True
        return not cancel()

    def rows(self) -> list[BenchRow]:
        """Returns a row per test and mode, of the work that every mode of its pass has done; none after an error."""
        if not self._is_measured:
            return []
        tests = dict.fromkeys(test for current in self.arms.passes for test in current.samples)
        rows = [row for test in tests for current in self.arms.passes for row in self._pass_rows(current, test)]
        return compare_with_whole_layers(rows)

    # measuring

    def _n_samples(self, current: Pass) -> int:
        """Returns the samples of a finished pass."""
        n_synthetic = len(synthetic_modes(current.modes)[0]) * sum(n_samples(test) for test in self.plan.tests)
        return self.plan.repetitions * (self._n_turns * len(current.modes) + n_synthetic)

    def _per_repetition(self, test: str) -> int:
        """Returns the samples of a mode and repetition of a test."""
        known = {each.name: n_samples(each) for each in self.plan.tests}
        return known.get(test, self._n_turns)

    @property
    def _n_turns(self) -> int:
        return sum(len(prompt.turns) for prompt in self._prompts)

    def _measure(self, current: Pass, index: int, cancel: Callable[[], bool]) -> None:
        self._take_over(current, index)
        if isinstance(self.arms, ArmsInTurn):
            self._measure_in_turn(self.arms, current, index, cancel)
            return
        for test, sample in self._samples(
            current.arms, current.samples, cancel, repetitions=self.plan.repetitions, tests=self.plan.tests
        ):
            self._keep(current, index, test, sample)
        self._read_ends(current.arms, current, cancel)

    def _measure_in_turn(self, arms: ArmsInTurn, current: Pass, index: int, cancel: Callable[[], bool]) -> None:
        """Opens, measures and closes each mode in every repetition, in rotated order."""
        plan = self.plan
        synthetic, notes = synthetic_modes(current.modes)
        self._report(notes if plan.tests else [])
        done = {test: tuple(samples) for test, samples in current.samples.items()}  # without those of this run
        answers = {
            (sample.prompt, sample.turn): self._text_of(sample)
            for sample in reversed(done.get(self._dataset or "", ()))
            if sample.mode == REFERENCE
        }
        for repetition in range(plan.repetitions):
            for place, mode in enumerate(rotated(current.modes, repetition)):
                if cancel():
                    return
                own = {
                    test: [
                        replace(s, repetition=0) for s in samples if (s.mode, s.repetition) == (mode.label, repetition)
                    ]
                    for test, samples in done.items()
                }
                tests = plan.tests if mode in synthetic else ()
                is_done = all(own.get(test.name) for test in tests) and (
                    self._dataset is None or len(own.get(self._dataset, ())) == self._n_turns
                )
                if is_done and repetition < plan.repetitions - 1:
                    continue  # the last repetition opens every mode, for what its row says about it
                with arms.open_alone(mode) as arm:
                    for test, sample in self._samples([arm], own, cancel, repetitions=1, tests=tests, answers=answers):
                        self._keep(current, index, test, replace(sample, repetition=repetition, order=place))
                    self._read_ends([arm], current, cancel)

    def _samples(
        self,
        arms: Sequence[BenchArm],
        done: Mapping[str, Sequence[Sample]],
        cancel: Callable[[], bool],
        *,
        repetitions: int,
        tests: Sequence[SyntheticTest],
        answers: dict[tuple[str, int], str] | None = None,
    ) -> Iterator[tuple[str, Sample]]:
        """Yields test and sample of the prompts and of `tests`, without what is done; answers: as run_conversations."""
        plan = self.plan
        skip = {(sample.prompt, sample.repetition) for sample in done.get(self._dataset or "", ())}
        if self._dataset is not None and len(skip) < len(self._prompts) * repetitions:
            if plan.warm_up:
                warm_up(arms, self._prompts[0], cancel=cancel)
            for sample in run_conversations(
                arms,
                self._prompts,
                repetitions=repetitions,
                n_predict=plan.n_predict,
                ignore_eos=plan.ignore_eos,
                warmed_up=plan.warm_up,
                cancel=cancel,
                answers=answers,
                skip=skip,
            ):
                yield self._dataset, sample
        if tests:
            kept, notes = synthetic_modes([arm.mode for arm in arms])
            self._report(notes)
            own = [arm for arm in arms if arm.mode in kept]
            run = SyntheticRun(own, repetitions, warm_up=plan.warm_up, cancel=cancel, delay_s=plan.delay_s)
            for test in tests:
                for sample in run.samples(test, {sample.repetition for sample in done.get(test.name, ())}):
                    yield test.name, sample

    def _measure_roofline(self, current: Pass) -> None:
        """Measures the read speed once, while no mode runs; not where the disk is the limit."""
        if self._roofline is None and current.arms and not isinstance(self.arms, ArmsInTurn):
            session = current.arms[0].session
            self._roofline = measure_roofline(session.model, session.info.n_threads)

    def _read_ends(self, arms: Sequence[BenchArm], current: Pass, cancel: Callable[[], bool]) -> None:
        """Reads what arms tell at the end, and the perplexity of those that verify drafts with our backend."""
        text = self.plan.text
        if text is not None:
            self._report([f"Perplexity of {text.name}, in batches of gamma + 1 tokens."])
        for arm in arms:
            label, gamma = arm.mode.label, arm.session.gamma
            if text is not None and arm.mode.engine == "moeedge" and gamma > 0 and label not in current.perplexity:
                measured = measure_perplexity(arm.session.target, text, batch_tokens=gamma + 1, cancel=cancel)
                current.perplexity |= {} if measured is None else {label: measured}
            current.ends[label] = read_end(arm, self._device)
            if arm.own_target:
                current.checks[label] = self._check_split(arm, current)

    def _take_over(self, current: Pass, index: int) -> None:
        """Takes the samples of an interrupted run: conversations and repetitions that it finished in every mode."""
        in_turn = isinstance(self.arms, ArmsInTurn)
        for test, samples in self._journal.samples(self._part, index).items():
            for sample in finished_work(samples, self._work_of(current, test), by_mode=in_turn):
                current.samples.setdefault(test, []).append(sample)
                self._progress.advance(sample, test)

    def _work_of(self, current: Pass, test: str) -> Callable[[str], int]:
        """Returns how many samples of a repetition belong together, by prompt ("" in a synthetic test), of all modes.

        Modes that are measured one after the other are finished one by one.
        """
        is_dataset = test == self._dataset
        modes = current.modes if is_dataset else synthetic_modes(current.modes)[0]
        n_modes = 1 if isinstance(self.arms, ArmsInTurn) else len(modes)
        turns = {prompt.id: len(prompt.turns) for prompt in self._prompts}
        return lambda prompt: n_modes * (turns.get(prompt, 0) if is_dataset else self._per_repetition(test))

    def _keep(self, current: Pass, index: int, test: str, sample: Sample) -> None:
        current.samples.setdefault(test, []).append(sample)
        self._journal.add((self._part, index, test), sample)
        self._progress.advance(sample, test)

    # rows

    def _pass_rows(self, current: Pass, test: str) -> Iterator[BenchRow]:
        samples = current.samples.get(test, [])
        labels = list(dict.fromkeys(sample.mode for sample in samples))
        common = common_samples(samples, labels, self._per_repetition(test))
        for arm in current.arms:
            label = arm.mode.label
            if label in labels and label != current.repeated:
                own = [sample for sample in common if sample.mode == label]
                if own:
                    yield self._row(arm, test, own, common, current)

    def _row(
        self, arm: BenchArm, test: str, own: Sequence[Sample], common: Sequence[Sample], current: Pass
    ) -> BenchRow:
        """Returns the row of `own`; common: the samples of all modes of the pass."""
        mode, output, scores, figures = arm.mode, None, Scores(), None
        is_dataset = test == self._dataset
        setup = describe_setup(
            self.plan,
            self._environment,
            arm,
            current.ends.get(mode.label, ArmEnd()),
            drafts=is_dataset and mode.drafts,
            prompts=len({sample.prompt for sample in own}) if is_dataset else None,
            prompts_left_out=self._n_left_out if is_dataset else None,
            roofline=self._roofline,
            test=next((each for each in self.plan.tests if each.name == test), None),
            load=(self._load_before, self._load),
        )
        stock = self._stock_samples(current, common) if is_dataset and mode.engine == "moeedge" else []
        best_stock = over_best_stock(own, stock)
        reference = [sample for sample in common if sample.mode == REFERENCE]
        unbudgeted = [sample for sample in common if sample.mode == unbudgeted_label(mode)]
        if is_dataset and reference:
            output = current.checks[mode.label] if arm.own_target else self._check(own, reference, mode)
        if is_dataset and self._scorer is not None:
            own, reference, unbudgeted = (
                [self._scorer.scored(sample) for sample in samples] for samples in (own, reference, unbudgeted)
            )
            scores = self._scorer.summary(own)
        if is_dataset and self.plan.compares_speculation:
            figures = budget_figures(mode, own, reference, unbudgeted, current.perplexity.get(mode.label))
        return make_row(
            mode,
            test,
            own,
            reference,
            output=output,
            scores=scores,
            setup=setup,
            figures=figures,
            best_stock=best_stock,
            n_planned=self.plan.repetitions * self._per_repetition(test),
        )

    def _stock_samples(self, current: Pass, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples of each stock mode; none where the pass lacks a stock mode, which could be the fastest."""
        stock = [mode for mode in self.plan.modes if mode.engine == "stock"]
        found = [[sample for sample in samples if sample.mode == mode.label] for mode in stock]
        return found if len(stock) > 1 and all(mode in current.modes for mode in stock) else []

    def _text_of(self, sample: Sample) -> str:
        return answer_text(self._models[0], sample.tokens)

    def _check(self, own: Sequence[Sample], reference: Sequence[Sample], mode: BenchMode) -> OutputCheck:
        def logits_at(sample: Sample, position: int) -> NDArray[np.float32]:  # only where answers differ
            return logits_in(self.arms.stock(REFERENCE).session.target)(sample, position)

        return check_answers(own, reference, logits_at, self._end_tokens, lossy=mode.budget is not None)

    def _check_split(self, arm: BenchArm, current: Pass) -> OutputCheck:
        """Checks a mode with other layers on the GPU by stock llama.cpp with the same layers there.

        Its own context computes the logits, so it must be open.
        """
        samples = current.samples.get(self._dataset or "", [])
        own = [sample for sample in samples if sample.mode == arm.mode.label]
        reference = [sample for sample in samples if sample.mode == REFERENCE]
        arm.session.set_mode("stock")
        logits_at = logits_in(arm.session.target)
        lossy = arm.mode.budget is not None
        return check_answers(own, reference, logits_at, self._end_tokens, own_split=True, lossy=lossy)
