"""Where draft tokens come from: a small model, the text so far (n-grams), or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.sampling import Candidates, Sampler
from moeedge.llama.context import Context
from moeedge.native.abi import Phase

_WITH_STATES = 4  # tokens: of all that are decoded while states are kept llama.cpp computes the logits, too


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Proposal:
    """A chain of draft tokens and the distribution that each was drawn from."""

    tokens: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)  # one per token
    # float32 [n_tokens, n_embd], of the token emitted last and the drafts but the last one; None where not asked for
    hidden_states: NDArray[np.float32] | None = None


class DraftSource(Protocol):
    """Proposes what may follow a history; what it keeps about the history it brings up to date itself."""

    def begin(self, history: Sequence[int], *, cancel: Callable[[], bool] | None = None) -> None:
        """Takes in the prompt (its last token is not decoded yet); long work for a model, so it is timed as prefill."""

    def propose(self, history: Sequence[int], gamma: int, sampler: Sampler) -> Proposal:
        """At most `gamma` tokens that may follow `history`."""

    def rollback(self, n_valid: int) -> None:
        """The first `n_valid` tokens of history plus proposal stand; the rest was refused."""

    def shift(self, n_keep: int, n_discard: int) -> None:
        """The history lost `n_discard` tokens behind its first `n_keep`."""

    def settle(self, history: Sequence[int]) -> None:
        """A step was cut off: only `history` stands."""


class NoDraft:
    """Plain decoding."""

    def begin(self, history: Sequence[int], *, cancel: Callable[[], bool] | None = None) -> None:
        pass

    def propose(self, history: Sequence[int], gamma: int, sampler: Sampler) -> Proposal:
        return Proposal()

    def rollback(self, n_valid: int) -> None:
        pass

    def shift(self, n_keep: int, n_discard: int) -> None:
        pass

    def settle(self, history: Sequence[int]) -> None:
        pass


class ModelDraft:
    """A draft model that samples from its own distribution under the target's sampling settings.

    Between steps its KV cache holds a prefix of the accepted history. After a full acceptance the last drafted token is
    missing there, since nothing had to be computed from it; the next proposal decodes it first.
    """

    def __init__(self, context: Context, *, n_vocab: int, is_eog: Callable[[int], bool]) -> None:
        self.context = context
        # called with the last token of the history and the drafts so far, before each further one is computed
        self.on_token: Callable[[Sequence[int]], None] | None = None
        # asked before each proposal: whether it is to hold the hidden states that drafting leaves behind
        self.keeps_hidden_states: Callable[[], bool] = lambda: False
        self._n_vocab = n_vocab  # ids that both vocabularies have
        self._is_eog = is_eog

    def begin(self, history: Sequence[int], *, cancel: Callable[[], bool] | None = None) -> None:
        held = self.context.keep_prefix(history[:-1])
        self.context.prefill(history[held:-1], logits="none", cancel=cancel)

    def propose(self, history: Sequence[int], gamma: int, sampler: Sampler) -> Proposal:
        proposal = Proposal()
        hidden_states = (
            np.empty((gamma, self.context.model.info.n_embd), dtype=np.float32) if self.keeps_hidden_states() else None
        )
        seen = sampler.recent(history)
        pending = history[self.context.n_past :]
        if hidden_states is not None and len(pending) > _WITH_STATES:
            self.context.decode(pending[:-1], phase=Phase.DRAFT, logits="none")
            pending = pending[-1:]
        while True:
            if hidden_states is None:
                logits = self.context.decode(pending, phase=Phase.DRAFT, logits="last")
            else:
                logits = self.context.decode(pending, phase=Phase.DRAFT, logits="all", hidden_states=True)
                hidden_states[len(proposal.tokens)] = self.context.last_hidden_state()
            candidates = sampler.candidates(logits[-1, : self._n_vocab], seen)
            token = sampler.pick(candidates)
            proposal.tokens.append(token)
            proposal.candidates.append(candidates)
            seen.append(token)
            if len(proposal.tokens) == gamma or self._is_eog(token):
                return (
                    proposal
                    if hidden_states is None
                    else replace(proposal, hidden_states=hidden_states[: len(proposal.tokens)])
                )
            if self.on_token is not None:
                self.on_token([history[-1], *proposal.tokens])
            pending = [token]

    def rollback(self, n_valid: int) -> None:
        self.context.trim(n_valid)

    def shift(self, n_keep: int, n_discard: int) -> None:
        if self.context.can_shift and n_keep + n_discard < self.context.n_past:
            self.context.shift(n_keep, n_discard)
        else:
            self.context.trim(n_keep)

    def settle(self, history: Sequence[int]) -> None:
        self.context.keep_prefix(history)


class NgramDraft:
    """Prompt lookup: what followed the latest earlier occurrence of the last 4, 3, 2 or 1 tokens.

    Saxena, "Prompt lookup decoding", 2023. The proposal is deterministic, so each token's distribution is certain.
    """

    LONGEST = 4

    def __init__(self) -> None:
        self._indexed: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position behind its latest occurrence

    def begin(self, history: Sequence[int], *, cancel: Callable[[], bool] | None = None) -> None:
        self._indexed = []
        self._after = {}

    def propose(self, history: Sequence[int], gamma: int, sampler: Sampler) -> Proposal:
        # the last token is not indexed yet: an n-gram must be found before the end, not at it
        for end in range(len(self._indexed) + 1, len(history)):
            self._indexed.append(history[end - 1])
            for n in range(1, min(self.LONGEST, end) + 1):
                self._after[tuple(history[end - n : end])] = end
        for n in range(min(self.LONGEST, len(history)), 0, -1):
            start = self._after.get(tuple(history[-n:]))
            if start is not None:
                return self._copy(history, start, gamma)
        return Proposal()

    def _copy(self, history: Sequence[int], start: int, gamma: int) -> Proposal:
        """`gamma` tokens from `start` on; a repetition that reaches the end of the history goes on in itself."""
        period = len(history) - start
        tokens = [history[start + i % period] for i in range(gamma)]
        return Proposal(tokens, [Candidates.certain(token) for token in tokens])

    def rollback(self, n_valid: int) -> None:
        pass  # only accepted tokens are ever indexed

    def shift(self, n_keep: int, n_discard: int) -> None:
        self.begin([])  # the next proposal indexes what is left

    def settle(self, history: Sequence[int]) -> None:
        pass
