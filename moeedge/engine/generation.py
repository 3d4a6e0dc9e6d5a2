"""One answer: an iterator of steps that knows when to stop, keeps the sums and survives an interruption."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from moeedge.engine.speculative import SpeculativeLoop
from moeedge.engine.types import GenerationStats, StopReason
from moeedge.errors import DeviceFailedError
from moeedge.llama.context import Cancelled
from moeedge.llama.text import StreamDecoder
from moeedge.scheduler.stats import StepRecord

_Result = TypeVar("_Result")


class Generation:
    """Iterate over it for the StepRecords, or over `pieces` for the text; a step is computed when it is requested.

    `tokens` are the visible ones so far (without a stop token), `text` is all that `pieces` has yielded, `stop_reason`
    is None while it runs, `notes` holds a sentence for each thing to report to the user: context full, context shifted.
    begun: the first tokens of the answer, if it goes on where an earlier one was cut off; they are the end of the
    prompt that the loop decodes. recover: called when a GPU has failed; it gives the loop contexts without it, or
    raises an error. The step is then repeated, with the same random numbers.
    """

    def __init__(
        self,
        loop: SpeculativeLoop,
        *,
        n_predict: int,
        gamma: int,
        n_ctx: int,
        n_keep: int,
        context_shift: bool,
        ignore_eos: bool,
        cancel: Callable[[], bool] | None,
        begun: Sequence[int] = (),
        recover: Callable[[DeviceFailedError], None] | None = None,
    ) -> None:
        self.tokens: list[int] = list(begun)
        self.text = ""
        self.stop_reason: StopReason | None = None
        self.notes: list[str] = []
        self.stats = GenerationStats(prompt_tokens=len(loop.history), seed=loop.sampler.seed)
        self._loop = loop
        self._n_predict = n_predict
        self._gamma = gamma
        self._n_ctx = n_ctx
        self._n_keep = n_keep
        self._context_shift = context_shift
        self._ignore_eos = ignore_eos
        self._cancel = cancel
        self._n_begun = len(begun)
        self._recover = recover
        self._start_s = time.perf_counter()
        self._steps = self._run()

    def __iter__(self) -> Iterator[StepRecord]:
        return self._steps

    def pieces(self) -> Iterator[str]:
        """The text in pieces that never split a character."""
        decoder = StreamDecoder()
        new_tokens = itertools.chain([self.tokens[: self._n_begun]], (step.tokens for step in self._steps))
        for tokens in new_tokens:
            model = self._loop.target.model  # another one after a recovery
            piece = decoder.feed(b"".join(model.piece(token) for token in tokens))
            if piece:
                self.text += piece
                yield piece
        piece = decoder.flush()
        if piece:
            self.text += piece
            yield piece

    def close(self) -> None:
        """Ends the answer here; what was emitted stays in `tokens` and in the KV cache."""
        self._steps.close()
        if self.stop_reason is None:
            self._interrupt()

    def _run(self) -> Generator[StepRecord, None, None]:
        loop, stats = self._loop, self.stats
        try:
            start_s = time.perf_counter()
            record = self._repeated(loop.prefill)
            now_s = time.perf_counter()
            stats.prefill_tokens = loop.n_prefilled
            stats.prefill_s = now_s - start_s
            stats.ttft_s = now_s - self._start_s
            yield self._emit(record)
            while self.stop_reason is None:
                if self._cancel is not None and self._cancel():
                    self._interrupt()
                elif self._make_room():
                    start_s = time.perf_counter()
                    if stats.steps == 0:
                        self._repeated(loop.begin)
                        begun_s = time.perf_counter()
                        stats.prefill_s += begun_s - start_s
                        start_s = begun_s
                    sense_s = loop.sense_s
                    # drafts must fit the context and the requested length
                    gamma, room = min(self._gamma, self._n_ctx - len(loop.history)), self._room()
                    n_drafts = max(0, gamma if room is None else min(gamma, room - 1))
                    record = self._repeated(partial(loop.step, n_drafts))
                    stats.add_step(
                        record, decode_s=time.perf_counter() - start_s, sense_s=max(0.0, loop.sense_s - sense_s)
                    )
                    yield self._emit(record)
        except (KeyboardInterrupt, Cancelled):
            self._interrupt()

    def _repeated(self, work: Callable[[], _Result]) -> _Result:
        """The result of `work`, which is repeated where a GPU fails and the answer can go on without it."""
        state = self._loop.sampler.state
        try:
            return work()
        except DeviceFailedError as error:
            if self._recover is None:
                raise
            self._recover(error)
            self._loop.sampler.state = state
            return work()

    def _emit(self, record: StepRecord) -> StepRecord:
        """Adds the step's tokens to the answer, cut at a stop token or at the requested length."""
        tokens = record.tokens
        if not self._ignore_eos:
            for i, token in enumerate(tokens):
                if self._loop.target.model.is_eog(token):
                    tokens = tokens[:i]
                    self.stop_reason = "eos"
                    break
        room = self._room()
        if room is not None and len(tokens) >= room:
            # a stop token right after the requested length still counts as the end
            if len(tokens) > room or self.stop_reason is None:
                self.stop_reason = "length"
            tokens = tokens[:room]
        self.tokens.extend(tokens)
        self.stats.generated_tokens = len(self.tokens) - self._n_begun
        return record if tokens is record.tokens else replace(record, tokens=tokens)

    def _room(self) -> int | None:
        """Tokens that may still come; None: no limit."""
        return None if self._n_predict < 0 else self._n_predict - len(self.tokens)

    def _make_room(self) -> bool:
        """Whether one more token fits the context, perhaps after a shift; otherwise the answer ends here."""
        loop = self._loop
        if len(loop.history) <= self._n_ctx:
            return True
        n_discard = (self._n_ctx - self._n_keep) // 2
        if self._context_shift and n_discard > 0 and loop.shift(self._n_keep, n_discard):
            self.notes.append(
                f"The context of {self._n_ctx:,} tokens was full: {n_discard:,} tokens after the first "
                f"{self._n_keep:,} were dropped."
            )
            return True
        self.stop_reason = "context"
        self.notes.append(f"The context of {self._n_ctx:,} tokens is full; -c N makes it larger.")
        return False

    def _interrupt(self) -> None:
        """Leaves both KV caches with the accepted text only."""
        self.stop_reason = "interrupted"
        self._loop.restore()
