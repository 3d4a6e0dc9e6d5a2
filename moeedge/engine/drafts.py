"""Sources of draft tokens: a small model, n-grams of the text so far, a script, or none.

A script gives an answer's text and its accepted drafts, for measurements without a trained draft. Target and draft
compute what they would for a real answer; only the tokens that they draw are replaced. The draft at a position is
accepted or not in every step and mode, so that all compare on the same text and the same acceptance. llama.cpp has the
same as --spec-synth-rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.sampling import Candidates, FloatRow, Sampler
from moeedge.engine.types import SamplingConfig
from moeedge.errors import require
from moeedge.llama.context import Context
from moeedge.llama.hidden_states import StateRows
from moeedge.llama.model import Model
from moeedge.llama.sequence import BatchPart, WantedLogits
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.scheduler.stopping import DraftStop

# llama.cpp computes logits for every token whose hidden state it keeps: of longer batches only the last one is kept
MAX_TOKENS_WITH_STATES = 4


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Proposal:
    """A chain of draft tokens, the distributions they were drawn from, and confidences (0 to 1) where known."""

    tokens: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)  # one per token
    confidences: list[float] = field(default_factory=list)
    # float32 [n_tokens, n_embd], of the token emitted last and of all drafts except the last; None where not kept
    hidden_states: StateRows | None = None


class DraftRequest(NamedTuple):
    """A text's request to its source.

    gamma: drafts at most. on_token: called with the last token of the history and the drafts so far, before each
    further draft is computed. keep_hidden_states: the proposal of a draft model holds its hidden states. stop: may end
    the draft earlier; with it, the proposal has confidences.
    """

    history: Sequence[int]
    gamma: int  # 0 or more; `_propose` gets 1 or more
    sampler: Sampler
    on_token: Callable[[Sequence[int]], None] | None = None
    keep_hidden_states: bool = False
    stop: DraftStop | None = None


class DraftSource:
    """Proposes tokens that may follow a text; this class has no state and proposes none: plain decoding."""

    def for_sequence(self, index: int) -> DraftSource:
        """A source of the same kind for the text in that sequence."""
        return self

    def begin(self, history: Sequence[int], *, run: Run | None = None) -> None:
        """Takes in the prompt except its last token. The time counts as prefill."""

    def propose(self, request: DraftRequest) -> Proposal:
        return self._propose(request) if request.gamma > 0 else Proposal()

    def _propose(self, request: DraftRequest) -> Proposal:
        return Proposal()

    def rollback(self, n_valid: int) -> None:
        """The first `n_valid` tokens of history plus proposal are accepted, the others rejected."""

    def shift(self, n_keep: int, n_discard: int) -> None:
        """The history lost `n_discard` tokens after its first `n_keep`."""

    def restore(self, history: Sequence[int]) -> None:
        """A step was cut off: only `history` is valid."""

    def clear(self) -> None:
        """Forgets all texts."""


class Chain:
    """The drafts of one text, as they are drawn. `pending`: tokens that the draft's KV cache lacks."""

    def __init__(self, source: ContextDraft, request: DraftRequest) -> None:
        self.sequence = source.sequence
        self.pending: Sequence[int] = request.history[source.n_skipped + source.sequence.n_past :]
        self.proposal = Proposal()
        self._request = request
        self._n_vocab = source.n_vocab
        self._is_eog = source.is_eog
        self._seen = request.sampler.recent(request.history)

    def draw(self, logits: FloatRow) -> bool:
        """Draws the next draft from the draft model's `logits` [n_vocab]; False where no other one is needed."""
        sampler, stop = self._request.sampler, self._request.stop
        row = logits[: self._n_vocab]
        candidates = sampler.candidates(row, self._seen)
        if not len(candidates.ids):  # a grammar refuses what the draft model expects
            return False
        if stop is not None:
            self.proposal.confidences.append(sampler.confidence(row, self._seen))
            if not stop.keeps(self.proposal.confidences[-1]):
                return False
        token = sampler.pick(candidates)
        tokens = self.proposal.tokens
        tokens.append(token)
        self.proposal.candidates.append(candidates)
        self._seen.append(token)
        self.pending = [token]
        if len(tokens) == self._request.gamma or self._is_eog(token) or (stop is not None and not stop.goes_on()):
            return False
        if self._request.on_token is not None:
            self._request.on_token([self._request.history[-1], *tokens])
        return True

    def with_states(self, states: Sequence[StateRows]) -> Proposal:
        """The proposal, if asked for with hidden states: of the token emitted last and of all drafts but the last."""
        n = len(self.proposal.tokens)
        if n == 0 or not self._request.keep_hidden_states:
            return self.proposal
        return replace(self.proposal, hidden_states=np.concatenate(states[:n]))


class ContextDraft(DraftSource):
    """Drafts that are computed in a context of their own, whose KV cache follows the accepted text."""

    n_skipped = 0  # tokens at the start of a text without an entry in that KV cache

    def __init__(self, context: Context, *, n_vocab: int, is_eog: Callable[[int], bool]) -> None:
        self.context = context
        self.sequence = context.sequences[0]
        self.n_vocab = n_vocab  # ids that target and draft have
        self.is_eog = is_eog

    def for_sequence(self, index: int) -> ContextDraft:
        other = copy(self)
        other.sequence = self.context.sequences[index]
        return other

    def shift(self, n_keep: int, n_discard: int) -> None:
        first = n_keep - self.n_skipped
        if first >= 0 and self.context.can_shift and first + n_discard < self.sequence.n_past:
            self.sequence.shift(first, n_discard)
        else:
            self.sequence.trim(max(first, 0))

    def restore(self, history: Sequence[int]) -> None:
        self.sequence.keep_prefix(history[self.n_skipped :])

    def clear(self) -> None:
        self.context.clear()


class ModelDraft(ContextDraft):
    """A draft model that samples under the target's settings; its KV cache holds a prefix of the accepted history."""

    def begin(self, history: Sequence[int], *, run: Run | None = None) -> None:
        n_held = self.sequence.keep_prefix(history[:-1])
        self.sequence.prefill(history[n_held:-1], logits="none", run=run)

    def _propose(self, request: DraftRequest) -> Proposal:
        chain, keeps = Chain(self, request), request.keep_hidden_states
        if keeps and len(chain.pending) > MAX_TOKENS_WITH_STATES:
            self.sequence.decode(chain.pending[:-1], phase=Phase.DRAFT, logits="none")
            chain.pending = chain.pending[-1:]
        states: list[StateRows] = []
        while True:
            wanted: WantedLogits = "states" if keeps else "last"
            logits = self.sequence.decode(chain.pending, phase=Phase.DRAFT, logits=wanted)
            if keeps:
                states.append(np.array(self.context.last_hidden_state()[None]))
            if not chain.draw(logits[-1]):
                return chain.with_states(states)

    def rollback(self, n_valid: int) -> None:
        self.sequence.trim(n_valid)


class NgramDraft(DraftSource):
    """Prompt lookup: the tokens after the latest earlier occurrence of the last 4, 3, 2 or 1 tokens.

    Saxena, "Prompt lookup decoding", 2023. The proposal is deterministic, so each token's distribution is certain. Only
    accepted tokens are indexed, so that a rollback changes nothing.
    """

    LONGEST = 4

    def __init__(self) -> None:
        self._indexed: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence

    def for_sequence(self, index: int) -> NgramDraft:
        return NgramDraft()

    def begin(self, history: Sequence[int], *, run: Run | None = None) -> None:
        self._indexed = []
        self._after = {}

    def _propose(self, request: DraftRequest) -> Proposal:
        history, gamma, stop = request.history, request.gamma, request.stop
        # the last token is not indexed yet: an n-gram must be found before the end, not at it
        for end in range(len(self._indexed) + 1, len(history)):
            self._indexed.append(history[end - 1])
            for n in range(1, min(self.LONGEST, end) + 1):
                self._after[tuple(history[end - n : end])] = end
        for n in range(min(self.LONGEST, len(history)), 0, -1):
            start = self._after.get(tuple(history[-n:]))
            if start is not None:
                # a repetition that reaches the end of the history continues with itself
                period = len(history) - start
                share = n / self.LONGEST
                n_drafts = gamma if stop is None else n_kept(stop, [share] * gamma)
                tokens = [history[start + i % period] for i in range(n_drafts)]
                candidates = [Candidates.certain(token) for token in tokens]
                return Proposal(tokens, candidates, [share] * min(n_drafts + 1, gamma))
        return Proposal()

    def shift(self, n_keep: int, n_discard: int) -> None:
        self.begin([])  # the next proposal indexes what is left


def n_kept(stop: DraftStop, confidences: Sequence[float]) -> int:
    """The number of drafts with these confidences that `stop` keeps."""
    for n, confidence in enumerate(confidences):
        if not stop.keeps(confidence):
            return n
        if not stop.goes_on():
            return n + 1
    return len(confidences)


def propose_together(sources: Sequence[DraftSource], requests: Sequence[DraftRequest]) -> list[Proposal]:
    """The proposals of several texts; a draft model decodes one batch per draft position for all of them."""
    chains: list[Chain] = []
    proposals = []
    for source, request in zip(sources, requests, strict=True):
        if isinstance(source, ModelDraft) and request.gamma > 0:
            context = source.context
            chains.append(Chain(source, request))
            proposals.append(chains[-1].proposal)
        else:
            proposals.append(source.propose(request))
    while chains:
        parts = [BatchPart(chain.sequence, chain.pending, "last") for chain in chains]
        unfinished: list[Chain] = []
        for group in context.fitting(parts):
            rows = context.decode_parts(parts[group], phase=Phase.DRAFT)
            unfinished += [chain for chain, row in zip(chains[group], rows, strict=True) if chain.draw(row[-1])]
        chains = unfinished
    return proposals


ConfidenceModel = Literal["calibrated", "constant"]
_CONCENTRATION = 2.0  # of the Beta distribution of calibrated confidences, whose mean is the acceptance

Tokens = NDArray[np.int32]


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Script:
    """A text and the drafts of each position, [n]; confidences: what the draft says of its token there."""

    text: Tokens
    drafts: Tokens
    confidences: NDArray[np.float64]

    @classmethod
    def draw(cls, model: Model, n: int, acceptance: float, confidences: ConfidenceModel, seed: int) -> Script:
        """A random text of `n` tokens, whose drafts are accepted independently of each other.

        calibrated: a token of confidence c is accepted with probability c, and c varies around `acceptance`. constant:
        every token has the confidence `acceptance`, which tells nothing. Of one seed, text and chances are the same
        for every acceptance.
        """
        require(0 <= acceptance <= 1, f"an acceptance must be from 0 to 1, not {acceptance:g}")
        rng = np.random.default_rng(seed)
        usable = np.setdiff1d(np.arange(model.info.n_vocab, dtype=np.int32), model.eog_tokens)
        places = rng.integers(0, len(usable), n)
        text, other = usable[places], usable[(places + 1) % len(usable)]
        chances, own = rng.random(n), np.full(n, acceptance)
        if confidences == "calibrated" and 0 < acceptance < 1:
            own = rng.beta(_CONCENTRATION * acceptance, _CONCENTRATION * (1 - acceptance), n)
        return cls(text, np.where(chances < own, text, other), own)


class ScriptedSampler(Sampler):
    """Computes the greedy choice as `Sampler` does, and draws the script's token in its place."""

    def __init__(self, config: SamplingConfig, n_vocab: int, script: Script) -> None:
        super().__init__(config, n_vocab)
        self._script = script

    def recent(self, history: Sequence[int]) -> list[int]:
        """The entire history, whose length is the position of the next token."""
        return list(history)

    def candidates(self, logits: FloatRow, history: Sequence[int]) -> Candidates:
        self.argmax(logits, history)
        return Candidates.certain(int(self._script.drafts[len(history)]))

    def confidence(self, logits: FloatRow, history: Sequence[int]) -> float:
        super().confidence(logits, history)
        return float(self._script.confidences[len(history)])

    def accept(
        self, logits: FloatRow, drafts: Sequence[int], proposals: Sequence[Candidates], history: Sequence[int]
    ) -> tuple[int, int]:
        """The drafts that are the text's, and its next token."""
        text, n = self._script.text, len(history)
        for i, token in enumerate([*drafts, -1]):
            self.argmax(logits[i], history)
            if token != text[n + i]:
                break
        return i, int(text[n + i])


class ScriptedDraft(DraftSource):
    """Drafts of a script at no cost, as n-grams have."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def _propose(self, request: DraftRequest) -> Proposal:
        position, stop = len(request.history), request.stop
        confidences = self._script.confidences[position : position + request.gamma].tolist()
        n = len(confidences) if stop is None else n_kept(stop, confidences)
        tokens = self._script.drafts[position : position + n].tolist()
        return Proposal(tokens, [Candidates.certain(token) for token in tokens], confidences[: n + 1])
