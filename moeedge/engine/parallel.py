"""Several answers at once: their texts share each step's batch, join it between steps and leave it at their end."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from moeedge.engine.answer import Answer, Recover, repeated
from moeedge.engine.drafts import DraftSource
from moeedge.engine.speculative import SpeculativeLoop, TextState
from moeedge.engine.types import GenerationStats, SamplingConfig
from moeedge.llama.sequence import Cancelled
from moeedge.scheduler.stats import StepRecord


@dataclass(eq=False, repr=False)
class ParallelGeneration:
    """Iterate over it for (index, StepRecord) of each text and step; a step is computed when it is requested.

    A text's first record is its prompt's, with its first token. The times and experts of a record are those of the
    entire step. `answers[index]` are the answers, in the order in which they were added. `stats` are the prompts, which
    are decoded one after the other, and all steps, `of_texts[n]` the steps of n texts together; the first token of each
    text belongs to its prompt and is not counted, and stop tokens are. Texts wait until a sequence is free; they take
    the one whose KV cache holds most of their prompt. Between two records texts may be added and
    stopped. An iteration ends when no text is left, and goes on with texts that are added later. It raises EngineError
    where another answer has begun in the session.

    new_answer: makes the answer of (prompt, n_predict, sampling), and raises MoeedgeError for a prompt that does not
    fit. draft_of: the source of drafts for the text in a sequence. recover: as of `Generation`.
    """

    _loop: SpeculativeLoop
    _new_answer: Callable[[Sequence[int], int, SamplingConfig], Answer]
    _draft_of: Callable[[int], DraftSource]
    _cancel: Callable[[], bool] | None
    _recover: Recover | None

    def __post_init__(self) -> None:
        self.answers: list[Answer] = []
        self.stats = GenerationStats(prefill_generated=0)
        self.of_texts = defaultdict[int, GenerationStats](partial(GenerationStats, prefill_generated=0))
        self._waiting: deque[int] = deque()  # indices of answers
        self._joining: int | None = None  # the text whose prompt is being decoded; it has a sequence
        self._active: dict[int, Answer] = {}
        self._free = list(range(len(self._loop.target.sequences)))  # sequences without a text
        self._ready: deque[tuple[int, StepRecord]] = deque()  # computed, and not yielded yet

    def add(self, prompt: Sequence[int], *, n_predict: int = -1, sampling: SamplingConfig) -> int:
        """Adds a text, which joins as soon as a sequence is free; returns its index in `answers`.

        Raises EmptyPromptError and ContextTooSmallError.
        """
        self.answers.append(self._new_answer(prompt, n_predict, sampling))
        self._waiting.append(len(self.answers) - 1)
        return len(self.answers) - 1

    def stop(self, index: int) -> None:
        """Ends one answer here; what was emitted stays in its `tokens` and in the KV cache."""
        if index in self._active or index == self._joining:
            self.answers[index].interrupt(self._loop)
            self._end(index)
        elif index in self._waiting:
            self._waiting.remove(index)
            self.answers[index].stop_reason = "interrupted"

    def close(self) -> None:
        """Ends all answers here."""
        self._interrupt()

    def __iter__(self) -> Iterator[tuple[int, StepRecord]]:
        return self

    def __next__(self) -> tuple[int, StepRecord]:
        while not self._ready:
            if not self._active and not self._waiting and self._joining is None:
                raise StopIteration
            self._advance()
        return self._ready.popleft()

    def _advance(self) -> None:
        """Decodes the prompt of a text that joins, or one step of all texts; of a long prompt a part before each."""
        self._loop.check_owner()
        try:
            if self._cancel is not None and self._cancel():
                self._interrupt()
                return
            if self._joining is None and self._waiting and self._free:
                self._take_sequence(self._waiting.popleft())
            if self._joining is None or not self._join(self._joining):
                self._step()
        except (KeyboardInterrupt, Cancelled):
            self._interrupt()

    def _take_sequence(self, index: int) -> None:
        """Gives a text the free sequence that holds most of its prompt."""
        state, sequences = self.answers[index].state, self._loop.target.sequences
        sequence = max(self._free, key=lambda free: sequences[free].n_common(state.history))
        state.move(sequences[sequence])
        self._free.remove(sequence)
        self._joining = index

    def _join(self, index: int) -> bool:
        """Decodes the prompt of a text, or a part of a long one; returns whether it has joined."""
        start_s = time.perf_counter()
        answer, loop = self.answers[index], self._loop
        state, sequence = answer.state, answer.state.target.index
        state.move(loop.target.sequences[sequence])  # a GPU may have failed
        state.draft = self._draft_of(sequence)
        loop.texts = [*self._active_states(), state]
        if len(self._active) > 0 and repeated(partial(loop.prefill_part, state), loop, self._recover):
            loop.texts.pop()
            self._add_prefill(answer, start_s)
            return False
        record = repeated(partial(loop.prefill, state), loop, self._recover)
        now_s = time.perf_counter()
        self.stats.prefill_s += now_s - start_s
        shown = answer.add_prompt(record, now_s - start_s)
        self.stats.prefill_tokens += answer.stats.prefill_tokens
        self._joining, self._active[index] = None, answer
        self._hand_out(index, shown)
        if answer.stop_reason is None:
            repeated(partial(loop.begin, state), loop, self._recover)
            self._add_prefill(answer, now_s)
        return True

    def _add_prefill(self, answer: Answer, start_s: float) -> None:
        seconds = time.perf_counter() - start_s
        answer.stats.prefill_s += seconds
        self.stats.prefill_s += seconds

    def _active_states(self) -> list[TextState]:
        return [answer.state for answer in self._active.values()]

    def _step(self) -> None:
        for index, answer in list(self._active.items()):
            if not answer.make_room():
                self._end(index)
        active = list(self._active.items())
        if not active:
            return
        loop = self._loop
        start_s, sense_s = time.perf_counter(), loop.sense_s
        records = repeated(partial(loop.step, [answer.n_drafts for _, answer in active]), loop, self._recover)
        step_s, sense_s = time.perf_counter() - start_s, max(0.0, loop.sense_s - sense_s)
        n_tokens = 0
        for (index, answer), record in zip(active, records, strict=True):
            shown = answer.add_step(record, decode_s=step_s, sense_s=sense_s)
            n_tokens += len(shown.tokens) + (answer.stop_reason == "eos")
            self._hand_out(index, shown)
        n_drafted, n_accepted = sum(r.n_drafted for r in records), sum(r.n_accepted for r in records)
        together = replace(records[0], n_drafted=n_drafted, n_accepted=n_accepted)
        for stats in (self.stats, self.of_texts[len(records)]):
            stats.add_step(together, decode_s=step_s, sense_s=sense_s)
            stats.generated_tokens += n_tokens

    def _hand_out(self, index: int, record: StepRecord) -> None:
        """Adds to the answer's text what the step has emitted, and ends the answer where it is complete."""
        answer = self.answers[index]
        answer.read(record.tokens)
        self._ready.append((index, record))
        if answer.stop_reason is not None:
            self._end(index)

    def _end(self, index: int) -> None:
        """An answer is complete: its sequence is free for another text, which may reuse what the KV cache holds."""
        answer = self.answers[index]
        answer.read([], last=True)
        if self._joining == index:
            self._joining = None
        self._active.pop(index, None)
        self._free.append(answer.state.target.index)
        self._loop.texts = self._active_states()

    def _interrupt(self) -> None:
        """Ends all answers, and leaves the KV caches with the accepted texts only."""
        self._waiting.clear()
        joining = [] if self._joining is None else [self._joining]
        for index in (*self._active, *joining):
            self.answers[index].interrupt(self._loop)
            self._end(index)
        for answer in self.answers:
            answer.stop_reason = answer.stop_reason or "interrupted"
