"""Which chat template writes a prompt: the model's, one of llama.cpp's by name, or a Jinja text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TemplateChoice:
    """A chat template and what it is given beyond the messages.

    source: Jinja, or the name of one of llama.cpp's templates; empty: the model's own, ChatML where it has none.
    arguments: the template's variables, JSON values.
    """

    source: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


MODEL_TEMPLATE = TemplateChoice()
