"""Drafts by a head that continues from the target's hidden states: the model's own (MTP), an EAGLE-3 or DFlash draft.

The states come with each decode of the target and wait until the head reads them: drafting begins with one batch of the
tokens accepted since the last drafts. Later drafts of a step go on from the head's own states; their entries are taken
back when the target has decoded the drafts. All drafts of a DFlash draft's step come from one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeedge.engine.drafts import MAX_TOKENS_WITH_STATES, Chain, ContextDraft, DraftRequest, Proposal
from moeedge.llama.context import Context
from moeedge.llama.draft_heads import HeadContext
from moeedge.llama.hidden_states import StateRows
from moeedge.llama.sequence import BatchPart
from moeedge.native.abi import Phase
from moeedge.run import Run

_KEPT_BYTES = 16 << 20  # of a text's states
_KEPT_TOKENS = (64, 1024)  # at least and at most


class StateLog:
    """The last hidden states of one text, float32 [n_kept, width], by position; zeros where one is not kept."""

    def __init__(self, n_kept: int, width: int) -> None:
        self._rows = np.zeros((n_kept, width), dtype=np.float32)
        self._first = 0  # positions kept: _first..end - 1
        self.end = 0

    @property
    def n_kept(self) -> int:
        return len(self._rows)

    def add(self, position: int, states: StateRows) -> None:
        """Keeps the states of `position` and those that follow; what was kept from there on was of other tokens."""
        if not self._first <= position <= self.end:
            self._first = position
        self.end = position + len(states)
        states = states[-self.n_kept :]
        self._rows[np.arange(self.end - len(states), self.end) % self.n_kept] = states
        self._first = max(self._first, self.end - self.n_kept)

    def read(self, position: int, n: int) -> StateRows:
        """The states of `n` positions from `position` on, float32 [n, width]."""
        positions = np.arange(position, position + n)
        rows = self._rows[positions % self.n_kept]
        rows[(positions < self._first) | (positions >= self.end)] = 0
        return rows

    def shift(self, n_keep: int, n_discard: int) -> None:
        """The text lost `n_discard` tokens after its first `n_keep`: only the states after them stay."""
        rows = self.read(self._first, self.end - self._first)[max(0, n_keep + n_discard - self._first) :]
        start = max(self._first, n_keep + n_discard) - n_discard
        self._first = self.end = start
        self.add(start, rows)

    def clear(self) -> None:
        self._first = self.end = 0


class HeadDraft(ContextDraft):
    """Drafts of one text by a head, whose entries the target's decode takes back: a rollback has nothing to do.

    Those of other texts (`for_sequence`) share `logs`: the states of each text that the head may still read.
    """

    context: HeadContext

    def __init__(self, target: Context, context: HeadContext, *, n_vocab: int) -> None:
        super().__init__(context, n_vocab=n_vocab, is_eog=target.model.is_eog)
        self.kind = context.kind
        self.n_skipped = self.kind.n_skipped
        width = len(self.kind.layers) * target.model.info.n_embd
        n_kept = int(np.clip(_KEPT_BYTES // (4 * width), *_KEPT_TOKENS))
        self.logs = [StateLog(n_kept, width) for _ in target.sequences]
        target.tap_states(self.kind.layers, self._take_in)

    def _take_in(self, parts: Sequence[BatchPart], states: StateRows) -> None:
        """Keeps the states of a batch of the target, and takes back entries of drafts and of other texts."""
        state_at, start = self.kind.state_at, 0
        for part in parts:
            index, n = part.sequence.index, len(part.tokens)
            position = len(part.sequence.tokens) - n
            log, entries = self.logs[index], self.context.sequences[index]
            entries.trim(position - state_at)
            size = log.n_kept - 2  # next to the state before them, and one of an entry that may be another text's
            for at in range(0, n, size):
                rows = states[start + at : start + min(at + size, n)]
                n_unread = position + at - (entries.n_past + state_at)
                if n_unread + len(rows) >= log.n_kept:
                    self._catch_up(index, part.sequence.tokens[: position + at])
                log.add(position + at, rows)
            start += n

    def _catch_up(self, index: int, history: Sequence[int], run: Run | None = None) -> None:
        """Makes the head's KV cache hold the entries of `history`, the first tokens of a text, and no others."""
        tokens = history[self.n_skipped :]
        n_held = self.context.sequences[index].keep_prefix(tokens)
        self._extend(index, tokens[n_held:], run)

    def _extend(self, index: int, tokens: Sequence[int], run: Run | None = None) -> None:
        """Appends entries of `tokens`, with the target's states."""
        sequence, size = self.context.sequences[index], self.context.n_ubatch
        for start in range(0, len(tokens), size):
            piece, n_held = tokens[start : start + size], sequence.n_past
            states = self.states(index, n_held, len(piece))
            sequence.prefill(piece, logits="none", states=states, run=run)
            for head in range(1, self.kind.n_heads):  # into the same cells
                with self.context.head(head):
                    sequence.trim(n_held)
                    sequence.prefill(piece, logits="none", states=states)

    def states(self, index: int, entry: int, n: int) -> StateRows:
        """The target's states for the tokens of `n` entries from `entry` on, as the head takes them."""
        return self.context.input_states(self.logs[index].read(entry + self.kind.state_at, n))

    def begin(self, history: Sequence[int], *, run: Run | None = None) -> None:
        self._catch_up(self.sequence.index, history[:-1], run)

    def _propose(self, request: DraftRequest) -> Proposal:
        sequence, chain = self.sequence, Chain(self, request)
        if len(chain.pending) > MAX_TOKENS_WITH_STATES:
            self._extend(sequence.index, chain.pending[:-1])
            chain.pending = chain.pending[-1:]
        states = self.states(sequence.index, sequence.n_past, len(chain.pending))
        own: list[StateRows] = []
        while True:
            n = len(chain.pending)
            logits = sequence.decode(chain.pending, phase=Phase.DRAFT, logits="all", states=states)
            states = self.context.last_state(n)
            own.append(states)
            if not chain.draw(logits[-1]):
                return chain.with_states(own)

    def shift(self, n_keep: int, n_discard: int) -> None:
        self.logs[self.sequence.index].shift(n_keep, n_discard)
        super().shift(n_keep, n_discard)

    def clear(self) -> None:
        super().clear()
        for log in self.logs:
            log.clear()


class ChainDraft(HeadDraft):
    """Drafts of one text by several heads, one each, which read the last token and all drafts before their own."""

    def _propose(self, request: DraftRequest) -> Proposal:
        context, sequence, history = self.context, self.sequence, request.history
        self._extend(sequence.index, history[sequence.n_past : -1])
        n_held, n_drafts = sequence.n_past, min(request.gamma, self.kind.n_heads)
        chain = Chain(self, request._replace(gamma=n_drafts))
        states = self.states(sequence.index, n_held, 1)
        own: list[StateRows] = []
        for index in range(n_drafts):
            with context.head(index):
                tokens = [history[-1], *chain.proposal.tokens]
                rows = sequence.decode(tokens, phase=Phase.DRAFT, logits="all", states=states)
                own.append(context.last_state(len(rows)))
                goes_on = chain.draw(rows[-1])
                sequence.trim(n_held)
            if not goes_on:
                break
            states = np.concatenate([states, own[-1]])
        return chain.with_states(own)


class BlockDraft(HeadDraft):
    """Drafts of one text by a DFlash draft, predicted by one decode of the last token and masks."""

    def _propose(self, request: DraftRequest) -> Proposal:
        block, history, sequence = self.kind.block, request.history, self.sequence
        assert block is not None
        n_drafts = min(request.gamma, block.n_tokens - block.first)
        self._extend(sequence.index, history[sequence.n_past : -1])
        n_held = sequence.n_past
        try:
            tokens = [history[-1], *[block.mask] * (n_drafts + block.first - 1)]
            rows = sequence.decode(tokens, phase=Phase.DRAFT, logits="all")
            chain = Chain(self, request._replace(gamma=n_drafts, on_token=None))
            for row in rows[block.first :]:
                if not chain.draw(row):
                    break
            return chain.proposal
        finally:
            sequence.trim(n_held)


def head_draft(target: Context, context: HeadContext, *, n_vocab: int) -> HeadDraft:
    """The source of drafts that a head of this kind is, for the first text."""
    kind = context.kind
    source = BlockDraft if kind.block is not None else ChainDraft if kind.n_heads > 1 else HeadDraft
    return source(target, context, n_vocab=n_vocab)
