"""The chat template that writes prompts, and the texts that begin and end a model's reasoning, which it tells."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from moeedge.errors import MoeedgeError
from moeedge.records import figure

if TYPE_CHECKING:
    from moeedge.llama.text import BuiltinFormat, ChatFormat

Think = Literal["auto", "on", "off", "low", "medium", "high"]
THINK_WORDS: dict[str, Think] = {**{word: word for word in get_args(Think)}, "true": "on", "false": "off"}
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"


@dataclass(frozen=True)
class TemplateChoice:
    """A chat template and what it is given beyond the messages; the template's own variable tells a model to think."""

    source: str = figure("Jinja, or the name of one of llama.cpp's templates; empty: the model's own", default="")
    arguments: dict[str, Any] = figure("Variables of the template, JSON values", default_factory=dict)
    think: Think = figure("Whether, or how much, the model is told to think before it answers", default="auto")

    def variables(self, used: Set[str]) -> dict[str, Any]:
        """The variables for a template that uses those in `used`."""
        if self.think == "auto":
            return self.arguments
        if self.think not in ("on", "off"):
            return {_EFFORT: self.think, **self.arguments}
        return dict.fromkeys((name for name in _SWITCHES if name in used), self.think == "on") | self.arguments

    def can_think_so(self, used: Set[str]) -> bool:
        """Whether a template that uses the variables in `used` can do what `think` asks for."""
        wanted = {_EFFORT} if self.think in ("low", "medium", "high") else set(_SWITCHES)
        return self.think == "auto" or bool(wanted & used)


MODEL_TEMPLATE = TemplateChoice()
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
    head, thought, tail = text.partition(_THOUGHT)
    if thought and _ANSWER in tail:
        pairs = enumerate(zip(head, before, strict=False))
        n_common = next((i for i, (written, prompted) in pairs if written != prompted), min(len(head), len(before)))
        start = head[n_common:].strip()
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


def split_reasoning(text: str, tags: ReasoningTags | None) -> SplitAnswer:
    """The parts of an answer. An end tag without a start also ends reasoning."""
    if tags is None:
        return SplitAnswer("", text)
    head, started, rest = text.partition(tags.start)
    if not started or head.strip():  # a tag in the middle of an answer is part of it
        if tags.end not in text:
            return SplitAnswer("", text)
        rest = text
    reasoning, _, content = rest.partition(tags.end)
    return SplitAnswer(reasoning.strip(), content.lstrip())


def n_begun(text: str, tag: str) -> int:
    """The length of the longest beginning of `tag` that `text` ends with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _first(match: re.Match[str] | None) -> str:
    return "" if match is None else match[1]
