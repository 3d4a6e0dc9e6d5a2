"""Answers: their tokens, when they end, their figures; of one text, or of several that share each step's batch."""

from __future__ import annotations

import codecs
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from moeedge.engine.speculative import SpeculativeLoop, TextState
from moeedge.engine.types import GenerationStats, SamplingConfig, StopReason
from moeedge.llama.reasoning import ReasoningTags, n_begun
from moeedge.llama.sequence import Cancelled, ContextSequence, n_common
from moeedge.scheduler.stats import StepRecord


class StopTexts:
    """Texts that end an answer and are no part of it; they may begin and end within tokens and pieces."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._data = [text.encode() for text in texts]
        self.n_longest = max(map(len, self._data), default=0)  # bytes
        self._tail, self._held = b"", ""
        self._is_found = False

    def find(self, data: bytes) -> bool:
        """Whether the next bytes of the stream complete one of the texts."""
        if not self.n_longest:
            return False
        seen = self._tail + data
        self._tail = seen[-self.n_longest + 1 :] if self.n_longest > 1 else b""
        return any(text in seen for text in self._data)

    def show(self, piece: str, *, last: bool = False) -> str:
        """The text to show after the next `piece`: up to a stop text, without what may begin one, unless `last`."""
        if not self._texts or self._is_found:
            return "" if self._is_found else piece
        text, self._held = self._held + piece, ""
        places = [place for place in (text.find(stop) for stop in self._texts) if place >= 0]
        if places:
            self._is_found = True  # the rest of a character may follow
            return text[: min(places)]
        n_held = 0 if last else max(n_begun(text, stop) for stop in self._texts)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


@dataclass(eq=False, repr=False, kw_only=True)
class Answer:
    """`tokens` are the visible ones so far (without a stop token), `text` is what was read of them.

    `stop_reason` is None while it runs, `notes` are sentences for the user: context full, context shifted. n_predict:
    tokens, -1: no limit. gamma: drafts of a step. n_ctx: tokens of prompt and answer. n_keep: first tokens that a
    context shift does not drop. ignore_eos: stop tokens do not end the answer. reasoning_tags: the texts around
    reasoning in `text`, control tokens included. begins_in_reasoning: the prompt ends with their first. begun: the
    first tokens of an answer that was cut off; they are the end of the prompt.
    """

    state: TextState
    n_predict: int
    gamma: int
    n_ctx: int
    n_keep: int
    context_shift: bool
    ignore_eos: bool
    reasoning_tags: ReasoningTags | None
    begins_in_reasoning: bool
    begun: Sequence[int] = ()

    def __post_init__(self) -> None:
        state = self.state
        self.tokens = list(self.begun)
        self.text = ""
        self.stop_reason: StopReason | None = None
        self.notes: list[str] = []
        self.stats = GenerationStats(prompt_tokens=len(state.history), seed=state.sampler.seed)
        self._start_s = time.perf_counter()
        # a token may end inside a character: its first bytes are held back until the rest arrives
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopTexts(state.sampler.config.stop)
        for token in self.begun:
            self._stops.find(state.target.context.model.piece(token))

    @cached_property
    def _shown(self) -> frozenset[int]:
        """Tokens that are shown although they may be control tokens: those of the tags."""
        if self.reasoning_tags is None:
            return frozenset()
        return frozenset(self.state.target.context.model.tokenize("".join(self.reasoning_tags), add_special=False))

    def read_prompt(self, loop: SpeculativeLoop) -> StepRecord:
        """Decodes the prompt and adds the first token; as `add_step`."""
        start_s = time.perf_counter()
        record = loop.attempt(loop.prefill, self.state)
        now_s = time.perf_counter()
        self._count_prompt()
        self.stats.prefill_s += now_s - start_s
        self.stats.ttft_s = now_s - self._start_s
        return self._emit(record)

    def begin(self, loop: SpeculativeLoop) -> None:
        """Prepares the first step, for which the first token does not wait."""
        start_s = time.perf_counter()
        loop.attempt(loop.begin, self.state)
        self.stats.prefill_s += time.perf_counter() - start_s

    def _count_prompt(self) -> None:
        self.stats.cached_tokens = self.state.n_cached or 0
        self.stats.prefill_tokens = self.state.n_prefilled

    def add_step(self, record: StepRecord, *, decode_s: float, sense_s: float) -> StepRecord:
        """Adds the tokens of a step and its figures; returns the record with the tokens that are part of the answer."""
        self.stats.add_step(record, decode_s=decode_s, sense_s=sense_s)
        return self._emit(record)

    def _emit(self, record: StepRecord) -> StepRecord:
        """Adds the step's tokens to the answer, cut at a stop token or at the requested length."""
        tokens, model = record.tokens, self.state.target.context.model
        for i, token in enumerate(tokens):
            if not self.ignore_eos and model.is_eog(token):
                tokens, self.stop_reason = tokens[:i], "eos"
                break
            if self._stops.n_longest and self._stops.find(model.piece(token, special=token in self._shown)):
                tokens, self.stop_reason = tokens[: i + 1], "stop"
                break
        room = self._room()
        if room is not None and len(tokens) >= room:
            # a stop token right after the requested length still counts as the end
            if len(tokens) > room or self.stop_reason is None:
                self.stop_reason = "length"
            tokens = tokens[:room]
        self.tokens.extend(tokens)
        self.stats.generated_tokens = len(self.tokens) - len(self.begun)
        return record if tokens is record.tokens else replace(record, tokens=tokens)

    def _room(self) -> int | None:
        """Tokens that may still come; None: no limit."""
        return None if self.n_predict < 0 else self.n_predict - len(self.tokens)

    @property
    def n_drafts(self) -> int:
        """The most drafts of the next step: they must fit the context and the requested length."""
        gamma, room = min(self.gamma, self.n_ctx - len(self.state.history)), self._room()
        return max(0, gamma if room is None else min(gamma, room - 1))

    def make_room(self) -> bool:
        """Whether one more token fits the context, perhaps after a shift; otherwise the answer ends here."""
        n_ctx, n_keep = self.n_ctx, self.n_keep
        if len(self.state.history) <= n_ctx:
            return True
        n_discard = (n_ctx - n_keep) // 2
        if self.context_shift and n_discard > 0 and self.state.shift(n_keep, n_discard):
            if self.stats.context_shifts:
                self.notes.pop()  # of the shifts before
            self.stats.context_shifts += 1
            self.stats.dropped_tokens += n_discard
            shifts = f" in {self.stats.context_shifts:,} shifts" if self.stats.context_shifts > 1 else ""
            self.notes.append(
                f"The context of {n_ctx:,} tokens was full: {self.stats.dropped_tokens:,} tokens after the first "
                f"{n_keep:,} were dropped{shifts}."
            )
            return True
        self.stop_reason = "context"
        self.notes.append(f"The context of {n_ctx:,} tokens is full.")
        return False

    def interrupt(self, loop: SpeculativeLoop) -> None:
        """Ends the answer here and leaves both KV caches with the accepted text only, if they are still its loop's."""
        self.stop_reason = "interrupted"
        if self.stats.ttft_s == 0:  # within the prompt
            self._count_prompt()
            self.stats.prefill_s = self.stats.prefill_s or time.perf_counter() - self._start_s
        if not loop.is_replaced:
            self.state.restore()

    def read(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that `tokens` add, in entire characters; last: no more tokens come."""
        model = self.state.target.context.model
        data = b"".join(model.piece(token, special=token in self._shown) for token in tokens)
        piece = self._stops.show(self._decoder.decode(data, last), last=last)
        self.text += piece
        return piece


@dataclass(eq=False, repr=False, kw_only=True)
class Generation(Answer):
    """Iterate over it for the StepRecords, or over `pieces` for the text; a step is computed when it is requested.

    `text` is all that `pieces` has yielded. Iterating raises EngineError where another answer has begun in the session.
    """

    loop: SpeculativeLoop

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loop.texts.append(self.state)
        self._steps = self._run()

    def __iter__(self) -> Iterator[StepRecord]:
        return self._steps

    def pieces(self) -> Iterator[str]:
        """The text in pieces that never split a character."""
        tokens = itertools.chain([self.begun], (step.tokens for step in self._steps))
        yield from filter(None, map(self.read, tokens))
        yield from filter(None, [self.read([], last=True)])

    def close(self) -> None:
        """Ends the answer here; what was emitted stays in `tokens` and in the KV cache."""
        self._steps.close()
        if self.stop_reason is None:
            self.interrupt(self.loop)

    def _run(self) -> Generator[StepRecord, None, None]:
        loop = self.loop
        try:
            loop.check_owner()
            yield self.read_prompt(loop)
            while self.stop_reason is None:
                loop.check_owner()
                if loop.run.cancelled():
                    self.interrupt(loop)
                elif self.make_room():
                    if self.stats.steps == 0:
                        self.begin(loop)
                    [record], times = loop.timed_step([self.n_drafts])
                    yield self.add_step(record, **times)
        except (KeyboardInterrupt, Cancelled):
            self.interrupt(loop)


@dataclass(eq=False, repr=False)
class ParallelGeneration:
    """Iterate over it for (index, StepRecord) of each text and step; a step is computed when it is requested.

    A text's first record is its prompt's, with its first token; times and experts of a record are of the entire step.
    `answers[index]` are the answers, as they were added. `stats` are of all prompts and steps, `of_texts[n]` of the
    steps of n texts together; stop tokens are counted, and the first token of each text, its prompt's, is not. Texts
    wait for a free sequence, and take the one whose KV cache holds most of their prompt. Between two records texts may
    be added and stopped. An iteration ends when no text is left, and goes on with texts that are added later. Raises
    EngineError where another answer has begun in the session. new_answer: makes the answer of (prompt, n_predict,
    sampling).
    """

    _loop: SpeculativeLoop
    _new_answer: Callable[[Sequence[int], int, SamplingConfig], Answer]

    def __post_init__(self) -> None:
        self.answers: list[Answer] = []
        self.stats = GenerationStats(prefill_generated=0)
        self.of_texts = defaultdict[int, GenerationStats](partial(GenerationStats, prefill_generated=0))
        self._waiting: deque[int] = deque()  # indices of answers
        self._active: dict[int, Answer] = {}  # those that have a sequence
        self._ready: deque[tuple[int, StepRecord]] = deque()  # computed, and not yielded yet

    def add(self, prompt: Sequence[int], *, n_predict: int = -1, sampling: SamplingConfig) -> int:
        """Adds a text; returns its index in `answers`. Raises EmptyPromptError and ContextTooSmallError."""
        self.answers.append(self._new_answer(prompt, n_predict, sampling))
        self._waiting.append(len(self.answers) - 1)
        return len(self.answers) - 1

    def stop(self, index: int) -> None:
        """Ends one answer here; what was emitted stays in its `tokens` and in the KV cache."""
        answer = self.answers[index]
        if index in self._active:
            answer.interrupt(self._loop)
            self._end(index)
        elif answer.stop_reason is None:
            self._waiting = deque(each for each in self._waiting if each != index)
            answer.stop_reason = "interrupted"

    def close(self) -> None:
        """Ends all answers here, and leaves the KV caches with the accepted texts only."""
        for index in (*self._active, *range(len(self.answers))):
            self.stop(index)

    def __iter__(self) -> Iterator[tuple[int, StepRecord]]:
        return self

    def __next__(self) -> tuple[int, StepRecord]:
        while not self._ready:
            if not self._active and not self._waiting:
                raise StopIteration
            self._advance()
        return self._ready.popleft()

    def _advance(self) -> None:
        """Decodes the prompt of a text that joins, or one step of all texts."""
        self._loop.check_owner()
        taken = {answer.state.target.index for answer in self._active.values()}
        free = [sequence for sequence in self._loop.target.sequences if sequence.index not in taken]
        try:
            if self._loop.run.cancelled():
                self.close()
            elif self._waiting and free:
                self._join(free)
            else:
                self._step()
        except (KeyboardInterrupt, Cancelled):
            self.close()

    def _join(self, free: Sequence[ContextSequence]) -> None:
        """Decodes the prompt of the text that waits longest, in one of the `free` sequences."""
        loop, index = self._loop, self._waiting[0]
        answer = self.answers[index]
        state = answer.state
        sequence = max(free, key=lambda each: n_common(each.tokens, state.history))
        loop.place(state, sequence.index)
        self._active[self._waiting.popleft()] = answer
        loop.texts = [each.state for each in self._active.values()]
        self._hand_out(index, answer.read_prompt(loop))
        self.stats.prefill_tokens += answer.stats.prefill_tokens
        try:
            if answer.stop_reason is None:
                answer.begin(loop)
        finally:
            self.stats.prefill_s += answer.stats.prefill_s

    def _step(self) -> None:
        for index, answer in list(self._active.items()):
            if not answer.make_room():
                self._end(index)
        active = list(self._active.items())
        if not active:
            return
        records, times = self._loop.timed_step([answer.n_drafts for _, answer in active])
        n_tokens = 0
        for (index, answer), record in zip(active, records, strict=True):
            shown = answer.add_step(record, **times)
            n_tokens += len(shown.tokens) + (answer.stop_reason == "eos")
            self._hand_out(index, shown)
        n_drafted, n_accepted = sum(r.n_drafted for r in records), sum(r.n_accepted for r in records)
        together = replace(records[0], n_drafted=n_drafted, n_accepted=n_accepted)
        for stats in (self.stats, self.of_texts[len(records)]):
            stats.add_step(together, **times)
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
        self._active.pop(index, None)
        self._loop.texts = [each.state for each in self._active.values()]
