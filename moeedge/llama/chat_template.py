"""Which chat template writes a prompt: the model's, one of llama.cpp's by name, or a Jinja text."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, Literal

Think = Literal["auto", "on", "off", "low", "medium", "high"]
THINK_WORDS: dict[str, Think] = {
    **{"auto": "auto", "on": "on", "off": "off", "low": "low", "medium": "medium", "high": "high"},
    **{"true": "on", "false": "off"},
}
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"


@dataclass(frozen=True)
class TemplateChoice:
    """A chat template and what it is given beyond the messages.

    source: Jinja, or the name of one of llama.cpp's templates; empty: the model's own, ChatML where it has none.
    arguments: the template's variables, JSON values. think: whether, or how much, a model thinks before it answers;
    the variable that says so is the template's.
    """

    source: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    think: Think = "auto"

    def variables(self, known: Set[str]) -> dict[str, Any]:
        """The variables for a template that uses those in `known`."""
        if self.think == "auto":
            return self.arguments
        if self.think not in ("on", "off"):
            return {_EFFORT: self.think, **self.arguments}
        return dict.fromkeys((name for name in _SWITCHES if name in known), self.think == "on") | self.arguments

    def can_think_so(self, known: Set[str]) -> bool:
        """Whether a template that uses the variables in `known` can do what `think` asks for."""
        wanted = {_EFFORT} if self.think in ("low", "medium", "high") else set(_SWITCHES)
        return self.think == "auto" or bool(wanted & known)


MODEL_TEMPLATE = TemplateChoice()
