"""Which texts begin and end a model's reasoning ("thinking"), as its chat template says.

The template is rendered once with an answer that has reasoning; the text around it are the tags. Templates that leave
earlier reasoning out often name the end tag to cut it off, which is read from their source.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from moeedge.errors import MoeedgeError

if TYPE_CHECKING:
    from moeedge.llama.text import BuiltinFormat, ChatFormat

_THOUGHT, _ANSWER = "moeedge-thought", "moeedge-answer"
_QUESTION = {"role": "user", "content": "moeedge-question"}
_TAG = r"<[^<>\s]+>|\[[A-Z_]+\]"
_LAST_TAG = re.compile(rf"({_TAG})\s*$")
_FIRST_TAG = re.compile(rf"\s*({_TAG})")
_NAMED_TAGS = (  # in templates that cut reasoning off: end tag, and how the start tag differs
    (re.compile(r"</((?:\w+:)?think(?:ing)?|thought|reasoning)>"), "<{}>", "</{}>"),
    (re.compile(r"\[/(THINK)\]"), "[{}]", "[/{}]"),
    (re.compile(r"<\|END_(THINKING)\|>"), "<|START_{}|>", "<|END_{}|>"),
)


class ReasoningTags(NamedTuple):
    """The texts around reasoning in an answer, without white space at their ends."""

    start: str
    end: str


class SplitAnswer(NamedTuple):
    """An answer's reasoning, and the rest of it; white space around the tags belongs to neither."""

    reasoning: str
    content: str


def find_reasoning_tags(template: ChatFormat | BuiltinFormat) -> ReasoningTags | None:
    """The tags of models with that chat template; None where it knows no reasoning."""
    answer = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    try:
        text = template.render([_QUESTION, answer], add_assistant=False)
        before = template.render([_QUESTION])
    except MoeedgeError:
        text = before = ""
    head, found, tail = text.partition(_THOUGHT)
    if found and _ANSWER in tail:
        start = head[_common_length(head, before) :].strip()
        if not (start and before.strip() and head.startswith(before[: len(before.rstrip())])):
            start = _first(_LAST_TAG.search(head))  # the prompt contains the start tag, or ends in another way
        end = tail[: tail.index(_ANSWER)].strip()
        end = end if start.startswith("<|") else _first(_FIRST_TAG.match(tail))
        if start and end:
            return ReasoningTags(start, end)
    for pattern, start, end in _NAMED_TAGS:
        if match := pattern.search(template.source):
            return ReasoningTags(start.format(match[1]), end.format(match[1]))
    return None


def begins_in_reasoning(prompt: str, tags: ReasoningTags | None) -> bool:
    """Whether the answer to this prompt begins with reasoning because the prompt ends with the start tag."""
    return tags is not None and prompt.rstrip().endswith(tags.start)


def split_reasoning(text: str, tags: ReasoningTags | None, *, is_open: bool = False) -> SplitAnswer:
    """The parts of an answer. is_open: it began with reasoning (`begins_in_reasoning`).

    Reasoning that has not ended takes the rest of the text; an end tag without a start also ends it.
    """
    if tags is None:
        return SplitAnswer("", text)
    head, started, rest = text.partition(tags.start)
    if not started or head.strip():  # a tag in the middle of an answer is part of it
        if not is_open and tags.end not in text:
            return SplitAnswer("", text)
        rest = text
    reasoning, _, content = rest.partition(tags.end)
    return SplitAnswer(reasoning.strip(), content.lstrip())


def _common_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _first(match: re.Match[str] | None) -> str:
    return "" if match is None else match[1]
