"""Sources of draft tokens: a small model, n-grams of the text so far, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.sampling import Candidates, FloatRow, Sampler
from moeedge.llama.context import Context
from moeedge.llama.sequence import BatchPart, ContextSequence
from moeedge.native.abi import Phase
from moeedge.scheduler.stopping import DraftStop

# llama.cpp computes logits for every token whose hidden state it keeps: of longer batches only the last one is kept
MAX_TOKENS_WITH_STATES = 4
_BLOCK = 32  # values of the vocabulary, of which `confidence` uses the largest
_SMALL_VOCABULARY = 8192  # all values of which it uses

OnToken = Callable[[Sequence[int]], None]


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Proposal:
    """A chain of draft tokens and the distribution that each was drawn from.

    confidences: from 0 to 1, of each token, and of one more where that was computed and left out; empty: not known.
    """

    tokens: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)  # one per token
    confidences: list[float] = field(default_factory=list)
    # float32 [n_tokens, n_embd], of the token emitted last and of all drafts except the last; None where not kept
    hidden_states: NDArray[np.float32] | None = None

    def first(self, n: int) -> Proposal:
        """At most the first `n` tokens, of n-grams."""
        return Proposal(self.tokens[:n], self.candidates[:n], self.confidences[:n])


class DraftSource:
    """Proposes tokens that may follow a history, and brings its own state, if any, up to date with that history.

    Each text has its own source. The methods here are those of a source that keeps no state and proposes no tokens.
    """

    def for_sequence(self, index: int) -> DraftSource:
        """A source of the same kind for the text in that sequence."""
        return self

    def on(self, context: Context | None) -> DraftSource:
        """The same source with another context of the draft model, whose KV cache is empty."""
        return self

    def begin(self, history: Sequence[int], *, cancel: Callable[[], bool] | None = None) -> None:
        """Takes in the prompt except its last token. The time counts as prefill."""

    def propose(
        self,
        history: Sequence[int],
        gamma: int,
        sampler: Sampler,
        *,
        on_token: OnToken | None = None,
        keep_hidden_states: bool = False,
        stop: DraftStop | None = None,
    ) -> Proposal:
        """At most `gamma` tokens that may follow `history`.

        on_token: called with the last token of the history and the drafts so far, before each further draft is
        computed. keep_hidden_states: the proposal of a draft model holds its hidden states.
        stop: may end the draft earlier; with it, the proposal has confidences.
        """
        return Proposal()

    def rollback(self, n_valid: int) -> None:
        """The first `n_valid` tokens of history plus proposal are accepted, the others rejected."""

    def shift(self, n_keep: int, n_discard: int) -> None:
        """The history lost `n_discard` tokens after its first `n_keep`."""

    def restore(self, history: Sequence[int]) -> None:
        """A step was cut off: only `history` is valid."""

    def clear(self) -> None:
        """Forgets all texts."""


class NoDraft(DraftSource):
    """Plain decoding."""


def confidence(logits: FloatRow) -> float:
    """About the share of the most likely token under softmax, from `logits` [n_vocab]; never less.

    A large vocabulary is read in one pass for the largest value of each 32, whose share this is: a softmax over 151,936
    tokens would take longer than drawing one.
    """
    n_blocks = len(logits) // _BLOCK
    values = logits
    if n_blocks > _SMALL_VOCABULARY // _BLOCK:
        values = np.append(
            logits[: n_blocks * _BLOCK].reshape(_BLOCK, n_blocks).max(axis=0), logits[n_blocks * _BLOCK :]
        )
    return 1.0 / float(np.exp(values - values.max()).sum())


class ChainSource(Protocol):
    """A source whose drafts follow from a KV cache of its own. n_vocab: ids that target and draft have."""

    n_vocab: int

    @property
    def context(self) -> Context:
        """Of the draft model."""

    @property
    def sequence(self) -> ContextSequence:
        """Of the text, in that context."""

    @property
    def is_eog(self) -> Callable[[int], bool]:
        """Whether a token ends an answer."""


class Chain:
    """The drafts of one text, as they are drawn. `pending` are the tokens that the draft's KV cache lacks."""

    def __init__(
        self,
        source: ChainSource,
        history: Sequence[int],
        gamma: int,
        sampler: Sampler,
        stop: DraftStop | None = None,
    ) -> None:
        self.source = source
        self.pending: Sequence[int] = history[source.sequence.n_past :]
        self.proposal = Proposal()
        self._gamma = gamma
        self._sampler = sampler
        self._stop = stop
        self._seen = sampler.recent(history)

    def draw(self, logits: FloatRow) -> bool:
        """Draws the next draft from the draft model's `logits` [n_vocab]; False where no other one is needed."""
        row = logits[: self.source.n_vocab]
        candidates = self._sampler.candidates(row, self._seen)
        if not len(candidates.ids):  # a grammar refuses what the draft model expects
            return False
        if self._stop is not None:
            self.proposal.confidences.append(confidence(row))
            if not self._stop.keeps(self.proposal.confidences[-1]):
                return False
        token = self._sampler.pick(candidates)
        tokens = self.proposal.tokens
        tokens.append(token)
        self.proposal.candidates.append(candidates)
        self._seen.append(token)
        self.pending = [token]
        if len(tokens) == self._gamma or self.source.is_eog(token):
            return False
        return self._stop is None or self._stop.goes_on()


class ModelDraft(DraftSource):
    """A draft model that samples from its own distribution under the target's sampling settings.

    Between steps its KV cache holds a prefix of the accepted history. After a full acceptance it lacks the last drafted
    token, which no later token needed; the next proposal decodes it first.
    """

    def __init__(self, context: Context, *, n_vocab: int, is_eog: Callable[[int], bool], sequence: int = 0) -> None:
        self.context = context
        self.sequence = context.sequences[sequence]
        self.n_vocab = n_vocab  # ids that both vocabularies have
        self.is_eog = is_eog

    def for_sequence(self, index: int) -> ModelDraft:
        return ModelDraft(self.context, n_vocab=self.n_vocab, is_eog=self.is_eog, sequence=index)

    def on(self, context: Context | None) -> ModelDraft:
        assert context is not None
        return ModelDraft(context, n_vocab=self.n_vocab, is_eog=context.model.is_eog, sequence=self.sequence.index)

    def begin(self, history: Sequence[int], *, cancel: Callable[[], bool] | None = None) -> None:
        n_held = self.sequence.keep_prefix(history[:-1])
        self.sequence.prefill(history[n_held:-1], logits="none", cancel=cancel)

    def propose(
        self,
        history: Sequence[int],
        gamma: int,
        sampler: Sampler,
        *,
        on_token: OnToken | None = None,
        keep_hidden_states: bool = False,
        stop: DraftStop | None = None,
    ) -> Proposal:
        if gamma == 0:
            return Proposal()
        chain = Chain(self, history, gamma, sampler, stop)
        tokens = chain.proposal.tokens
        hidden_states: NDArray[np.float32] | None = None
        if keep_hidden_states:
            hidden_states = np.empty((gamma, self.context.model.info.n_embd), dtype=np.float32)
            if len(chain.pending) > MAX_TOKENS_WITH_STATES:
                self.sequence.decode(chain.pending[:-1], phase=Phase.DRAFT, logits="none")
                chain.pending = chain.pending[-1:]
        while True:
            if hidden_states is None:
                logits = self.sequence.decode(chain.pending, phase=Phase.DRAFT, logits="last")
            else:
                logits = self.sequence.decode(chain.pending, phase=Phase.DRAFT, logits="all", hidden_states=True)
                hidden_states[len(tokens)] = self.context.last_hidden_state()
            if not chain.draw(logits[-1]):
                break
            if on_token is not None:
                on_token([history[-1], *tokens])
        if hidden_states is None or not tokens:
            return chain.proposal
        return replace(chain.proposal, hidden_states=hidden_states[: len(tokens)])

    def rollback(self, n_valid: int) -> None:
        self.sequence.trim(n_valid)

    def shift(self, n_keep: int, n_discard: int) -> None:
        if self.context.can_shift and n_keep + n_discard < self.sequence.n_past:
            self.sequence.shift(n_keep, n_discard)
        else:
            self.sequence.trim(n_keep)

    def restore(self, history: Sequence[int]) -> None:
        self.sequence.keep_prefix(history)

    def clear(self) -> None:
        self.context.clear()


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

    def begin(self, history: Sequence[int], *, cancel: Callable[[], bool] | None = None) -> None:
        self._indexed = []
        self._after = {}

    def propose(
        self,
        history: Sequence[int],
        gamma: int,
        sampler: Sampler,
        *,
        on_token: OnToken | None = None,
        keep_hidden_states: bool = False,
        stop: DraftStop | None = None,
    ) -> Proposal:
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
                n_drafts = gamma if stop is None else _kept(stop, share, gamma)
                tokens = [history[start + i % period] for i in range(n_drafts)]
                candidates = [Candidates.certain(token) for token in tokens]
                return Proposal(tokens, candidates, [share] * min(n_drafts + 1, gamma))
        return Proposal()

    def shift(self, n_keep: int, n_discard: int) -> None:
        self.begin([])  # the next proposal indexes what is left


def _kept(stop: DraftStop, confidence: float, gamma: int) -> int:
    """How many of `gamma` drafts of equal confidence `stop` keeps."""
    for n in range(gamma):
        if not stop.keeps(confidence):
            return n
        if not stop.goes_on():
            return n + 1
    return gamma


class DraftRequest(NamedTuple):
    """What one text asks of its source: at most `gamma` tokens that may follow `history`."""

    source: DraftSource
    history: Sequence[int]
    gamma: int
    sampler: Sampler


def propose_together(requests: Sequence[DraftRequest]) -> list[Proposal]:
    """The proposals of several texts; a draft model decodes one batch per draft position for all of them."""
    chains: list[Chain] = []
    proposals = []
    for source, history, gamma, sampler in requests:
        if isinstance(source, ModelDraft) and gamma > 0:
            chains.append(Chain(source, history, gamma, sampler))
            proposals.append(chains[-1].proposal)
        else:
            proposals.append(source.propose(history, gamma, sampler))
    while chains:
        context = chains[0].source.context
        parts = [BatchPart(chain.source.sequence, chain.pending, "last") for chain in chains]
        unfinished: list[Chain] = []
        for group in context.fitting(parts):
            rows = context.decode_parts(parts[group], phase=Phase.DRAFT)
            unfinished += [chain for chain, row in zip(chains[group], rows, strict=True) if chain.draw(row[-1])]
        chains = unfinished
    return proposals
