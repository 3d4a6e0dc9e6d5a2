"""The speculative step: draft, verify, observe, plan, prefetch.

A batch of gamma + 1 tokens is verified: the token emitted last, which is not in the KV cache yet, and the drafts after
it. One batch holds these tokens of several texts, which share the experts that it reads. The sampler makes the result
exact (sampling.py); this module keeps the KV caches equal to the accepted text.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from moeedge.engine.drafts import DraftRequest, DraftSource, NgramDraft, Proposal, propose_together
from moeedge.engine.sampling import Sampler
from moeedge.errors import DeviceFailedError, EngineError, MoeedgeError
from moeedge.llama.context import Context
from moeedge.llama.sequence import BatchPart, Cancelled, ContextSequence, n_common
from moeedge.native.abi import Phase
from moeedge.native.sensor import Counts
from moeedge.run import Run
from moeedge.scheduler.governor import DraftGovernor, StepCost
from moeedge.scheduler.manager import PlacementManager
from moeedge.scheduler.stats import StepRecord
from moeedge.scheduler.stopping import DraftStop

Recover = Callable[[DeviceFailedError], None]
_Result = TypeVar("_Result")


@dataclass(eq=False)
class TextState:
    """One answer in progress: `history` is the prompt and all emitted tokens; its last token is in no KV cache yet."""

    target: ContextSequence
    draft: DraftSource
    sampler: Sampler
    history: list[int]
    ngrams: NgramDraft | None = None  # that may draft in place of `draft`
    n_cached: int | None = None  # tokens of the prompt that the KV cache held; None: not looked up yet
    n_prefilled: int = 0  # tokens of the prompt that were decoded

    def shift(self, n_keep: int, n_discard: int) -> bool:
        """Drops `n_discard` tokens after the first `n_keep`; False where the model's memory does not allow it."""
        if not self.target.context.can_shift or n_keep + n_discard >= self.target.n_past:
            return False
        self.target.shift(n_keep, n_discard)
        self.draft.shift(n_keep, n_discard)
        if self.ngrams is not None:
            self.ngrams.shift(n_keep, n_discard)
        del self.history[n_keep : n_keep + n_discard]
        return True

    def restore(self, *, goes_on: bool = False) -> None:
        """Trims both KV caches to the accepted text, after a step was cut off; goes_on: without the last token."""
        history = self.history[:-1] if goes_on else self.history
        self.target.keep_prefix(history)
        self.draft.restore(history)


@dataclass(eq=False, repr=False)
class SpeculativeLoop:
    """Prompts and steps of the texts in progress, which join and leave `texts` between steps.

    observe: called with the record of each step and prompt; the record of several texts' step holds their sums.
    recover: gives the loop contexts without the GPU that has failed, or raises an error; None: it cannot.
    governor: chooses the draft length of each step. draft_p_min: confidence below which the drafts of one text end.
    watch: called now and then in the middle of computations, also once placement has ended. draft_of: the source of
    drafts for the text in a sequence.
    """

    target: Context
    placement: PlacementManager | None
    observe: Callable[[StepRecord], None]
    run: Run
    recover: Recover | None
    governor: DraftGovernor | None
    watch: Callable[[], None]
    draft_p_min: float
    draft_of: Callable[[int], DraftSource]

    def __post_init__(self) -> None:
        self.texts: list[TextState] = []
        self.counts: Counts | None = None  # of the last verification or prefill
        self.is_replaced = False  # the KV caches belong to the texts of a later loop
        self._prompt: tuple[list[int], StepRecord] | None = None  # decoded, but not shown to the policy yet
        self._n_expert_layers = len(self.target.model.host_expert_layers)

    def check_owner(self) -> None:
        """Raises EngineError where a later loop has taken over the KV caches."""
        if self.is_replaced:
            raise EngineError(
                "The answer cannot go on: another one has begun in the same session.",
                "Read each answer to its end first, or answer the prompts together with generate_parallel.",
            )

    @cached_property
    def _watched(self) -> Run:
        """The run, which calls `watch` as well when a long computation asks whether it is cancelled."""
        loop = weakref.proxy(self)  # without a cycle: what a loop holds is freed with it

        def cancelled() -> bool:
            loop.watch()
            return bool(loop.run.cancelled())

        return Run(cancelled=cancelled)

    def attempt(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of `work`, repeated where a GPU fails and answers can go on; an error leaves texts as before."""
        positions = [(text, text.sampler.state, len(text.history)) for text in self.texts]

        def go_back() -> None:
            for text, state, n_tokens in positions:
                if len(text.history) == n_tokens:
                    text.sampler.state = state

        try:
            try:
                return work(*arguments)
            except DeviceFailedError as error:
                if self.recover is None:
                    raise
                self.recover(error)
                go_back()
                return work(*arguments)
        except MoeedgeError as error:
            if not (isinstance(error, DeviceFailedError) or self.target.is_closed):
                go_back()
                for text in self.texts:  # some may have accepted tokens that are in no history
                    with suppress(MoeedgeError):
                        text.restore(goes_on=True)
            raise

    def timed_step(self, gammas: Sequence[int]) -> tuple[list[StepRecord], dict[str, float]]:
        """The records of a step that may be repeated (`attempt`), and its "decode_s" and "sense_s"."""
        start_s, sensed_s = time.perf_counter(), self._sense_s
        records = self.attempt(self.step, gammas)
        sense_s = max(0.0, self._sense_s - sensed_s)
        return records, {"decode_s": time.perf_counter() - start_s, "sense_s": sense_s}

    def step(self, gammas: Sequence[int]) -> list[StepRecord]:
        """One verification of at most so many drafts of each text. Returns a record of each, with the step's times."""
        if self.governor is None:
            return self._step(gammas)
        text = self.texts[0]
        is_usual = self.placement is None or not self.placement.in_trial
        waited_s, start_s = self._loading_wait_s, time.perf_counter()
        copied = Proposal()
        if text.ngrams is not None and len(self.texts) == 1:
            copied = text.ngrams.propose(DraftRequest(text.history, gammas[0], text.sampler))
        choice = self.governor.choose(copied.confidences[0] if copied.confidences else None, len(self.texts))
        gammas = [min(choice.gamma, most) for most in gammas]
        by_ngrams = choice.source == "ngram"
        proposal, n = None, gammas[0]
        if by_ngrams:
            proposal = Proposal(copied.tokens[:n], copied.candidates[:n], copied.confidences[:n])
        records = self._step(gammas, proposal)
        record, *others = records
        for each in records:
            each.choice = choice
        n_compared = min(len(copied.tokens), len(record.tokens))
        self.governor.observe(
            StepCost(
                n_drafted=record.n_drafted,
                n_accepted=record.n_accepted,
                others=[(other.n_drafted, other.n_accepted) for other in others],
                draft_s=record.draft_s,
                target_s=time.perf_counter() - start_s - record.draft_s if is_usual else 0.0,
                loading_s=max(0.0, self._loading_wait_s - waited_s),
                by_ngrams=by_ngrams,
                confidences=[] if by_ngrams or others else record.confidences,
                ngram_confidences=copied.confidences[:n_compared],
                ngram_accepted=n_common(copied.tokens, record.tokens),
            )
        )
        return records

    @property
    def _loading_wait_s(self) -> float:
        return 0.0 if self.placement is None else self.placement.loading_wait_s

    def _step(self, gammas: Sequence[int], proposal: Proposal | None = None) -> list[StepRecord]:
        """Experts move to the device while drafts and layers are computed. proposal: by n-grams, for the one text."""
        placement = self.placement
        start_s = time.perf_counter()
        if placement is not None:
            # the experts that the last step pushed arrive meanwhile; a draft token may push those predicted by now
            placement.begin_step()
            placement.n_texts = len(self.texts)
        proposals = self._propose(gammas) if proposal is None else [proposal]
        drafted_s = time.perf_counter()
        texts = zip(self.texts, proposals, strict=True)
        batches = [[text.history[-1], *drafts.tokens] for text, drafts in texts]
        batch = [token for each in batches for token in each]
        if placement is not None and len(batch) > len(batches):
            placement.before_verification(batch, proposals[0].hidden_states)
        planned_s = time.perf_counter()
        # the experts of that plan arrive meanwhile; placement.layer_hook is called before each layer, where
        # it may load missing experts and push those of the next layers
        records = self._verify(proposals, batches)
        verified_s = time.perf_counter()
        record = self._observe(records, draft_s=drafted_s - start_s, verify_s=verified_s - planned_s)
        if placement is not None:
            assert self.counts is not None  # a model with placement has a sensor
            rejected = [place > each.n_accepted for each in records for place in range(each.n_verified)]
            text_first = np.argsort(rejected, kind="stable") if len(records) > 1 else None
            placement.after_verification(self.counts, batch, record, text_first)
        record.observe_s = time.perf_counter() - verified_s + planned_s - drafted_s
        if placement is not None:
            placement.end_step(record.n_verified, time.perf_counter() - start_s)
        if len(records) == 1:
            return [record]
        names = ("tokens", "n_drafted", "n_accepted", "n_verified", "drafts")
        return [replace(record, **{name: getattr(own, name) for name in names}) for own in records]

    def _propose(self, gammas: Sequence[int]) -> list[Proposal]:
        if len(self.texts) > 1:
            texts = zip(self.texts, gammas, strict=True)
            requests = [DraftRequest(text.history, gamma, text.sampler) for text, gamma in texts]
            return propose_together([text.draft for text in self.texts], requests)
        text, placement = self.texts[0], self.placement
        stop: DraftStop | None = None if self.governor is None else self.governor.stop
        if self.draft_p_min > 0 and not isinstance(text.draft, NgramDraft):  # whose confidences are no probabilities
            stop = stop or DraftStop()
            stop.minimum = self.draft_p_min
        request = DraftRequest(
            text.history,
            gammas[0],
            text.sampler,
            on_token=None if placement is None else placement.on_draft_token,
            keep_hidden_states=placement is not None and placement.wants_hidden_states,
            stop=stop,
        )
        return [text.draft.propose(request)]

    def _verify(self, proposals: Sequence[Proposal], batches: Sequence[list[int]]) -> list[StepRecord]:
        """Decodes the batches of all texts in one and takes back the rejected drafts."""
        parts: list[BatchPart] = []
        phase = Phase.DECODE
        for text, batch in zip(self.texts, batches, strict=True):
            sequence, history = text.target, text.history
            if sequence.n_past < len(history) - 1:  # after an interruption, or where single positions cannot be dropped
                sequence.prefill(history[sequence.n_past : -1], logits="none", run=self._watched)
                self._read_counts()
            if len(batch) > 1:
                phase = Phase.VERIFY
            parts.append(BatchPart(sequence, batch, "all"))
        records: list[StepRecord] = []
        for group in self.target.fitting(parts):
            rows = self.target.decode_parts(parts[group], phase=phase, run=self._watched)
            for text, proposal, logits in zip(self.texts[group], proposals[group], rows, strict=True):
                drafts = proposal.tokens
                n_accepted, token = text.sampler.accept(logits, drafts, proposal.candidates, text.history)
                n_valid = len(text.history) + n_accepted
                text.target.trim(n_valid)
                text.draft.rollback(n_valid)
                record = StepRecord(
                    tokens=[*drafts[:n_accepted], token],
                    n_drafted=len(drafts),
                    n_accepted=n_accepted,
                    n_verified=len(drafts) + 1,
                    drafts=drafts,
                    hidden_states=proposal.hidden_states,
                    confidences=[] if self.governor is None else proposal.confidences,
                )
                records.append(record)
        for text, record in zip(self.texts, records, strict=True):  # all or none: a failed step may be repeated
            text.history.extend(record.tokens)
        return records

    def _observe(self, records: Sequence[StepRecord], *, draft_s: float, verify_s: float) -> StepRecord:
        """Reads the sensor and calls the observers, before another graph overwrites the frames of this step.

        Returns the record of one text, or the sums of several.
        """
        start_s = time.perf_counter()
        self.counts = self._read_counts()
        record = records[0]
        if len(records) > 1:
            record = StepRecord(
                tokens=[token for own in records for token in own.tokens],
                n_drafted=sum(own.n_drafted for own in records),
                n_accepted=sum(own.n_accepted for own in records),
                n_verified=sum(own.n_verified for own in records),
                drafts=[token for own in records for token in own.drafts],
            )
        record.draft_s, record.verify_s = draft_s, verify_s
        if record.n_verified and self.counts is not None and self._n_expert_layers:
            record.experts_unique = float(np.count_nonzero(self.counts) / self._n_expert_layers)
        if self.target.budget is not None:
            layers = self.target.budget.read()
            layers = layers[layers["batches"] > 0]  # that kept to the budget in this step
            if len(layers):
                record.experts_natural = float((layers["unique_natural"] / layers["batches"]).mean())
                record.experts_max = int(layers["unique_max"].max())
                record.kept_probability = float((layers["kept"] / layers["batches"]).mean())
                record.substituted_layers = int(np.count_nonzero(layers["substituted"]))
        record.observe_s = time.perf_counter() - start_s
        self.observe(record)
        return record

    def _read_counts(self) -> Counts | None:
        return None if self.target.sensor is None else self.target.sensor.read_counts()

    # between the steps

    def prefill(self, text: TextState) -> StepRecord:
        """Decodes what the KV cache lacks of a text's prompt and draws its first token."""
        if self.placement is not None:
            self.placement.begin_prompt()
        start_s = time.perf_counter()
        n_held = text.target.keep_prefix(text.history[:-1])
        if text.n_cached is None:
            text.n_cached = n_held
        prompt = text.history[n_held:]
        try:
            logits = text.target.prefill(prompt, logits="last", run=self._watched)
        except (Cancelled, KeyboardInterrupt):
            text.n_prefilled += max(0, text.target.n_past - n_held)
            raise
        text.n_prefilled += len(prompt)
        _, token = text.sampler.accept(logits, [], [], text.history)
        verify_s = time.perf_counter() - start_s
        text.history.append(token)
        record = self._observe([StepRecord(tokens=[token])], draft_s=0.0, verify_s=verify_s)
        self._prompt = (prompt, record)
        return record

    def begin(self, text: TextState) -> None:
        """Prepares placement and draft for a text's first step; the first token does not wait for it."""
        if self._prompt is not None and self.placement is not None:
            assert self.counts is not None
            self.placement.after_verification(self.counts, *self._prompt)
        self._prompt = None
        if len(self.texts) == 1:  # others go on as before: with texts that join all the time nothing would be measured
            if self.governor is not None:
                self.governor.begin_answer()
            if self.placement is not None:
                self.placement.begin_answer()
        text.draft.begin(text.history, run=self._watched)

    def place(self, text: TextState, index: int) -> None:
        """Goes on with a text in that sequence; where the model was loaded again the sampler reads its vocabulary."""
        if self.target.model is not text.target.context.model:
            text.sampler.use(self.target.model)
        text.target, text.draft = self.target.sequences[index], self.draft_of(index)

    def replace_target(self, target: Context) -> None:
        """Goes on with contexts whose KV caches are empty, and without placement; the next step fills them."""
        self.target, self.placement = target, None
        self._n_expert_layers = len(target.model.host_expert_layers)
        for text in self.texts:
            self.place(text, text.target.index)

    @property
    def _sense_s(self) -> float:
        return 0.0 if self.target.sensor is None else self.target.sensor.sense_s
