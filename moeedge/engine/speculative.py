"""The speculative step: draft -> anticipate -> verify -> observe -> schedule -> prefetch.

Chain drafts, verified in one batch of gamma + 1 tokens: the last emitted token, which is not in the KV cache yet, and
the drafts behind it. Exactness is the sampler's work (sampling.py); here both KV caches are kept equal to the accepted
text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.drafts import DraftSource, Proposal
from moeedge.engine.sampling import Sampler
from moeedge.llama.context import Context
from moeedge.native.abi import Phase
from moeedge.native.sensor import Counts
from moeedge.scheduler.stats import StepRecord


class Placement(Protocol):
    """Decides which experts live on the device. A step calls all; they may take no longer than 1 % of it."""

    def anticipate(self, tokens: Sequence[int], hidden_states: NDArray[np.float32] | None = None) -> None:
        """The whole batch that is verified next: what it will need, as far as foreseen, moves at once.

        states: float32 [n_states, n_embd], the draft's hidden states of the first tokens.
        """

    def schedule(self, counts: Counts, batch: Sequence[int], record: StepRecord) -> None:
        """Updates utilities and the plan from the activations of `batch`, verified or (n_verified 0) prefilled."""

    def prefetch(self) -> None:
        """Starts the transfers of the plan; they overlap with the next drafting phase."""


@dataclass
class Verified:
    """What a verification gave."""

    emitted: list[int]  # accepted drafts and the target's own token
    n_accepted: int
    batch: list[int]  # tokens that were verified together: the one emitted last, and the drafts; empty after prefill


class SpeculativeLoop:
    """One answer in progress: `history` is the prompt and everything emitted; its last token is in no KV cache yet."""

    def __init__(
        self,
        target: Context,
        draft: DraftSource,
        sampler: Sampler,
        history: list[int],
        *,
        placement: Placement | None = None,
        observe: Callable[[StepRecord], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.sampler = sampler
        self.history = history
        self._new_prompt: tuple[list[int], StepRecord] | None = None  # the prompt, until placement has learned of it
        self.prefilled = 0  # tokens of the prompt that had to be decoded
        self.counts: Counts | None = None  # of the last verification or prefill
        self._placement = placement
        self._notify = observe
        self._cancel = cancel
        self._expert_layers = list(target.model.info.expert_layers)

    def prefill(self) -> StepRecord:
        """Decodes what the KV cache lacks of the prompt and draws the first token."""
        start_s = time.perf_counter()
        held = self.target.keep_prefix(self.history[:-1])
        self.prefilled = len(self.history) - held
        logits = self.target.prefill(self.history[held:], logits="last", cancel=self._cancel)
        token = self.sampler.pick(self.sampler.candidates(logits[0], self.history))
        verify_s = time.perf_counter() - start_s
        prompt = self.history[held:]
        self.history.append(token)
        record = self._observe(Proposal(), Verified([token], 0, []), draft_s=0.0, verify_s=verify_s)
        self._new_prompt = (prompt, record)
        return record

    def begin(self) -> None:
        """What the prompt leaves to do before the first step, when the first token is out: placement, and the draft."""
        if self._new_prompt is not None:
            self._schedule(*self._new_prompt)
            self._prefetch()
            self._new_prompt = None
        self.draft.begin(self.history, cancel=self._cancel)

    def step(self, gamma: int) -> StepRecord:
        """One verification with at most `gamma` drafts; the caller sees to it that gamma + 1 tokens fit the context."""
        start_s = time.perf_counter()
        proposal = self._propose(gamma)
        drafted_s = time.perf_counter()
        self._anticipate(proposal)
        anticipated_s = time.perf_counter()
        verified = self._verify(proposal)
        verified_s = time.perf_counter()
        record = self._observe(proposal, verified, draft_s=drafted_s - start_s, verify_s=verified_s - anticipated_s)
        self._schedule(verified.batch, record)
        self._prefetch()
        return replace(record, observe_s=time.perf_counter() - verified_s + anticipated_s - drafted_s)

    def shift(self, n_keep: int, n_discard: int) -> bool:
        """Forgets `n_discard` tokens behind the first `n_keep`; False where the model's memory does not allow it."""
        if not self.target.can_shift or n_keep + n_discard >= self.target.n_past:
            return False
        self.target.shift(n_keep, n_discard)
        self.draft.shift(n_keep, n_discard)
        del self.history[n_keep : n_keep + n_discard]
        return True

    def settle(self) -> None:
        """Trims both KV caches to the accepted text, after a step was cut off in the middle."""
        self.target.keep_prefix(self.history)
        self.draft.settle(self.history)

    def _propose(self, gamma: int) -> Proposal:
        return self.draft.propose(self.history, gamma, self.sampler) if gamma > 0 else Proposal()

    def _verify(self, proposal: Proposal) -> Verified:
        length = len(self.history)
        if self.target.n_past < length - 1:  # after an interruption, or where the memory could only be dropped whole
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
        """Reads the sensor and tells the observers, while the frames of this step are fresh."""
        start_s = time.perf_counter()
        self.counts = self._read_counts()
        record = StepRecord(
            tokens=verified.emitted,
            n_drafted=len(proposal.tokens),
            n_accepted=verified.n_accepted,
            n_verified=len(verified.batch),
            experts_unique=self._experts_unique() if verified.batch else 0.0,
            draft_s=draft_s,
            verify_s=verify_s,
            observe_s=time.perf_counter() - start_s,
            drafts=proposal.tokens,
            hidden_states=proposal.hidden_states,
        )
        if self._notify is not None:
            self._notify(record)
        return record

    def _read_counts(self) -> Counts | None:
        return None if self.target.sensor is None else self.target.sensor.read_counts()

    @property
    def sense_s(self) -> float:
        """What the target's native sensor has taken so far."""
        return 0.0 if self.target.sensor is None else self.target.sensor.stats().sense_s

    def _experts_unique(self) -> float:
        """Mean over the layers with experts of the number of distinct experts in the last verification."""
        if self.counts is None or not self._expert_layers:
            return 0.0
        return float(np.count_nonzero(self.counts) / len(self._expert_layers))

    def _anticipate(self, proposal: Proposal) -> None:
        if self._placement is not None:
            self._placement.anticipate([self.history[-1], *proposal.tokens], proposal.hidden_states)

    def _schedule(self, batch: Sequence[int], record: StepRecord) -> None:
        if self._placement is not None and self.counts is not None:
            self._placement.schedule(self.counts, batch, record)

    def _prefetch(self) -> None:
        if self._placement is not None:
            self._placement.prefetch()
