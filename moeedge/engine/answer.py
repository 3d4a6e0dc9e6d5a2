"""One answer: its tokens, when it ends, its figures; of a text that is decoded alone or together with others."""

from __future__ import annotations

import codecs
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

from moeedge.engine.speculative import SpeculativeLoop, TextState
from moeedge.engine.types import GenerationStats, StopReason
from moeedge.errors import DeviceFailedError
from moeedge.llama.model import Model
from moeedge.llama.reasoning import ReasoningTags, begins_in_reasoning
from moeedge.llama.sequence import Cancelled
from moeedge.scheduler.stats import StepRecord


class StopTexts:
    """Looks for texts in a stream of bytes; they may begin and end within tokens."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text.encode() for text in texts]
        self.n_longest = max(map(len, self._texts), default=0)  # bytes
        self._tail = b""

    def find(self, data: bytes) -> bool:
        """Whether `data` completes one of the texts."""
        if not self.n_longest:
            return False
        seen = self._tail + data
        self._tail = seen[-self.n_longest + 1 :] if self.n_longest > 1 else b""
        return any(text in seen for text in self._texts)


class StopFilter:
    """Passes text on up to the first of the stop texts, and holds back what may be the beginning of one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self._stopped = False

    def feed(self, piece: str, *, last: bool = False) -> str:
        """What can be shown after `piece`; last: no more text comes."""
        if not self._texts:
            return piece
        if self._stopped:
            return ""
        text = self._held + piece
        places = [place for place in (text.find(stop) for stop in self._texts) if place >= 0]
        if places:
            self._stopped, self._held = True, ""
            return text[: min(places)]
        n_held = 0 if last else max(_n_begun(text, stop) for stop in self._texts)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


def _n_begun(text: str, stop: str) -> int:
    """The length of the longest beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


_Result = TypeVar("_Result")
_TAG_TOKENS = 32  # in which a tag at the end of a prompt is looked for
Recover = Callable[[DeviceFailedError], None]


@dataclass(frozen=True)
class AnswerLimits:
    """What ends an answer, and how far a step may go.

    n_predict: tokens, -1: no limit. gamma: drafts of a step. n_ctx: tokens of prompt and answer. n_keep: tokens at the
    start that a context shift does not drop. ignore_eos: stop tokens do not end the answer. reasoning_tags: as of
    `Model.reasoning_tags`.
    """

    n_predict: int
    gamma: int
    n_ctx: int
    n_keep: int
    context_shift: bool
    ignore_eos: bool
    reasoning_tags: ReasoningTags | None = None


class Answer:
    """`tokens` are the visible ones so far (without a stop token), `text` is what was read of them.

    `stop_reason` is None while it runs, `notes` holds a sentence for each thing to report to the user: context full,
    context shifted. begun: the first tokens of the answer, if it goes on where an earlier one was cut off; they are the
    end of the prompt. reasoning_tags: the texts around reasoning in `text`, control tokens included; None where the
    model's template knows no reasoning.
    """

    def __init__(self, state: TextState, limits: AnswerLimits, begun: Sequence[int] = ()) -> None:
        self.tokens: list[int] = list(begun)
        self.text = ""
        self.stop_reason: StopReason | None = None
        self.notes: list[str] = []
        self.stats = GenerationStats(prompt_tokens=len(state.history), seed=state.sampler.seed)
        self.state = state
        self._limits = limits
        self._n_begun = len(begun)
        self._start_s = time.perf_counter()
        # a token may end inside a character: its first bytes are held back until the rest arrives
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopTexts(state.sampler.config.stop)
        self._visible = StopFilter(state.sampler.config.stop)
        for token in begun:
            self._stops.find(state.target.context.model.piece(token))
        self.reasoning_tags = limits.reasoning_tags
        self._prompt_end = state.history[: len(state.history) - len(begun)][-_TAG_TOKENS:]

    @cached_property
    def begins_in_reasoning(self) -> bool:
        """Whether the prompt ends with the start tag of reasoning."""
        return ends_with_tag(self.state.target.context.model, self._prompt_end, self.reasoning_tags)

    @cached_property
    def _shown(self) -> frozenset[int]:
        """Tokens that are shown although they may be control tokens: those of the tags."""
        if self.reasoning_tags is None:
            return frozenset()
        return frozenset(self.state.target.context.model.tokenize("".join(self.reasoning_tags), add_special=False))

    def add_prompt(self, record: StepRecord, prefill_s: float) -> StepRecord:
        """Adds the first token; the last part of the prompt took `prefill_s`."""
        self._count_prompt()
        self.stats.prefill_s += prefill_s
        self.stats.ttft_s = time.perf_counter() - self._start_s
        return self._emit(record)

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
            if not self._limits.ignore_eos and model.is_eog(token):
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
        self.stats.generated_tokens = len(self.tokens) - self._n_begun
        return record if tokens is record.tokens else replace(record, tokens=tokens)

    def _room(self) -> int | None:
        """Tokens that may still come; None: no limit."""
        return None if self._limits.n_predict < 0 else self._limits.n_predict - len(self.tokens)

    @property
    def n_drafts(self) -> int:
        """The most drafts of the next step: they must fit the context and the requested length."""
        gamma, room = min(self._limits.gamma, self._limits.n_ctx - len(self.state.history)), self._room()
        return max(0, gamma if room is None else min(gamma, room - 1))

    def make_room(self) -> bool:
        """Whether one more token fits the context, perhaps after a shift; otherwise the answer ends here."""
        n_ctx, n_keep = self._limits.n_ctx, self._limits.n_keep
        if len(self.state.history) <= n_ctx:
            return True
        n_discard = (n_ctx - n_keep) // 2
        if self._limits.context_shift and n_discard > 0 and self.state.shift(n_keep, n_discard):
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
        piece = self._visible.feed(self._decoder.decode(data, last), last=last)
        self.text += piece
        return piece


def ends_with_tag(model: Model, prompt: Sequence[int], tags: ReasoningTags | None) -> bool:
    """Whether the answer to a prompt begins with reasoning, by the prompt's tokens, the last of which are enough."""
    if tags is None:
        return False
    end = b"".join(model.piece(token, special=True) for token in prompt[-_TAG_TOKENS:])
    return begins_in_reasoning(end.decode("utf-8", "replace"), tags)


def repeated(work: Callable[[], _Result], loop: SpeculativeLoop, recover: Recover | None) -> _Result:
    """The result of `work`, which is repeated where a GPU fails and the answers can go on without it."""
    if recover is None:
        return work()
    samplers = [state.sampler for state in loop.texts]
    positions = [sampler.state for sampler in samplers]
    try:
        return work()
    except DeviceFailedError as error:
        recover(error)
        for sampler, position in zip(samplers, positions, strict=True):
            sampler.state = position
        return work()


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
