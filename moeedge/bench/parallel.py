"""The run of `moeedge bench --parallel`: modes that decode N texts together, for one N after the other.

Texts wait in a queue and join where one ends, so that the batch stays full as long as there are texts; only steps with
N texts count. The modes of one N take turns, since speed-ups compare them. Every answer is compared with the one that
stock llama.cpp gives to the same prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from moeedge.bench.config import MODES, REFERENCE
from moeedge.bench.figures import parallel_figures, plain_mode
from moeedge.bench.harness import GREEDY, BenchArm, Meter, load_models, never, open_arms, rotated, run_conversations
from moeedge.bench.output_check import check_answers, logits_in
from moeedge.bench.records import BenchRow, describe_setup, make_row, read_end
from moeedge.bench.runner import Run
from moeedge.bench.samples import Sample, common_samples
from moeedge.bench.scores import Scores
from moeedge.engine.loading import kv_on_gpu, resolve_device
from moeedge.engine.parallel import ParallelGeneration
from moeedge.errors import InputError
from moeedge.llama.context_size import choose_n_ctx

_WARM_UP_TOKENS = 8

Samples = Sequence[Sample]


class ParallelBench(Run):
    """The run of modes that decode several texts at a time: a row per mode and N."""

    def __enter__(self) -> ParallelBench:
        plan = self.plan
        assert plan.dataset is not None
        self._rows: list[BenchRow] = []
        most = max(mode.n_parallel or 1 for mode in plan.modes)
        self._device = resolve_device(plan.base)
        with ExitStack() as stack:
            self._models = load_models(plan.base, plan.modes, stack, self._device)
            self._fit([replace(prompt, turns=prompt.turns[:1]) for prompt in plan.dataset.prompts])
            if len(self._prompts) < most:
                raise InputError(
                    f"{most} texts are to be decoded together, and there are {len(self._prompts)} prompts.",
                    "Use a larger --limit, a larger dataset or a smaller --parallel.",
                )
            self._check_memory(most)
            (self._stock,) = open_arms(self._base, [MODES[REFERENCE]], self._models, stack)
            self._prompt_ids = [
                self._stock.prompt_tokens([message.as_dict() for message in prompt.turns[0]])
                for prompt in self._prompts
            ]
            self._resources = stack.pop_all()
        return self

    def rows(self) -> list[BenchRow]:
        """Returns a row per mode and N that was measured."""
        return self._rows

    def run(self, cancel: Callable[[], bool] = never) -> bool:
        """Measures one N after the other; True from `cancel` ends the run. Returns whether everything was measured."""
        plan = self.plan
        self._progress.begin(len(self._prompts) + plan.repetitions * len(plan.modes))
        reference = []  # stock llama.cpp's answer to each prompt alone
        for sample in run_conversations(
            [self._stock],
            self._prompts,
            repetitions=1,
            n_predict=plan.n_predict,
            ignore_eos=plan.ignore_eos,
            cancel=cancel,
        ):
            reference.append(sample)
            self._progress.advance(sample, "alone")
        for count in dict.fromkeys(mode.n_parallel for mode in plan.modes):
            if cancel():
                break
            modes = [mode for mode in plan.modes if mode.n_parallel == count]
            with ExitStack() as stack:
                arms = open_arms(self._base, modes, self._models, stack)
                for arm in arms:
                    self._report(arm.session.info.notes)
                samples, answers = self._measure(arms, cancel)
                self._rows += self._rows_of(arms, samples, answers, reference)
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

    def _measure(self, arms: Sequence[BenchArm], cancel: Callable[[], bool]) -> tuple[list[Sample], list[Sample]]:
        """The modes of one N take turns; returns samples of all texts together, and the answers text by text."""
        plan = self.plan
        samples: list[Sample] = []
        answers: list[Sample] = []
        for arm in arms if plan.warm_up else ():
            self._generate(arm, self._prompt_ids[: arm.mode.n_parallel], _WARM_UP_TOKENS, cancel)
        for repetition in range(plan.repetitions):
            for place, arm in enumerate(rotated(arms, repetition)):
                if cancel():
                    return samples, answers
                sample, texts = self._answer(arm, plan.n_predict, repetition, place, cancel)
                if cancel():  # the answers may be cut short: no sample
                    return samples, answers
                samples.append(sample)
                answers += texts
                self._progress.advance(sample, self._dataset or "")
        return samples, answers

    def _answer(
        self, arm: BenchArm, n_predict: int, repetition: int, place: int, cancel: Callable[[], bool]
    ) -> tuple[Sample, list[Sample]]:
        """Answers all prompts; the sample holds the steps with N texts, the answers one text each."""
        label, n_parallel = arm.mode.label, arm.mode.n_parallel or 1
        with Meter(arm.session) as meter:
            generation = self._generate(arm, self._prompt_ids, n_predict, cancel)
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
            cpu_s=meter.cpu_s,
            others_s=meter.others_s,
            warm=self.plan.warm_up or repetition > 0,
            placement=meter.counters(),
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

    def _rows_of(
        self,
        arms: Sequence[BenchArm],
        samples: Sequence[Sample],
        answers: Sequence[Sample],
        reference: Sequence[Sample],
    ) -> list[BenchRow]:
        """Returns a row per mode of one N, of the repetitions that all of them have done."""
        modes = [arm.mode for arm in arms]
        common = common_samples(samples, [mode.label for mode in modes], 1)
        own = {mode: [sample for sample in common if sample.mode == mode.label] for mode in modes}
        done = {sample.repetition for sample in common}
        logits_at = logits_in(self._stock.session.target)
        rows = []
        for arm in arms if common else ():
            mode, plain = arm.mode, plain_mode(arm.mode, modes)
            setup = describe_setup(
                self.plan,
                self._environment,
                arm,
                read_end(arm, self._device),
                drafts=mode.drafts,
                prompts=len(self._prompts),
                prompts_left_out=self._n_left_out,
            )
            texts = [text for text in answers if text.mode == mode.label and text.repetition in done]
            pair = None if plain is None else (plain, own[plain])
            rows.append(
                make_row(
                    mode,
                    self._dataset or "",
                    own[mode],
                    [sample for other in modes if other.name == REFERENCE for sample in own[other]],
                    output=check_answers(texts, reference, logits_at, self._end_tokens),
                    scores=Scores(),
                    setup=setup,
                    parallel=parallel_figures(mode, own[mode], pair, setup["gamma"]),
                    n_planned=self.plan.repetitions,
                )
            )
        return rows
