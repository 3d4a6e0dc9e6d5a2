"""The run: models loaded once, modes interleaved, samples collected; rows can be made of whatever was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.conversations import run_conversation, warm_up
from moeedge.bench.environment import read_environment
from moeedge.bench.lanes import Lane, fit_context, load_models, open_lanes
from moeedge.bench.modes import REFERENCE
from moeedge.bench.output_check import OutputCheck, check_output
from moeedge.bench.plan import BenchPlan
from moeedge.bench.record import BenchRow, describe_setup, summarize
from moeedge.bench.samples import Sample
from moeedge.bench.statistics import common_samples
from moeedge.bench.synthetic import n_slices, run_decode, run_prefill, synthetic_lanes
from moeedge.data import Prompt
from moeedge.engine.types import Phase


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
        self._progress = progress
        self._samples: dict[str, list[Sample]] = {}  # by test
        self._lanes: list[Lane] = []
        self._prompts: tuple[Prompt, ...] = ()
        self._resources = ExitStack()
        self._environment = read_environment()
        self._end_tokens: list[int] | None = None

    def __enter__(self) -> Bench:
        plan = self.plan
        with ExitStack() as stack:
            models = load_models(plan.base, plan.modes, stack)
            asked = plan.dataset.prompts if plan.dataset is not None else ()
            n_synthetic = max(plan.n_prompt, plan.n_gen)
            base, self._prompts = fit_context(plan.base, models[0], asked, plan.n_predict, n_synthetic)
            if len(self._prompts) < len(asked):
                left_out = len(asked) - len(self._prompts)
                self._progress.note(f"{left_out} of {len(asked)} prompts do not fit the context and are left out.")
            self._lanes = open_lanes(base, plan.modes, models, stack)
            self._resources = stack.pop_all()
        for note in dict.fromkeys(note for lane in self._lanes for note in lane.session.info.notes):
            self._progress.note(note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def run(self, cancel: Callable[[], bool] = never) -> bool:
        """Measures all tests; `cancel` is asked often, True ends the run. Returns whether everything was measured."""
        plan = self.plan
        synthetic, notes = synthetic_lanes(self._lanes)
        n_synthetic = len(synthetic) * plan.repetitions * (bool(plan.n_prompt) + n_slices(plan.n_gen))
        n_turns = sum(len(prompt.turns) for prompt in self._prompts)
        self._progress.begin(n_turns * len(self._lanes) * plan.repetitions + n_synthetic)
        if n_synthetic:
            for note in notes:
                self._progress.note(note)
        if plan.dataset is not None:
            self._collect(plan.dataset.name, self._conversations(cancel))
        if plan.n_prompt:
            self._collect(f"pp{plan.n_prompt}", run_prefill(synthetic, plan.n_prompt, plan.repetitions, cancel))
        if plan.n_gen:
            self._collect(f"tg{plan.n_gen}", run_decode(synthetic, plan.n_gen, plan.repetitions, cancel))
        return not cancel()

    def _collect(self, test: str, samples: Iterator[Sample]) -> None:
        kept = self._samples.setdefault(test, [])
        for sample in samples:
            kept.append(sample)
            self._progress.advance(sample, test)

    def _conversations(self, cancel: Callable[[], bool]) -> Iterator[Sample]:
        warm_up(self._lanes, self._prompts[0], cancel)
        for repetition in range(self.plan.repetitions):
            for index, prompt in enumerate(self._prompts):
                if cancel():
                    return
                yield from run_conversation(
                    self._lanes,
                    prompt,
                    repetition=repetition,
                    rotation=repetition + index,
                    n_predict=self.plan.n_predict,
                    ignore_eos=self.plan.ignore_eos,
                    cancel=cancel,
                )

    def rows(self) -> list[BenchRow]:
        """A row per test and mode, of the work that every mode of the test has done."""
        rows = []
        for test, samples in self._samples.items():
            names = list(dict.fromkeys(sample.mode for sample in samples))
            is_dataset = self.plan.dataset is not None and test == self.plan.dataset.name
            expected = self._expected_samples(test)
            common = common_samples(samples, names, expected)
            reference = [sample for sample in common if sample.mode == REFERENCE]
            for lane in self._lanes:
                own = [sample for sample in common if sample.mode == lane.mode.name]
                if own:
                    rows.append(self._row(lane, test, own, reference, is_dataset=is_dataset))
        return rows

    def _expected_samples(self, test: str) -> int:
        """Samples per mode of a finished repetition."""
        if self.plan.dataset is not None and test == self.plan.dataset.name:
            return sum(len(prompt.turns) for prompt in self._prompts)
        return n_slices(self.plan.n_gen) if test.startswith("tg") else 1

    def _row(
        self, lane: Lane, test: str, own: Sequence[Sample], reference: Sequence[Sample], *, is_dataset: bool
    ) -> BenchRow:
        info = lane.session.info
        setup = describe_setup(
            self.plan, self._environment, lane.session.model.info, info, drafts=is_dataset and lane.mode.drafts
        )
        asked = self.plan.dataset.prompts if self.plan.dataset is not None else ()
        setup["prompts"] = len({sample.prompt for sample in own}) if is_dataset else None
        setup["prompts_left_out"] = len(asked) - len(self._prompts) if is_dataset else None
        output = self._check(own, reference) if is_dataset and reference else None
        return summarize(lane.mode, test, own, reference, output=output, info=info, setup=setup)

    def _check(self, own: Sequence[Sample], reference: Sequence[Sample]) -> OutputCheck:
        session = next(lane.session for lane in self._lanes if lane.mode.name == REFERENCE)
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
