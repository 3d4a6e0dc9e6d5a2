"""The run: models loaded once, modes interleaved, samples collected; rows can be made of whatever was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.arms import (
    BenchArm,
    Pass,
    caches_fit,
    fit_context,
    largest_cache,
    load_models,
    open_arms,
    split_passes,
)
from moeedge.bench.config import REFERENCE, BenchMode, BenchPlan, is_swept
from moeedge.bench.harness import answer_text, run_conversation, warm_up
from moeedge.bench.output_check import OutputCheck, check_output
from moeedge.bench.records import BenchRow, describe_setup, read_environment, summarize
from moeedge.bench.samples import Sample, common_samples
from moeedge.bench.scores import AnswerScorer, Scores, check_scoring
from moeedge.bench.synthetic import SyntheticRun, n_slices, synthetic_modes
from moeedge.data import Prompt
from moeedge.llama.model import Model
from moeedge.native.abi import Phase


class Progress(Protocol):
    """Told how far a run is; the command line shows it."""

    def begin(self, total: int) -> None:
        """`total` samples will come."""

    def advance(self, sample: Sample, test: str) -> None:
        """One sample is there."""

    def note(self, text: str) -> None:
        """A sentence for the user."""


def never() -> bool:
    """A `cancel` that lets everything run."""
    return False


class Bench:
    """A context manager: opening it loads, `run` measures, `rows` computes (with the contexts, so call it inside)."""

    def __init__(self, plan: BenchPlan, progress: Progress) -> None:
        self.plan = plan
        self._base = plan.base  # with the context that the prompts need
        self._progress = progress
        self._passes: list[Pass] = []
        self._models: tuple[Model, Model | None] | None = None
        self._prompts: tuple[Prompt, ...] = ()
        self._resources = ExitStack()
        self._environment = read_environment()
        self._end_tokens: list[int] | None = None
        self._said: set[str] = set()
        self._scorer: AnswerScorer | None = None

    def __enter__(self) -> Bench:
        plan = self.plan
        if plan.score and plan.dataset is not None:
            for note in check_scoring(plan.dataset, run_code=plan.run_code):
                self._note(note)
            self._scorer = AnswerScorer(plan.dataset, self._text_of, run_code=plan.run_code)
        with ExitStack() as stack:
            self._models = load_models(plan.base, plan.modes, stack)
            asked = plan.dataset.prompts if plan.dataset is not None else ()
            n_synthetic = max(plan.n_prompt, plan.n_gen)
            self._base, self._prompts = fit_context(plan.base, self._models[0], asked, plan.n_predict, n_synthetic)
            if len(self._prompts) < len(asked):
                left_out = len(asked) - len(self._prompts)
                self._note(f"{left_out} of {len(asked)} prompts do not fit the context and are left out.")
            # without our cache they stay open: every pass and the output check need the reference
            arms = self._open([mode for mode in plan.modes if not is_swept(mode)], stack)
            self._passes = split_passes(plan.modes, together=self._open_caches(arms, stack))
            self._passes[0].arms = arms
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def _open_caches(self, arms: list[BenchArm], stack: ExitStack) -> bool:
        """Adds the swept modes to `lanes` if all of their caches fit the device; returns whether."""
        swept = [mode for mode in self.plan.modes if is_swept(mode)]
        if not swept:
            return True
        probe = largest_cache(swept)
        others = [mode for mode in swept if mode is not probe]
        with ExitStack() as probing:
            first = self._open([probe], probing)
            if others and not caches_fit(first[0], others):
                self._note("The caches do not fit the device at once: they are measured one after the other.")
                return False
            arms += first
            arms += self._open(others, stack)
            stack.enter_context(probing.pop_all())
        return True

    def _open(self, modes: Sequence[BenchMode], stack: ExitStack) -> list[BenchArm]:
        assert self._models is not None
        arms = open_arms(
            self._base, modes, self._models, stack, notify=lambda notification: self._note(notification.text)
        )
        for arm in arms:
            for note in arm.session.info.notes:
                self._note(note)
        return arms

    def _note(self, text: str) -> None:
        """Tell the user, once."""
        if text not in self._said:
            self._said.add(text)
            self._progress.note(text)

    def run(self, cancel: Callable[[], bool] = never) -> bool:
        """Measures all tests; `cancel` is asked often, True ends the run. Returns whether everything was measured."""
        self._progress.begin(sum(self._n_samples(one) for one in self._passes))
        for one in self._passes:
            if cancel():
                break
            with ExitStack() as stack:
                open_now = {arm.mode.label: arm for arm in self._passes[0].arms}
                missing = [mode for mode in one.modes if mode.label not in open_now]
                open_now |= {arm.mode.label: arm for arm in self._open(missing, stack)}
                one.arms = [open_now[mode.label] for mode in one.modes]
                self._measure(one, cancel)
        return not cancel()

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Those of the dataset that fit the context."""
        return self._prompts

    @contextmanager
    def arm(self, mode: BenchMode) -> Iterator[BenchArm]:
        """The lane of one of the plan's modes: one that is open anyway, or its own for as long."""
        open_now = {arm.mode.label: arm for arm in self._passes[0].arms} if self._passes else {}
        with ExitStack() as stack:
            still = mode.label in open_now and len(self._passes) == 1
            yield open_now[mode.label] if still else self._open([mode], stack)[0]

    def _n_samples(self, one: Pass) -> int:
        """Samples of a finished pass."""
        plan = self.plan
        n_synthetic = len(synthetic_modes(one.modes)[0]) * (bool(plan.n_prompt) + n_slices(plan.n_gen))
        n_turns = sum(len(prompt.turns) for prompt in self._prompts)
        return plan.repetitions * (n_turns * len(one.modes) + n_synthetic)

    def _measure(self, one: Pass, cancel: Callable[[], bool]) -> None:
        plan = self.plan
        kept, notes = synthetic_modes(one.modes)
        synthetic = [arm for arm in one.arms if arm.mode in kept]
        run = SyntheticRun(synthetic, plan.repetitions, plan.warm_up, cancel)
        if plan.n_prompt or plan.n_gen:
            for note in notes:
                self._note(note)
        if plan.dataset is not None:
            self._collect(one, plan.dataset.name, self._conversations(one, cancel))
        if plan.n_prompt:
            self._collect(one, f"pp{plan.n_prompt}", run.prefill(plan.n_prompt))
        if plan.n_gen:
            self._collect(one, f"tg{plan.n_gen}", run.decode(plan.n_gen))
        for arm in one.arms:
            stats = arm.session.placement_stats()
            if stats is not None and stats.vram_used_bytes is not None:
                one.vram_bytes[arm.mode.label] = stats.vram_used_bytes

    def _collect(self, one: Pass, test: str, samples: Iterator[Sample]) -> None:
        kept = one.samples.setdefault(test, [])
        for sample in samples:
            kept.append(sample)
            self._progress.advance(sample, test)

    def _conversations(self, one: Pass, cancel: Callable[[], bool]) -> Iterator[Sample]:
        if self.plan.warm_up:
            warm_up(one.arms, self._prompts[0], cancel)
        for repetition in range(self.plan.repetitions):
            for index, prompt in enumerate(self._prompts):
                if cancel():
                    return
                yield from run_conversation(
                    one.arms,
                    prompt,
                    repetition=repetition,
                    rotation=repetition + index,
                    n_predict=self.plan.n_predict,
                    ignore_eos=self.plan.ignore_eos,
                    warm=self.plan.warm_up or repetition > 0,
                    cancel=cancel,
                )

    def rows(self) -> list[BenchRow]:
        """A row per test and mode, of the work that every mode of its pass has done."""
        tests = dict.fromkeys(test for one in self._passes for test in one.samples)
        return [row for test in tests for one in self._passes for row in self._pass_rows(one, test)]

    def _pass_rows(self, one: Pass, test: str) -> Iterator[BenchRow]:
        samples = one.samples.get(test, [])
        labels = list(dict.fromkeys(sample.mode for sample in samples))
        is_dataset = self.plan.dataset is not None and test == self.plan.dataset.name
        common = common_samples(samples, labels, self._expected_samples(test))
        reference = [sample for sample in common if sample.mode == REFERENCE]
        for arm in one.arms:
            own = [sample for sample in common if sample.mode == arm.mode.label]
            if own and arm.mode.label != one.repeated:
                row = self._row(arm, test, own, reference, is_dataset=is_dataset)
                row.setup["vram_bytes"] = one.vram_bytes.get(arm.mode.label)
                yield row

    def _expected_samples(self, test: str) -> int:
        """Samples per mode of a finished repetition."""
        if self.plan.dataset is not None and test == self.plan.dataset.name:
            return sum(len(prompt.turns) for prompt in self._prompts)
        return n_slices(self.plan.n_gen) if test.startswith("tg") else 1

    def _row(
        self, arm: BenchArm, test: str, own: Sequence[Sample], reference: Sequence[Sample], *, is_dataset: bool
    ) -> BenchRow:
        drafts = is_dataset and arm.mode.drafts
        model = arm.session.model.info
        setup = describe_setup(self.plan, self._environment, arm.mode, model, arm.session.info, drafts=drafts)
        asked = self.plan.dataset.prompts if self.plan.dataset is not None else ()
        setup["prompts"] = len({sample.prompt for sample in own}) if is_dataset else None
        setup["prompts_left_out"] = len(asked) - len(self._prompts) if is_dataset else None
        output = self._check(own, reference) if is_dataset and reference else None
        scores = Scores()
        if is_dataset and self._scorer is not None:
            own = [self._scorer.scored(sample) for sample in own]
            scores = self._scorer.summary(own)
        return summarize(arm.mode, test, own, reference, output=output, scores=scores, setup=setup)

    def _text_of(self, sample: Sample) -> str:
        assert self._models is not None
        return answer_text(self._models[0], sample.tokens)

    def _check(self, own: Sequence[Sample], reference: Sequence[Sample]) -> OutputCheck:
        session = next(arm.session for arm in self._passes[0].arms if arm.mode.name == REFERENCE)
        model = session.model

        def logits_at(sample: Sample, position: int) -> NDArray[np.float32]:
            session.reset()
            logits = session.target.decode(sample.prompt_ids, phase=Phase.PREFILL, logits="last")
            for token in sample.tokens[:position]:  # one by one, as they were said
                logits = session.target.decode([token], phase=Phase.DECODE, logits="last")
            return np.array(logits[0])  # a copy: the view ends with the next decode

        if self._end_tokens is None:
            self._end_tokens = [token for token in range(model.info.n_vocab) if model.is_eog(token)]
        return check_output(own, reference, logits_at, self._end_tokens)
