"""A model's thinking apart from its answer while both stream, and the line that stands for folded thinking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from moeedge.llama.reasoning import ReasoningTags


class Part(NamedTuple):
    """A piece of an answer's text."""

    is_thinking: bool
    text: str


class ThinkingSplitter:
    """Tells thinking from answer in pieces of text, as `moeedge.llama.reasoning.split_reasoning` does in all of it.

    Thinking begins at the start of the text only, where it has the start tag, or at once with `is_open`. Tags belong to
    the thinking. The parts' texts joined are the text: what may be the beginning of a tag waits for the next piece.
    """

    def __init__(self, tags: ReasoningTags | None, *, is_open: bool = False) -> None:
        self._tags = tags
        self._held = ""
        self.is_thinking = is_open and tags is not None
        self._may_begin = tags is not None  # no text but blanks so far

    def without_tags(self, thinking: str) -> str:
        """The text of a part that is thinking."""
        return thinking if self._tags is None else thinking.replace(self._tags.start, "").replace(self._tags.end, "")

    def feed(self, piece: str, *, is_last: bool = False) -> Iterator[Part]:
        """The parts that are certain with this piece; is_last: all that are left."""
        self._held += piece
        if self._may_begin and not self.is_thinking:
            assert self._tags is not None
            begun = self._held.lstrip()
            if not is_last and begun != self._tags.start and self._tags.start.startswith(begun):
                return  # also blanks alone
            self._may_begin = False
            self.is_thinking = begun.startswith(self._tags.start)
        if self.is_thinking:
            assert self._tags is not None
            self._may_begin = False
            thought, found, rest = self._held.partition(self._tags.end)
            if not found:
                n_waiting = 0 if is_last else _overlap(self._held, self._tags.end)
                thought = self._held[: len(self._held) - n_waiting]
                self._held = self._held[len(thought) :]
                if thought:
                    yield Part(True, thought)
                return
            yield Part(True, thought + found)
            self.is_thinking, self._held = False, rest
        if self._held:
            yield Part(False, self._held)
        self._held = ""


def _overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of `tag` at the end of `text`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


class FoldedThinking:
    """Leaves thinking out of an answer and counts it.

    n_tokens: reads how many tokens the answer has so far, thinking included.
    """

    def __init__(self, splitter: ThinkingSplitter, n_tokens: Callable[[], int]) -> None:
        self._splitter = splitter
        self._read_tokens = n_tokens
        self._start_s = 0.0
        self._text_begins = True  # blanks between thinking and answer are left out
        self._seconds = 0.0
        self._n_tokens = 0
        self._has_thought = False  # with any text but tags and blanks
        self._is_told = False

    @property
    def line(self) -> str:
        """Of the thinking so far; empty if there is none."""
        if not self._start_s:  # nothing has been written yet
            return ""
        if self._splitter.is_thinking:
            self._measure()
            return f"thinking... {self._figures}"
        return f"thought for {self._figures}" if self._has_thought else ""

    def news(self, *, is_last: bool = False) -> str:
        """The line of the thinking, once, as soon as it has ended; is_last: no more text comes."""
        line = self.line
        if line and is_last and self.is_thinking:
            line = f"thought for {self._figures}, no answer yet"
        if self._is_told or not line or (self.is_thinking and not is_last):
            return ""
        self._is_told = True
        return line

    @property
    def _figures(self) -> str:
        return f"{self._seconds:.0f} s, {self._n_tokens:,} token{'s' * (self._n_tokens != 1)}"

    @property
    def is_thinking(self) -> bool:
        """Whether the newest text is thinking."""
        return self._splitter.is_thinking

    def feed(self, piece: str, *, is_last: bool = False) -> str:
        """The text of the answer in this piece; is_last: and in what waited for more."""
        answer = ""
        for part in self._splitter.feed(piece, is_last=is_last):
            if part.is_thinking:
                self._start_s = self._start_s or time.monotonic()
                self._has_thought |= bool(self._splitter.without_tags(part.text).strip())
                self._measure()
            else:
                answer += part.text
        if self._text_begins and self._start_s:
            answer = answer.lstrip()
        self._text_begins &= not answer
        return answer

    def _measure(self) -> None:
        self._seconds = time.monotonic() - self._start_s
        self._n_tokens = self._read_tokens()
