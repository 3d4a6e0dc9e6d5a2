"""The run of `moeedge bench`: loads the models once, interleaves the modes, collects samples, makes rows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.arms import Arms
from moeedge.bench.best_stock import StockRatio, over_best_stock
from moeedge.bench.budgets import budget_figures, unbudgeted_label
from moeedge.bench.config import REFERENCE, BenchMode, BenchPlan
from moeedge.bench.harness import BenchArm, answer_text, load_models, never, run_conversations, warm_up
from moeedge.bench.in_turn import ArmsInTurn
from moeedge.bench.journal import Journal, Place
from moeedge.bench.output_check import OutputCheck, check_answers, logits_in, stop_tokens
from moeedge.bench.passes import Pass, fit_context
from moeedge.bench.perplexity import measure_perplexity
from moeedge.bench.records import BenchRow, compare_with_whole_layers, describe_setup, make_row, read_environment
from moeedge.bench.roofline import Roofline, measure_roofline
from moeedge.bench.samples import Sample, common_samples, finished_work
from moeedge.bench.scores import AnswerScorer, Scores, check_scoring
from moeedge.bench.synthetic import SyntheticRun, n_samples, synthetic_modes
from moeedge.bench.whole_layers import DeviceUse, session_use
from moeedge.data import EvaluationText, Prompt
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


class Bench:
    """A context manager: entering loads, `run` measures, `rows` computes (with the contexts, so call it inside)."""

    def __init__(self, plan: BenchPlan, progress: Progress, journal: Journal | None = None, part: int = 0) -> None:
        """journal: gets every sample, and has those of an interrupted run, as part `part`; None: nothing is kept."""
        self.plan = plan
        self._journal = journal
        self._part = part
        self._base = plan.base  # with the context that the prompts need
        self._progress = progress
        self._arms: Arms | ArmsInTurn | None = None
        self._models: tuple[Model, Model | None] | None = None
        self._prompts: tuple[Prompt, ...] = ()
        self._resources = ExitStack()
        self._environment = read_environment()
        self._notes: set[str] = set()  # those that were reported
        self._scorer: AnswerScorer | None = None
        self._roofline: Roofline | None = None
        self._load_before = look()
        self._load: float | None = None  # of other programs, while the run measured

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
            self._base, self._prompts = fit_context(
                plan.base, self._models[0], self._requested, plan.n_predict, n_synthetic
            )
            if self._n_left_out:
                self._report([f"{self._n_left_out} of {len(self._requested)} prompts exceed the context: left out."])
            if in_turn:
                self._arms = stack.enter_context(ArmsInTurn(self._base, plan.modes, self._report))
            else:
                self._arms = stack.enter_context(Arms(self._base, plan.modes, device, self._models, self._report))
            self._device = device
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def arms(self) -> Arms | ArmsInTurn:
        """The sessions of the run."""
        assert self._arms is not None
        return self._arms

    @property
    def _passes(self) -> list[Pass]:
        return self.arms.passes

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The dataset's prompts that fit the context."""
        return self._prompts

    @property
    def _requested(self) -> tuple[Prompt, ...]:
        return self.plan.dataset.prompts if self.plan.dataset is not None else ()

    @property
    def _n_left_out(self) -> int:
        return len(self._requested) - len(self._prompts)

    def run(self, cancel: Callable[[], bool] = never) -> bool:
        """Measures all tests; `cancel` is called often, True ends the run. Returns whether everything was measured."""
        self._progress.begin(sum(self._n_samples(current) for current in self._passes))
        begin = LoadReading.now()
        for index, current in enumerate(self._passes):
            if cancel():
                break
            with self.arms.opened(current):
                self._measure_roofline(current)
                self._measure(current, index, cancel)
        self._load = LoadReading.now().others_since(begin)
        return not cancel()

    def rows(self) -> list[BenchRow]:
        """Returns a row per test and mode, of the work that every mode of its pass has done."""
        tests = dict.fromkeys(test for current in self._passes for test in current.samples)
        rows = [row for test in tests for current in self._passes for row in self._pass_rows(current, test)]
        return compare_with_whole_layers(rows)

    # notes

    def _report(self, notes: Iterable[str]) -> None:
        """Reports each note once."""
        for text in notes:
            if text not in self._notes:
                self._notes.add(text)
                self._progress.note(text)

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
        plan = self.plan
        self._take_over(current, index)
        if isinstance(self.arms, ArmsInTurn):
            self._report(synthetic_modes(current.modes)[1] if plan.tests else [])

            def finish(arm: BenchArm) -> None:
                if plan.text is not None and arm.mode.label not in current.perplexity:
                    self._measure_perplexity(plan.text, [arm], current, cancel)
                self._read_end(arm, current)

            for test, sample in self.arms.samples(plan, self._prompts, cancel, finish, current.samples):
                self._keep(current, index, test, sample)
            return
        if plan.dataset is not None:
            done = current.samples.get(plan.dataset.name, [])
            skip = {(sample.prompt, sample.repetition) for sample in done}
            for sample in self._conversations(current.arms, skip, cancel):
                self._keep(current, index, plan.dataset.name, sample)
        if plan.tests:
            kept, notes = synthetic_modes(current.modes)
            self._report(notes)
            arms = [arm for arm in current.arms if arm.mode in kept]
            synthetic = SyntheticRun(arms, plan.repetitions, warm_up=plan.warm_up, cancel=cancel, delay_s=plan.delay_s)
            for each in plan.tests:
                repeated = {sample.repetition for sample in current.samples.get(each.name, [])}
                for sample in synthetic.samples(each, repeated):
                    self._keep(current, index, each.name, sample)
        if plan.text is not None:
            self._measure_perplexity(plan.text, current.arms, current, cancel)
        for arm in current.arms:
            self._read_end(arm, current)

    def _measure_roofline(self, current: Pass) -> None:
        """Measures the read speed once, while no mode runs; not where the disk is the limit."""
        if self._roofline is None and current.arms and not isinstance(self.arms, ArmsInTurn):
            session = current.arms[0].session
            self._roofline = measure_roofline(session.model, session.info.n_threads)

    def _read_end(self, arm: BenchArm, current: Pass) -> None:
        """Reads what an arm tells at the end of its measurement."""
        current.device_use[arm.mode.label] = session_use(arm.session, self._device)
        if arm.own_target:
            current.checks[arm.mode.label] = self._check_split(arm, current)
        stats = arm.session.placement_stats()
        if stats is not None and stats.vram_used_bytes is not None:
            current.vram_bytes[arm.mode.label] = stats.vram_used_bytes
        if stats is not None and stats.lookahead is not None:
            current.lookahead[arm.mode.label] = stats.lookahead

    def _measure_perplexity(
        self, text: EvaluationText, arms: Sequence[BenchArm], current: Pass, cancel: Callable[[], bool]
    ) -> None:
        """Measures the perplexity of each mode that verifies drafts with our backend."""
        self._report([f"Perplexity of {text.name}, in batches of gamma + 1 tokens."])
        for arm in arms:
            if arm.mode.engine == "moeedge" and arm.session.gamma > 0:
                measured = measure_perplexity(
                    arm.session.target, text, batch_tokens=arm.session.gamma + 1, cancel=cancel
                )
                if measured is not None:
                    current.perplexity[arm.mode.label] = measured

    def _take_over(self, current: Pass, index: int) -> None:
        """Takes the samples of an interrupted run: conversations and repetitions that it finished in every mode."""
        if self._journal is None:
            return
        for test, samples in self._journal.samples(self._part, index).items():
            in_turn = isinstance(self.arms, ArmsInTurn)
            for sample in finished_work(samples, self._work_of(current, test), by_mode=in_turn):
                current.samples.setdefault(test, []).append(sample)
                self._progress.advance(sample, test)

    def _work_of(self, current: Pass, test: str) -> Callable[[str], int]:
        """Returns how many samples of a repetition belong together, by prompt ("" in a synthetic test), of all modes.

        Modes that are measured one after the other are finished one by one.
        """
        in_turn = isinstance(self.arms, ArmsInTurn)
        is_dataset = self.plan.dataset is not None and test == self.plan.dataset.name
        modes = current.modes if is_dataset else synthetic_modes(current.modes)[0]
        n_modes = 1 if in_turn else len(modes)
        turns = {prompt.id: len(prompt.turns) for prompt in self._prompts}
        return lambda prompt: n_modes * (turns.get(prompt, 0) if is_dataset else self._per_repetition(test))

    def _keep(self, current: Pass, index: int, test: str, sample: Sample) -> None:
        current.samples.setdefault(test, []).append(sample)
        if self._journal is not None:
            self._journal.add(Place(self._part, index, test), sample)
        self._progress.advance(sample, test)

    def _conversations(
        self, arms: Sequence[BenchArm], skip: set[tuple[str, int]], cancel: Callable[[], bool]
    ) -> Iterator[Sample]:
        plan = self.plan
        if len(skip) == len(self._prompts) * plan.repetitions:
            return
        if plan.warm_up:
            warm_up(arms, self._prompts[0], cancel=cancel)
        yield from run_conversations(
            arms,
            self._prompts,
            repetitions=plan.repetitions,
            n_predict=plan.n_predict,
            ignore_eos=plan.ignore_eos,
            warmed_up=plan.warm_up,
            cancel=cancel,
            skip=skip,
        )

    # rows

    def _pass_rows(self, current: Pass, test: str) -> Iterator[BenchRow]:
        samples = current.samples.get(test, [])
        is_dataset = self.plan.dataset is not None and test == self.plan.dataset.name
        expected = self._per_repetition(test)
        synthetic = next((each for each in self.plan.tests if each.name == test), None)
        labels = list(dict.fromkeys(sample.mode for sample in samples))
        common = common_samples(samples, labels, expected)
        reference = [sample for sample in common if sample.mode == REFERENCE]
        stock = self._stock_samples(current, common) if is_dataset else []
        for arm in current.arms:
            label = arm.mode.label
            own = [sample for sample in common if sample.mode == label]
            if own and label != current.repeated:
                setup = describe_setup(
                    self.plan,
                    self._environment,
                    arm,
                    drafts=is_dataset and arm.mode.drafts,
                    vram_bytes=current.vram_bytes.get(label),
                    lookahead=current.lookahead.get(label),
                    device_use=current.device_use.get(label, DeviceUse()),
                    prompts=len({sample.prompt for sample in own}) if is_dataset else None,
                    prompts_left_out=self._n_left_out if is_dataset else None,
                    roofline=self._roofline,
                    test=synthetic,
                    load=(self._load_before, self._load),
                )
                unbudgeted = [sample for sample in common if sample.mode == unbudgeted_label(arm.mode)]
                best = over_best_stock(own, stock) if arm.mode.engine == "moeedge" else ()
                yield self._row(arm, test, own, reference, unbudgeted, current, setup=setup, best_stock=best)

    def _stock_samples(self, current: Pass, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples of each stock mode; none where the pass lacks a stock mode, which could be the fastest."""
        stock = [mode for mode in self.plan.modes if mode.engine == "stock"]
        found = [[sample for sample in samples if sample.mode == mode.label] for mode in stock]
        return found if len(stock) > 1 and all(mode in current.modes for mode in stock) else []

    def _row(
        self,
        arm: BenchArm,
        test: str,
        own: Sequence[Sample],
        reference: Sequence[Sample],
        unbudgeted: Sequence[Sample],
        current: Pass,
        *,
        setup: dict[str, Any],
        best_stock: tuple[StockRatio, ...],
    ) -> BenchRow:
        mode, output, scores, figures = arm.mode, None, Scores(), None
        is_dataset = self.plan.dataset is not None and test == self.plan.dataset.name
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

    def _text_of(self, sample: Sample) -> str:
        assert self._models is not None
        return answer_text(self._models[0], sample.tokens)

    def _check(self, own: Sequence[Sample], reference: Sequence[Sample], mode: BenchMode) -> OutputCheck:
        def logits_at(sample: Sample, position: int) -> NDArray[np.float32]:  # only where answers differ
            return logits_in(self.arms.stock(REFERENCE).session.target)(sample, position)

        return check_answers(own, reference, logits_at, self._end_tokens, lossy=mode.budget is not None)

    def _check_split(self, arm: BenchArm, current: Pass) -> OutputCheck:
        """Checks a mode with other layers on the GPU by stock llama.cpp with the same layers there.

        Its own context computes the logits, so it must be open.
        """
        dataset = self.plan.dataset
        samples = current.samples.get(dataset.name, []) if dataset is not None else []
        own = [sample for sample in samples if sample.mode == arm.mode.label]
        reference = [sample for sample in samples if sample.mode == REFERENCE]
        arm.session.set_mode("stock")
        logits_at = logits_in(arm.session.target)
        lossy = arm.mode.budget is not None
        return check_answers(own, reference, logits_at, self._end_tokens, own_split=True, lossy=lossy)

    @cached_property
    def _end_tokens(self) -> list[int]:
        assert self._models is not None
        return stop_tokens(self._models[0])
