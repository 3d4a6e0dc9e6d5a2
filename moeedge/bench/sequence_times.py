"""Times batches of several sequences: the target with 1 to 9 tokens of each, the draft with one of each.

What a plain step and a verification of B texts cost (MoESD's T_T(B, 1), T_T(B, gamma) and T_D(B, 1)): their tokens come
from places of the text that are far apart, and therefore share fewer experts than neighbours of one text do.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median

import numpy as np

from moeedge.analysis.step_fit import TimePoint
from moeedge.bench.harness import GREEDY, never, rotated
from moeedge.engine.sampling import Sampler
from moeedge.engine.session import Session
from moeedge.errors import InputError
from moeedge.llama.context import Context
from moeedge.llama.sequence import BatchPart
from moeedge.native.abi import Phase

MAX_TOKENS = 64  # of a batch
TOKENS_EACH = (1, 2, 3, 5, 9)  # of a sequence: a plain step, and verifications of 1, 2, 4 and 8 drafts
_BEFORE = 16  # tokens in the KV cache of each sequence
N_CTX = _BEFORE + 2 * max(TOKENS_EACH)  # that a session needs for each sequence

_Key = tuple[int, int]  # tokens in the batch, sequences


class SequenceTimer:
    """Times passes of one session's models; its KV caches are the timer's while it works.

    The session must have as many sequences as the largest of `batch_sizes`. In every repetition the sequences begin
    elsewhere. Before each timed pass runs one of the same shape, untimed. cancel, on_pass: as of StepTimer.
    """

    def __init__(
        self,
        session: Session,
        text: Sequence[int],
        *,
        batch_sizes: Sequence[int],
        repetitions: int,
        cancel: Callable[[], bool] = never,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._text = list(text)
        self._sizes = sorted(set(batch_sizes))
        self._repetitions = repetitions
        self._cancel = cancel
        self._on_pass = on_pass
        self._room = len(self._text) - _BEFORE - 2 * max(TOKENS_EACH)  # for places
        if self._room < 1:
            raise InputError(
                f"The text has {len(self._text)} tokens: sequences of {N_CTX} do not fit.", "Use longer answers (-n)."
            )

    @property
    def n_passes(self) -> int:
        """Timed passes of `target` and `draft`."""
        has_draft = self._session.draft_context is not None
        return self._repetitions * sum(has_draft + (size > 1) * len(self._shapes(size)) for size in self._sizes)

    def _shapes(self, size: int) -> tuple[int, ...]:
        """Tokens of each of `size` sequences whose batches are timed."""
        return tuple(each for each in TOKENS_EACH if size * each <= MAX_TOKENS)

    def target(self) -> list[TimePoint]:
        """T_T(B, 1) and T_T(B, gamma), with the distinct experts per MoE layer."""
        context = self._session.target
        n_layers = max(1, len(context.model.host_expert_layers))
        seconds: dict[_Key, list[float]] = defaultdict(list)
        unique: dict[_Key, list[float]] = defaultdict(list)
        for turn, size in self._filled(context):
            for each in rotated(self._shapes(size), turn) if size > 1 else ():
                if self._cancel():
                    break
                self._decode_s(context, self._parts(context, size, each, turn, skip=each))  # warms up
                if context.sensor is not None:
                    context.sensor.read_counts()
                key = size * each, size
                seconds[key].append(self._decode_s(context, self._parts(context, size, each, turn)))
                if context.sensor is not None:
                    unique[key].append(np.count_nonzero(context.sensor.read_counts()) / n_layers)
                self._on_pass()
        n_used = context.model.info.n_expert_used
        return [
            TimePoint(
                n_tokens,
                median(samples),
                n_used,
                size,
                unique_experts=fmean(unique[n_tokens, size]) if unique[n_tokens, size] else None,
                samples_s=tuple(samples),
            )
            for (n_tokens, size), samples in sorted(seconds.items())
        ]

    def draft(self) -> list[TimePoint]:
        """T_D(B, 1): one pass of the draft model over a token of each sequence, and a choice for each.

        Empty without a draft model.
        """
        context = self._session.draft_context
        if context is None:
            return []
        sampler = Sampler(GREEDY, context.model.info.n_vocab)
        seconds: dict[int, list[float]] = defaultdict(list)
        for turn, size in self._filled(context):
            self._decode_s(context, self._parts(context, size, 1, turn, skip=1), Phase.DRAFT)  # warms up
            parts = self._parts(context, size, 1, turn)
            start_s = time.perf_counter()
            for logits in context.decode_parts(parts, phase=Phase.DRAFT):
                sampler.pick(sampler.candidates(logits[0], []))
            seconds[size].append(time.perf_counter() - start_s)
            _take_back(parts)
            self._on_pass()
        return [
            TimePoint(size, median(samples), n_sequences=size, samples_s=tuple(samples))
            for size, samples in sorted(seconds.items())
        ]

    def _filled(self, context: Context) -> Iterator[tuple[int, int]]:
        """(repetition, batch size) with the text before their places in the KV cache of as many sequences."""
        for turn in range(self._repetitions):
            context.clear()
            for size in self._sizes:
                if self._cancel():
                    return
                parts = []
                for sequence in context.sequences[:size]:
                    if sequence.n_past == 0:
                        place = self._place(sequence.index, turn)
                        parts.append(BatchPart(sequence, self._text[place - _BEFORE : place], "none"))
                for group in context.fitting(parts) if parts else ():
                    context.decode_parts(parts[group], phase=Phase.PREFILL)
                yield turn, size

    def _place(self, index: int, turn: int) -> int:
        """Where the timed tokens of a sequence begin in the text; the sequences lie apart from each other."""
        return _BEFORE + (index * self._repetitions + turn) * self._room // (self._repetitions * self._sizes[-1])

    def _parts(self, context: Context, size: int, each: int, turn: int, *, skip: int = 0) -> list[BatchPart]:
        """A batch of `each` tokens of `size` sequences; skip: of the text after their place."""
        parts = []
        for sequence in context.sequences[:size]:
            start = self._place(sequence.index, turn) + skip
            parts.append(BatchPart(sequence, self._text[start : start + each], "all"))
        return parts

    def _decode_s(self, context: Context, parts: Sequence[BatchPart], phase: Phase = Phase.VERIFY) -> float:
        """Seconds of one pass, of which the KV cache keeps nothing."""
        start_s = time.perf_counter()
        context.decode_parts(parts, phase=phase)
        seconds = time.perf_counter() - start_s
        _take_back(parts)
        return seconds


def _take_back(parts: Sequence[BatchPart]) -> None:
    for part in parts:
        part.sequence.trim(part.sequence.n_past - len(part.tokens))
