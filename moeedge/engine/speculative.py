"""The speculative step: draft, verify, observe, plan, prefetch.

Chain drafts, verified in one batch of gamma + 1 tokens: the token emitted last, which is not in the KV cache yet, and
the drafts after it. The sampler makes the result exact (sampling.py); this module keeps both KV caches equal to the
accepted text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.drafts import DraftSource, Proposal
from moeedge.engine.sampling import Sampler
from moeedge.llama.context import Context
from moeedge.native.abi import Phase
from moeedge.native.sensor import Counts
from moeedge.scheduler.manager import PlacementManager
from moeedge.scheduler.stats import StepRecord


@dataclass
class Verified:
    """The result of one verification."""

    emitted: list[int]  # accepted drafts and the target's own token
    n_accepted: int
    batch: list[int]  # tokens that were verified together: the one emitted last, and the drafts; empty after prefill


class SpeculativeLoop:
    """One answer in progress: `history` is the prompt and all emitted tokens; its last token is in no KV cache yet."""

    def __init__(
        self,
        target: Context,
        draft: DraftSource,
        sampler: Sampler,
        history: list[int],
        *,
        placement: PlacementManager | None = None,
        observe: Callable[[StepRecord], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.sampler = sampler
        self.history = history
        self.n_prefilled = 0  # tokens of the prompt that were decoded
        self.counts: Counts | None = None  # of the last verification or prefill
        self._prompt: tuple[list[int], StepRecord] | None = None  # decoded, but not shown to the policy yet
        self.placement = placement
        self._call_observers = observe
        self._cancel = cancel
        self._n_expert_layers = len(target.model.host_expert_layers)

    def step(self, gamma: int) -> StepRecord:
        """One verification with at most `gamma` drafts; gamma + 1 more tokens must fit the context."""
        return self.plain_step(gamma) if self.placement is None else self.overlapped_step(gamma)

    def plain_step(self, gamma: int) -> StepRecord:
        """The step without placement: experts are computed where their weights are."""
        start_s = time.perf_counter()
        proposal = self.draft.propose(self.history, gamma, self.sampler)
        drafted_s = time.perf_counter()
        verified = self._verify(proposal)
        verified_s = time.perf_counter()
        record = self._observe(proposal, verified, draft_s=drafted_s - start_s, verify_s=verified_s - drafted_s)
        return replace(record, observe_s=time.perf_counter() - verified_s)

    def overlapped_step(self, gamma: int) -> StepRecord:
        """The same with placement: experts move to the device during drafting and between the target's layers."""
        placement = self.placement
        assert placement is not None
        start_s = time.perf_counter()
        # the experts that the last step pushed arrive meanwhile; a draft token may push those predicted by now
        proposal = self.draft.propose(
            self.history,
            gamma,
            self.sampler,
            on_token=placement.on_draft_token,
            keep_hidden_states=placement.wants_hidden_states,
        )
        drafted_s = time.perf_counter()
        placement.before_verification([self.history[-1], *proposal.tokens], proposal.hidden_states)
        planned_s = time.perf_counter()
        # the experts of that plan arrive meanwhile; placement.layer_hook is called before each layer, where
        # it may load missing experts and push those of the next layers
        verified = self._verify(proposal)
        verified_s = time.perf_counter()
        record = self._observe(proposal, verified, draft_s=drafted_s - start_s, verify_s=verified_s - planned_s)
        assert self.counts is not None  # a model with placement has a sensor
        placement.after_verification(self.counts, verified.batch, record)
        return replace(record, observe_s=time.perf_counter() - verified_s + planned_s - drafted_s)

    def _verify(self, proposal: Proposal) -> Verified:
        """Decodes the batch and takes back the rejected drafts."""
        length = len(self.history)
        if self.target.n_past < length - 1:  # after an interruption, or where the memory cannot drop single positions
            self.target.prefill(self.history[self.target.n_past : -1], logits="none", cancel=self._cancel)
            self._read_counts()
        batch = [self.history[-1], *proposal.tokens]
        phase = Phase.VERIFY if proposal.tokens else Phase.DECODE
        logits = self.target.decode(batch, phase=phase, logits="all")
        n_accepted, token = self.sampler.accept(logits, proposal.tokens, proposal.candidates, self.history)
        self.target.trim(length + n_accepted)
        self.draft.rollback(length + n_accepted)
        emitted = [*proposal.tokens[:n_accepted], token]
        self.history.extend(emitted)
        return Verified(emitted, n_accepted, batch)

    def _observe(self, proposal: Proposal, verified: Verified, *, draft_s: float, verify_s: float) -> StepRecord:
        """Reads the sensor and calls the observers, before another graph overwrites the frames of this step."""
        start_s = time.perf_counter()
        self.counts = self._read_counts()
        experts_unique = experts_natural = 0.0
        experts_max, kept_probability, substituted_layers = 0, None, 0
        if verified.batch and self.counts is not None and self._n_expert_layers:
            experts_unique = float(np.count_nonzero(self.counts) / self._n_expert_layers)
        layers = self._read_budget()
        if layers is not None:
            experts_natural = float((layers["unique_natural"] / layers["batches"]).mean())
            experts_max = int(layers["unique_max"].max())
            kept_probability = float((layers["kept"] / layers["batches"]).mean())
            substituted_layers = int(np.count_nonzero(layers["substituted"]))
        record = StepRecord(
            tokens=verified.emitted,
            n_drafted=len(proposal.tokens),
            n_accepted=verified.n_accepted,
            n_verified=len(verified.batch),
            experts_unique=experts_unique,
            experts_natural=experts_natural,
            experts_max=experts_max,
            kept_probability=kept_probability,
            substituted_layers=substituted_layers,
            draft_s=draft_s,
            verify_s=verify_s,
            observe_s=time.perf_counter() - start_s,
            drafts=proposal.tokens,
            hidden_states=proposal.hidden_states,
        )
        if self._call_observers is not None:
            self._call_observers(record)
        return record

    def _read_counts(self) -> Counts | None:
        return None if self.target.sensor is None else self.target.sensor.read_counts()

    def _read_budget(self) -> NDArray[Any] | None:
        """Figures of the layers that kept to a budget in this step (BUDGET_LAYER); None where none did."""
        if self.target.budget is None:
            return None
        layers = self.target.budget.native.read()
        layers = layers[layers["batches"] > 0]
        return layers if len(layers) else None

    # before, between and after the steps

    def prefill(self) -> StepRecord:
        """Decodes what the KV cache lacks of the prompt and draws the first token."""
        start_s = time.perf_counter()
        n_held = self.target.keep_prefix(self.history[:-1])
        prompt = self.history[n_held:]
        self.n_prefilled = len(prompt)
        logits = self.target.prefill(prompt, logits="last", cancel=self._cancel)
        token = self.sampler.pick(self.sampler.candidates(logits[0], self.history))
        verify_s = time.perf_counter() - start_s
        self.history.append(token)
        record = self._observe(Proposal(), Verified([token], 0, []), draft_s=0.0, verify_s=verify_s)
        self._prompt = (prompt, record)
        return record

    def begin(self) -> None:
        """Prepares placement and draft for the first step; called after the first token, which does not wait for it."""
        if self._prompt is not None and self.placement is not None:
            assert self.counts is not None
            self.placement.after_verification(self.counts, *self._prompt)
        self._prompt = None
        self.draft.begin(self.history, cancel=self._cancel)

    def shift(self, n_keep: int, n_discard: int) -> bool:
        """Drops `n_discard` tokens after the first `n_keep`; False where the model's memory does not allow it."""
        if not self.target.can_shift or n_keep + n_discard >= self.target.n_past:
            return False
        self.target.shift(n_keep, n_discard)
        self.draft.shift(n_keep, n_discard)
        del self.history[n_keep : n_keep + n_discard]
        return True

    def restore(self) -> None:
        """Trims both KV caches to the accepted text, after a step was cut off in the middle."""
        self.target.keep_prefix(self.history)
        self.draft.restore(self.history)

    def replace_contexts(self, target: Context, draft: DraftSource) -> None:
        """Goes on with contexts whose KV caches are empty, and without placement; the next step fills them."""
        self.target, self.draft, self.placement = target, draft, None
        self._n_expert_layers = len(target.model.host_expert_layers)

    @property
    def sense_s(self) -> float:
        """Time that the target's native sensor has taken so far."""
        return 0.0 if self.target.sensor is None else self.target.sensor.stats().sense_s
