"""What holds for the next answers of a session: chat template and grammar, checked with the model."""

from __future__ import annotations

from dataclasses import replace

from moeedge.engine.session import Session
from moeedge.engine.types import SamplingConfig
from moeedge.llama.chat_template import TemplateChoice
from moeedge.llama.samplers import Grammar


def prepare_answers(
    session: Session, sampling: SamplingConfig, template: TemplateChoice, *, raw: bool = False
) -> list[str]:
    """Sets the chat template of the next prompts; with a grammar a model that can leave out thinking does so.

    Returns sentences about what has no effect or follows. Raises InputError for what the template cannot do, and for a
    grammar that the model's vocabulary does not allow.
    """
    notes = [] if raw else session.model.check_template(template)
    if sampling.grammar:
        Grammar.parse(sampling.grammar, session.model.vocab)
        unthinking = replace(template, think="off")
        known = frozenset() if raw else session.model.chat_format(template.source).variables
        if template.think == "auto" and unthinking.can_think_so(known):
            template = unthinking
            notes.append("The grammar holds from the first token on, so the model does not think before it answers.")
    session.template = template
    return notes
