"""The run of `moeedge bench`: loads the models once, lets the arms of each pass take turns, makes rows of samples."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.bench.arms import Arms, ArmsInTurn, Pass, load_models
from moeedge.bench.config import REFERENCE, BenchMode, BenchPlan
from moeedge.bench.experiment import (
    BenchArm,
    Conversations,
    ScriptedWork,
    SyntheticWork,
    Together,
    Work,
    answer_text,
    synthetic_modes,
)
from moeedge.bench.figures import budget_figures, over_best_stock, parallel_figures, plain_mode
from moeedge.bench.journal import Journal
from moeedge.bench.quality import (
    AnswerScorer,
    LogitsAt,
    OutputCheck,
    check_answers,
    check_scoring,
    logits_in,
    measure_perplexity,
)
from moeedge.bench.records import BenchRow, compare_with_whole_layers, describe_setup, make_row, read_end
from moeedge.bench.roofline import Roofline, measure_roofline
from moeedge.bench.samples import Sample, Samples, common_samples
from moeedge.data.prompts import Prompt
from moeedge.engine.loading import kv_on_gpu, load_target, memory_of, resolve_device
from moeedge.errors import ContextTooSmallError, InputError
from moeedge.hardware.host import LoadReading, others_now
from moeedge.hardware.provenance import read_provenance
from moeedge.llama.model import Model
from moeedge.llama.model_memory import choose_n_ctx
from moeedge.native.abi import Phase, RoutingMode
from moeedge.run import Notification, Run, rotated, seconds_of

_CONTEXT_STEP = 256  # llama.cpp pads contexts to multiples of this many tokens
_ALONE = -1  # the pass of answers to single prompts in a journal
_TOKENS_AROUND_ANSWER = 16  # that a template puts there; the exact number is not known before the answer is
_HOOK_PAIRS, _HOOK_WARM_UP = 52, 4


class Bench:
    """A context manager that loads; `measure` measures, `rows` computes (call both inside)."""

    def __init__(self, plan: BenchPlan, run: Run, journal: Journal | None = None, part: int = 0) -> None:
        """run: its progress is in samples.

        journal: gets every sample, and has those of an interrupted run, as part `part`; None: nothing is kept.
        """
        self.plan, self._part, self._show = plan, part, run.show
        self._run = replace(run, show=self._show_once)
        self.arms: Arms | ArmsInTurn  # the sessions of the run
        self._journal = journal or Journal(None, ())
        self._base = plan.base  # with the context that the prompts need
        self._models: tuple[Model, Model | None]
        self._prompts: tuple[Prompt, ...] = ()
        self._alone: list[Sample] = []  # stock llama.cpp's answers, where others answer several prompts at once
        self._resources = ExitStack()
        self._environment = read_provenance(plan.base.model, trace=plan.base.routing)
        self._hook_costs: dict[str, float] = {}  # of forced routing, by engine
        self._notes: set[str] = set()  # those that were reported
        self._scorer: AnswerScorer | None = None
        self._roofline: Roofline | None = None
        self._load_before = others_now()
        self._load: float | None = None  # of other programs, while the run measured

    def __enter__(self) -> Bench:
        plan = self.plan
        if plan.score and plan.dataset is not None:
            for note in check_scoring(plan.dataset, run_code=plan.run_code):
                self._run.say(note)
            self._scorer = AnswerScorer(plan.dataset, self._text_of, run_code=plan.run_code)
        n_synthetic = max([0, *(test.n_ctx for test in plan.tests), *(test.n_ctx for test in plan.scripted)])
        if 0 < plan.base.n_ctx < n_synthetic:
            needed = f"The synthetic tests need {n_synthetic:,} tokens, but the context has {plan.base.n_ctx:,}."
            raise ContextTooSmallError(needed, f"Leave out -c, or use -c {n_synthetic}.")
        with ExitStack() as stack:
            has_drafts = any(mode.drafts for mode in plan.modes)
            self._device = resolve_device(plan.base if has_drafts else replace(plan.base, draft=None))
            in_turn = self._device.loads_misses  # each mode loads its own experts into RAM
            if in_turn and not self._device.ram_alone:
                hint = "Measure one of them: -dev none, or --ram off."
                raise InputError(f"bench does not measure experts in RAM next to {self._device.label}.", hint)
            if in_turn:
                self._models = stack.enter_context(load_target(plan.base, self._device, header_only=True)), None
            else:
                self._models = load_models(plan.base, plan.modes, stack, self._device)
            self._fit(n_synthetic)
            how: dict[str, Any] = {"base": self._base, "modes": plan.modes, "run": self._run}
            self.arms = ArmsInTurn(**how) if in_turn else Arms(device=self._device, models=self._models, **how)
            stack.enter_context(self.arms)
            for current in self.arms.passes:
                current.works = self._works()
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def _fit(self, n_synthetic: int) -> None:
        """Chooses the context, and the prompts that fit it. n_synthetic: tokens of the largest synthetic test.

        Without -c the context is that of the longest conversation, limited to the model's training context, or of that
        test, which is not limited: its tokens have no meaning to lose. Raises InputError where no prompt fits, where
        fewer prompts do than are to be decoded together, or where there is no memory for their texts.
        """
        plan, base, model = self.plan, self.plan.base, self._models[0]
        most = max((mode.n_parallel or 0 for mode in plan.modes), default=0)
        prompts: Sequence[Prompt] = () if plan.dataset is None else plan.dataset.prompts
        if most:
            prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
        needs = [_needed_context(model, prompt, plan.n_predict) for prompt in prompts]
        limit = base.n_ctx or model.info.n_ctx_train
        self._prompts = tuple(prompt for prompt, need in zip(prompts, needs, strict=True) if need <= limit)
        if prompts and not self._prompts:
            needed = f"the shortest needs {min(needs):,} tokens with its answer, but the context has {limit:,}"
            raise ContextTooSmallError(f"No prompt fits: {needed}.", "Use a larger -c or a smaller -n.")
        if not base.n_ctx:
            longest = max([n_synthetic, *(need for need in needs if need <= limit)])
            padded = -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP
            self._base = replace(base, n_ctx=min(padded, max(limit, n_synthetic)))
        self._n_left_out = len(prompts) - len(self._prompts)  # they do not fit
        if self._n_left_out:
            self._run.say(f"{self._n_left_out} of {len(prompts)} prompts exceed the context: left out.")
        if not most:
            return
        if len(self._prompts) < most:
            few = f"{most} texts are to be decoded together, and there are {len(self._prompts)} prompts."
            raise InputError(few, "Use a larger --limit, a larger dataset or a smaller --parallel.")
        try:
            replace(self._base, n_parallel=most)
        except ValueError as error:
            raise InputError(f"Too large: {error}.", "Use a smaller -c or a smaller --parallel.") from None
        if not kv_on_gpu(self._base, self._device, model):
            models = [model for model in self._models if model is not None]
            choose_n_ctx(memory_of(self._base, models), self._base.n_ctx, n_parallel=most)

    def _works(self) -> list[Work]:
        """Returns what the modes of a pass do, one after the other."""
        plan, works = self.plan, list[Work]()
        if plan.dataset is not None:
            kind = Together if plan.decodes_together else Conversations
            works.append(kind(name=plan.dataset.name, **self._answering))
        for test in plan.tests:
            works.append(SyntheticWork(name=test.name, warms_up=plan.warm_up, test=test, delay_s=plan.delay_s))
        for scripted in plan.scripted:
            works.append(ScriptedWork(name=scripted.name, warms_up=plan.warm_up, test=scripted))
        return works

    @property
    def _answering(self) -> dict[str, Any]:
        """Fields of a work with prompts."""
        lengths = {"n_predict": self.plan.n_predict, "ignore_eos": self.plan.ignore_eos}
        return {"warms_up": self.plan.warm_up, "prompts": self._prompts, **lengths}

    def _show_once(self, note: Notification) -> None:
        if note not in self._notes:
            self._notes.add(note)
            self._show(note)

    # measuring

    def measure(self) -> bool:
        """Measures all tests, until the run is cancelled. Returns whether everything was measured."""
        passes, together = self.arms.passes, self.plan.decodes_together
        n_samples = sum(len(work.modes(current.modes)) * work.n_samples for current in passes for work in current.works)
        self._run.progress.start("warming up", self.plan.repetitions * n_samples + len(self._prompts) * together)
        begin = LoadReading.now()
        try:
            if together:
                self._answer_alone()
            for index, current in enumerate(passes):
                if self._run.cancelled():
                    break
                with self.arms.opened(current):
                    if self._roofline is None and not together and not isinstance(self.arms, ArmsInTurn):
                        session = current.arms[0].session  # while no mode runs
                        self._roofline = measure_roofline(session.model, session.info.n_threads)
                    self._measure_hooks(current.arms)
                    try:
                        self._measure(current, index)
                    finally:  # after an error the rows hold what every mode had done
                        current.is_measured = any(work.measured for work in current.works)
        finally:
            self._load = LoadReading.now().others_since(begin)
        return not self._run.cancelled()

    def _answer_alone(self) -> None:
        """Lets stock llama.cpp answer each prompt alone, for the output check."""
        alone = Conversations(name="alone", **self._answering | {"warms_up": False, "measured": self._alone})
        self._alone += self._journal.samples(self._part, _ALONE).get(alone.name, ())
        for sample in self._alone:
            self._advance(sample, alone.name)
        for sample in alone.samples([self.arms.reference], [0], run=self._run):
            self._journal.add((self._part, _ALONE, alone.name), sample)
            self._advance(sample, alone.name)

    def _advance(self, sample: Sample, test: str) -> None:
        part = f"{test}, repetition {sample.repetition + 1}"
        self._run.progress.add()
        self._run.progress.phase(f"{part}, {sample.mode}", part)

    def _measure(self, current: Pass, index: int) -> None:
        for note in synthetic_modes(current.modes)[1] if self.plan.tests else ():
            self._run.say(note)
        in_turn, by_test = isinstance(self.arms, ArmsInTurn), self._journal.samples(self._part, index)
        for work in current.works:  # modes that are measured one after the other are finished one by one
            work.take_over(by_test.get(work.name, ()), current.modes, by_mode=in_turn)
            for sample in work.measured:
                self._advance(sample, work.name)
                if isinstance(work, Conversations) and sample.mode == REFERENCE:
                    work.answers.setdefault((sample.prompt, sample.turn), self._text_of(sample))

        def is_done(mode: BenchMode, repetition: int) -> bool:
            works = [work for work in current.works if mode in work.modes(current.modes)]
            n_done = Counter((work.name, s.mode, s.repetition) for work in works for s in work.measured)
            return all(n_done[work.name, mode.label, repetition] >= work.n_samples for work in works)

        with closing(self.arms.turns(current, self.plan.repetitions, is_done)) as turns:
            for arms, repetitions, place in turns:
                for work in current.works:
                    own = [arm for arm in arms if arm.mode in work.modes(current.modes)]
                    for sample in work.samples(own, repetitions, first_place=place, run=self._run):
                        self._journal.add((self._part, index, work.name), sample)
                        self._advance(sample, work.name)
                self._read_ends(arms, current)
                if self._run.cancelled():
                    break

    def _read_ends(self, arms: Sequence[BenchArm], current: Pass) -> None:
        """Reads what arms tell at the end, and the perplexity of those that verify drafts with our backend."""
        text = self.plan.text
        if text is not None:
            self._run.say(f"Perplexity of {text.name}, in batches of gamma + 1 tokens.")
        for arm in arms:
            label, gamma = arm.mode.label, arm.session.gamma
            if text is not None and arm.mode.engine == "moeedge" and gamma > 0 and label not in current.perplexity:
                perplexity = measure_perplexity(arm.session.target, text, batch_tokens=gamma + 1, run=self._run)
                current.perplexity |= {} if perplexity is None else {label: perplexity}
            current.ends[label] = read_end(arm, self._device)
            if arm.own_target:  # its own context computes the logits, so the check comes while it is open
                arm.session.set_mode("stock")
                samples = next((work.measured for work in current.works if isinstance(work, Conversations)), [])
                own, reference = ([s for s in samples if s.mode == each] for each in (label, REFERENCE))
                logits_at = logits_in(arm.session.target)
                current.checks[label] = self._check(own, reference, arm.mode, logits_at, own_split=True)

    # rows

    def rows(self) -> list[BenchRow]:
        """Returns a row per test and mode of each measured pass, of the work that every mode of the pass has done."""
        works = [(work, each) for each in self.arms.passes if each.is_measured for work in each.works]
        tests = list(dict.fromkeys(work.name for work, _ in works))
        rows: list[BenchRow] = []
        for work, current in sorted(works, key=lambda pair: tests.index(pair[0].name)):
            labels = list(dict.fromkeys(sample.mode for sample in work.measured))
            common = common_samples(work.measured, labels, work.n_samples)
            for arm in current.arms:
                own = [sample for sample in common if sample.mode == arm.mode.label != current.repeated]
                rows += [self._row(arm, work, own, common, current)] if own else []
        return compare_with_whole_layers(rows)

    def _row(self, arm: BenchArm, work: Work, own: Samples, common: Samples, current: Pass) -> BenchRow:
        """Returns the row of `own`; common: the samples of all modes of the pass."""
        mode, answers = arm.mode, own
        # real answers, and whether each is one text's; scripted ones have the same tokens in all modes
        is_dataset, alone = isinstance(work, (Conversations, Together)), isinstance(work, Conversations)
        is_scripted = isinstance(work, ScriptedWork)

        def samples_of(label: str | None) -> list[Sample]:
            return [sample for sample in common if sample.mode == label]

        reference = samples_of(next((each.label for each in current.modes if each.name == REFERENCE), None))
        expected = reference
        if isinstance(work, Together):
            answers = [text for sample in own for text in sample.texts]
            expected = self._alone
        prompts = {"prompts": len({sample.prompt for sample in answers}), "prompts_left_out": self._n_left_out}
        setup = describe_setup(
            self.plan,
            self._environment,
            arm,
            drafts=(is_dataset or is_scripted) and mode.drafts,
            roofline=self._roofline,
            test=work.test if isinstance(work, (SyntheticWork, ScriptedWork)) else None,
            **self._routing_facts(arm),
            other_load_before=self._load_before,
            other_load=self._load,
            **current.ends.get(mode.label, {}) | (prompts if is_dataset else {}),
        )
        facts: dict[str, Any] = {"setup": setup, "n_planned": self.plan.repetitions * work.n_samples}
        if (alone or is_scripted) and mode.engine == "moeedge":
            facts["best_stock"] = over_best_stock(own, self._stock_samples(current, common))
        if is_dataset and expected:
            check = current.checks.get(mode.label)
            facts["output"] = check or self._check(answers, expected, mode, self._reference_logits)
        unbudgeted = samples_of(replace(mode, budget=None).label)
        if is_dataset and self._scorer is not None:
            own, reference, unbudgeted = (
                [self._scorer.scored(sample) for sample in samples] for samples in (own, reference, unbudgeted)
            )
            facts["scores"] = self._scorer.summary(own)
        if (alone or is_scripted) and self.plan.compares_speculation:
            perplexity = current.perplexity.get(mode.label)
            facts["figures"] = budget_figures(mode, own, reference, unbudgeted, perplexity)
        if isinstance(work, Together):
            plain = plain_mode(mode, current.modes)
            pair = None if plain is None else (plain, samples_of(plain.label))
            facts["parallel"] = parallel_figures(mode, own, pair, setup.draft_length)
        return make_row(mode, work.name, own, reference, **facts)

    def _routing_facts(self, arm: BenchArm) -> dict[str, Any]:
        """Fields of Setup about forced routing."""
        routing, base = arm.session.target.routing, self.plan.base
        if routing is None or base.routing is None:
            return {}
        starts = [routing.recorded.offset(repetition) for repetition in range(self.plan.repetitions)]
        return {
            "routing": base.routing.name,
            "routing_scaling": routing.recorded.scaling,
            "routing_boundaries": [routing.recorded.boundaries(start, self._base.n_ctx) for start in starts],
            "routing_cost": self._hook_costs.get(arm.mode.engine),
        }

    def _measure_hooks(self, arms: Sequence[BenchArm]) -> None:
        """Measures what forced routing itself costs, once per engine; experts that are loaded on demand hide it."""
        for arm in arms:
            name = arm.mode.engine
            if arm.session.target.routing is None or name in self._hook_costs or isinstance(self.arms, ArmsInTurn):
                continue
            cost = hook_cost(arm, self._run)
            if cost is not None:
                self._hook_costs[name] = cost
                self._run.say(f"The hook of forced routing costs {cost:.1%} of {name}'s decoding time.")

    def _stock_samples(self, current: Pass, samples: Samples) -> list[list[Sample]]:
        """The samples of each stock mode; none where the pass lacks a stock mode, which could be the fastest."""
        stock = [mode for mode in self.plan.modes if mode.engine == "stock"]
        if len(stock) < 2 or not all(mode in current.modes for mode in stock):
            return []
        return [[sample for sample in samples if sample.mode == mode.label] for mode in stock]

    def _text_of(self, sample: Sample) -> str:
        return answer_text(self._models[0], sample.tokens)

    def _reference_logits(self, sample: Sample, position: int) -> NDArray[np.float32]:
        """Opens the reference only where answers differ."""
        return logits_in(self.arms.reference.session.target)(sample, position)

    def _check(
        self, own: Samples, reference: Samples, mode: BenchMode, logits_at: LogitsAt, *, own_split: bool = False
    ) -> OutputCheck:
        lossy = mode.budget is not None
        return check_answers(own, reference, logits_at, self._models[0].eog_tokens, own_split=own_split, lossy=lossy)


def _needed_context(model: Model, prompt: Prompt, n_predict: int) -> int:
    """Returns the tokens that the conversation can grow to, with all answers at full length."""
    messages = []
    for index in range(len(prompt.turns)):
        messages += [*prompt.messages(index), {"role": "assistant", "content": "-"}]
    tokens = model.chat_tokens(messages[:-1])
    return len(tokens) + len(prompt.turns) * (n_predict + _TOKENS_AROUND_ANSWER)


def hook_cost(arm: BenchArm, run: Run) -> float | None:
    """The share of a token's decoding time that the hook of forced routing takes: the median of pairs of tokens.

    The routers' own choice stays, so that both compute the same. None where the run was cancelled. The KV cache is
    empty afterwards.
    """
    target, routing, ratios = arm.session.target, arm.session.target.routing, list[float]()
    assert routing is not None
    arm.session.reset()
    try:
        for index in range(min(_HOOK_PAIRS, target.n_ctx // 2)):
            if run.cancelled():
                return None
            seconds = {}
            for mode in rotated((RoutingMode.OFF, RoutingMode.IDENTITY), index):
                routing.mode = mode
                seconds[mode] = seconds_of(partial(target.decode, [index], phase=Phase.DECODE))
            ratios.append(seconds[RoutingMode.IDENTITY] / seconds[RoutingMode.OFF])
    finally:
        routing.mode = RoutingMode.FORCED
        arm.session.reset()
    return statistics.median(ratios[_HOOK_WARM_UP:] or ratios) - 1
