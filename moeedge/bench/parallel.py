"""The run of `moeedge bench --parallel`: modes that decode N texts together, for one N after the other.

Texts wait in a queue and join where one ends, so that the batch stays full as long as there are texts; only steps with
N texts count. The modes of one N take turns, since speed-ups compare them. Every answer is compared with the one that
stock llama.cpp gives to the same prompt alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType

from moeedge.bench.config import MODES, REFERENCE, BenchMode, BenchPlan
from moeedge.bench.harness import GREEDY, BenchArm, load_models, never, open_arms, rotated
from moeedge.bench.output_check import OutputCheck, check_answers, logits_in, stop_tokens
from moeedge.bench.parallel_figures import parallel_figures, plain_mode
from moeedge.bench.passes import fit_context
from moeedge.bench.records import BenchRow, describe_setup, make_row, read_environment
from moeedge.bench.runner import Progress
from moeedge.bench.samples import Sample, common_samples, counted
from moeedge.bench.scores import Scores
from moeedge.bench.whole_layers import DeviceUse, session_use
from moeedge.data import Prompt
from moeedge.engine.loading import kv_on_gpu, resolve_device
from moeedge.engine.parallel import ParallelGeneration
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.machine_load import LoadReading
from moeedge.llama.context_size import choose_n_ctx

_WARM_UP_TOKENS = 8


@dataclass
class Round:
    """The modes of one N, and what they have answered."""

    arms: list[BenchArm]
    samples: list[Sample] = field(default_factory=list)  # all texts together
    answers: list[Sample] = field(default_factory=list)  # text by text


class ParallelBench:
    """A context manager: entering loads, `run` measures; `rows` holds a row per mode and N."""

    def __init__(self, plan: BenchPlan, progress: Progress) -> None:
        self.plan = plan
        self.rows: list[BenchRow] = []
        self._progress = progress
        self._base: EngineConfig = plan.base  # with the context that the prompts need
        self._prompts: list[Prompt] = []
        self._resources = ExitStack()
        self._environment = read_environment()
        self._notes: set[str] = set()

    def __enter__(self) -> ParallelBench:
        plan = self.plan
        assert plan.dataset is not None
        asked = [replace(prompt, turns=prompt.turns[:1]) for prompt in plan.dataset.prompts]
        most = max(mode.n_parallel or 1 for mode in plan.modes)
        self._device = resolve_device(plan.base)
        with ExitStack() as stack:
            self._models = load_models(plan.base, plan.modes, stack, self._device)
            self._base, kept = fit_context(plan.base, self._models[0], asked, plan.n_predict, 0)
            self._prompts, self._n_left_out = list(kept), len(asked) - len(kept)
            if self._n_left_out:
                self._report([f"{self._n_left_out} of {len(asked)} prompts exceed the context: left out."])
            if len(self._prompts) < most:
                raise InputError(
                    f"{most} texts are to be decoded together, and there are {len(self._prompts)} prompts.",
                    "Use a larger --limit, a larger dataset or a smaller --parallel.",
                )
            self._check_memory(most)
            (self._stock,) = open_arms(self._base, [MODES[REFERENCE]], self._models, stack)
            self._prompt_ids = [self._stock.prompt_tokens(_messages(prompt)) for prompt in self._prompts]
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def run(self, cancel: Callable[[], bool] = never) -> bool:
        """Measures one N after the other; True from `cancel` ends the run. Returns whether everything was measured."""
        plan = self.plan
        self._progress.begin(len(self._prompts) + plan.repetitions * len(plan.modes))
        reference = self._single_answers(cancel)
        for count in dict.fromkeys(mode.n_parallel for mode in plan.modes):
            if cancel():
                break
            modes = [mode for mode in plan.modes if mode.n_parallel == count]
            with ExitStack() as stack:
                arms = open_arms(self._base, modes, self._models, stack)
                for arm in arms:
                    self._report(arm.session.info.notes)
                current = Round(arms)
                self._measure(current, cancel)
                self.rows += self._rows_of(current, reference)
        return not cancel()

    def _check_memory(self, most: int) -> None:
        """Raises InputError, before anything is measured, where the contexts of the largest N do not fit."""
        try:
            replace(self._base, n_parallel=most)
        except ValueError as error:
            raise InputError(f"Too large: {error}.", "Use a smaller -c or a smaller --parallel.") from None
        if not kv_on_gpu(self._base, self._device, self._models[0]):
            models = [model for model in self._models if model is not None]
            settings = (self._base.context, self._base.draft_context)
            choose_n_ctx(models, self._base.n_ctx, n_parallel=most, settings=settings)

    def _report(self, notes: Iterable[str]) -> None:
        """Reports each note once."""
        for text in notes:
            if text not in self._notes:
                self._notes.add(text)
                self._progress.note(text)

    def _single_answers(self, cancel: Callable[[], bool]) -> list[Sample]:
        """Stock llama.cpp's answer to each prompt alone."""
        answers = []
        for prompt, prompt_ids in zip(self._prompts, self._prompt_ids, strict=True):
            if cancel():
                break
            self._stock.session.reset()
            sample = self._stock.answer(
                prompt_ids,
                n_predict=self.plan.n_predict,
                ignore_eos=self.plan.ignore_eos,
                cancel=cancel,
                prompt=prompt.id,
            )
            answers.append(sample)
            self._progress.advance(sample, "alone")
        return answers

    def _measure(self, current: Round, cancel: Callable[[], bool]) -> None:
        plan = self.plan
        if plan.warm_up:
            for arm in current.arms:
                self._generate(arm, self._prompt_ids[: arm.mode.n_parallel], _WARM_UP_TOKENS, cancel)
        for repetition in range(plan.repetitions):
            for place, arm in enumerate(rotated(current.arms, repetition)):
                if cancel():
                    return
                sample, answers = self._answer(arm, plan.n_predict, repetition, place, cancel)
                if cancel():  # the answers may be cut short: no sample
                    return
                current.samples.append(sample)
                current.answers += answers
                self._progress.advance(sample, self._test)

    def _answer(
        self, arm: BenchArm, n_predict: int, repetition: int, place: int, cancel: Callable[[], bool]
    ) -> tuple[Sample, list[Sample]]:
        """Answers all prompts; the sample holds the steps with N texts, the answers one text each."""
        session, label, n_parallel = arm.session, arm.mode.label, arm.mode.n_parallel or 1
        before, load_before, cpu_before_s = session.placement_stats(), LoadReading.now(), time.process_time()
        generation = self._generate(arm, self._prompt_ids, n_predict, cancel)
        cpu_s, others_s = time.process_time() - cpu_before_s, LoadReading.now().others_s_since(load_before)
        drain_s = arm.drain_transfers()
        stats, own = generation.stats, generation.of_texts[n_parallel]
        sample = Sample(
            mode=label,
            prompt="",
            turn=0,
            repetition=repetition,
            order=place,
            prompt_tokens=sum(map(len, self._prompt_ids)),
            prefill_tokens=stats.prefill_tokens,
            prefill_s=stats.prefill_s,
            generated_tokens=sum(len(answer.tokens) for answer in generation.answers),
            decode_tokens=own.generated_tokens,
            decode_s=own.decode_s,
            all_decode_s=stats.decode_s,
            drain_s=drain_s,
            steps=n_parallel * own.steps,
            drafted=own.drafted,
            accepted=own.accepted,
            experts_sum=n_parallel * own.experts_sum,
            draft_s=own.draft_s,
            verify_s=own.verify_s,
            observe_s=own.observe_s,
            cpu_s=cpu_s,
            others_s=others_s,
            warm=self.plan.warm_up or repetition > 0,
            placement=counted(before, session.placement_stats()),
        )
        answers = [
            Sample(
                mode=label,
                prompt=prompt.id,
                turn=0,
                repetition=repetition,
                order=place,
                tokens=list(answer.tokens),
                prompt_ids=list(prompt_ids),
                stop_reason=answer.stop_reason,
            )
            for prompt, prompt_ids, answer in zip(self._prompts, self._prompt_ids, generation.answers, strict=True)
        ]
        return sample, answers

    def _generate(
        self, arm: BenchArm, prompts: Sequence[Sequence[int]], n_predict: int, cancel: Callable[[], bool]
    ) -> ParallelGeneration:
        """Answers the prompts from empty KV caches. Raises KeyboardInterrupt where Ctrl-C ended an answer."""
        arm.session.reset()
        generation = arm.session.generate_parallel(
            prompts, n_predict=n_predict, sampling=GREEDY, cancel=cancel, ignore_eos=self.plan.ignore_eos
        )
        for _ in generation:
            pass
        if not cancel() and any(answer.stop_reason == "interrupted" for answer in generation.answers):
            raise KeyboardInterrupt
        return generation

    # rows

    @property
    def _test(self) -> str:
        assert self.plan.dataset is not None
        return self.plan.dataset.name

    def _rows_of(self, current: Round, reference: Sequence[Sample]) -> list[BenchRow]:
        """Returns a row per mode of one N, of the repetitions that all of them have done."""
        modes = [arm.mode for arm in current.arms]
        common = common_samples(current.samples, [mode.label for mode in modes], 1)

        def own(mode: BenchMode) -> list[Sample]:
            return [sample for sample in common if sample.mode == mode.label]

        rows = []
        for arm in current.arms:
            mode, samples = arm.mode, own(arm.mode)
            if not samples:
                continue
            vram = arm.session.placement_stats()
            plain = plain_mode(mode, modes)
            setup = describe_setup(
                self.plan,
                self._environment,
                arm,
                drafts=mode.drafts,
                vram_bytes=None if vram is None else vram.vram_used_bytes,
                lookahead=None if vram is None else vram.lookahead,
                device_use=session_use(arm.session, self._device) if self._device.kind != "none" else DeviceUse(),
                prompts=len(self._prompts),
                prompts_left_out=self._n_left_out,
            )
            figures = parallel_figures(mode, samples, None if plain is None else (plain, own(plain)), setup["gamma"])
            stock = [sample for other in modes if other.name == REFERENCE for sample in own(other)]
            done = {sample.repetition for sample in samples}
            answers = [s for s in current.answers if s.mode == mode.label and s.repetition in done]
            rows.append(
                make_row(
                    mode,
                    self._test,
                    samples,
                    stock,
                    output=self._check(answers, reference),
                    scores=Scores(),
                    setup=setup,
                    parallel=figures,
                    n_planned=self.plan.repetitions,
                )
            )
        return rows

    def _check(self, answers: Sequence[Sample], reference: Sequence[Sample]) -> OutputCheck:
        logits_at = logits_in(self._stock.session.target)
        return check_answers(answers, reference, logits_at, stop_tokens(self._models[0]))


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [message.as_dict() for message in prompt.turns[0]]
