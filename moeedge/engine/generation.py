"""One answer as an iterator of steps, which survives an interruption."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

from moeedge.engine.answer import Answer, AnswerLimits, Recover, repeated
from moeedge.engine.speculative import SpeculativeLoop, TextState
from moeedge.llama.sequence import Cancelled
from moeedge.scheduler.stats import StepRecord


class Generation(Answer):
    """Iterate over it for the StepRecords, or over `pieces` for the text; a step is computed when it is requested.

    `text` is all that `pieces` has yielded. begun: as of `Answer`. recover: called when a GPU has failed; it gives the
    loop contexts without it, or raises an error. The step is then repeated, with the same random numbers.
    Iterating raises EngineError where another answer has begun in the session.
    """

    def __init__(
        self,
        loop: SpeculativeLoop,
        state: TextState,
        limits: AnswerLimits,
        *,
        cancel: Callable[[], bool] | None,
        begun: Sequence[int] = (),
        recover: Recover | None = None,
    ) -> None:
        super().__init__(state, limits, begun)
        loop.texts.append(state)
        self._loop = loop
        self._cancel = cancel
        self._recover = recover
        self._steps = self._run()

    def __iter__(self) -> Iterator[StepRecord]:
        return self._steps

    def pieces(self) -> Iterator[str]:
        """The text in pieces that never split a character."""
        for tokens in itertools.chain([self.tokens[: self._n_begun]], (step.tokens for step in self._steps)):
            piece = self.read(tokens)
            if piece:
                yield piece
        piece = self.read([], last=True)
        if piece:
            yield piece

    def close(self) -> None:
        """Ends the answer here; what was emitted stays in `tokens` and in the KV cache."""
        self._steps.close()
        if self.stop_reason is None:
            self.interrupt(self._loop)

    def _run(self) -> Generator[StepRecord, None, None]:
        loop, stats = self._loop, self.stats
        try:
            loop.check_owner()
            start_s = time.perf_counter()
            record = repeated(partial(loop.prefill, self.state), loop, self._recover)
            yield self.add_prompt(record, time.perf_counter() - start_s)
            while self.stop_reason is None:
                loop.check_owner()
                if self._cancel is not None and self._cancel():
                    self.interrupt(loop)
                elif self.make_room():
                    start_s = time.perf_counter()
                    if stats.steps == 0:
                        repeated(partial(loop.begin, self.state), loop, self._recover)
                        begun_s = time.perf_counter()
                        stats.prefill_s += begun_s - start_s
                        start_s = begun_s
                    sense_s = loop.sense_s
                    [record] = repeated(partial(loop.step, [self.n_drafts]), loop, self._recover)
                    decode_s = time.perf_counter() - start_s
                    yield self.add_step(record, decode_s=decode_s, sense_s=max(0.0, loop.sense_s - sense_s))
        except (KeyboardInterrupt, Cancelled):
            self.interrupt(loop)
