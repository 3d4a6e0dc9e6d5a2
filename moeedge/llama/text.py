"""Text on its way into and out of a model: chat templates, and token bytes decoded to complete characters."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moeedge.errors import EngineError, InputError, MoeedgeError

_OWN = "the model's chat template"
_GIVEN = "the chat template of --chat-template or --chat-template-file"

# for a model without a template, as in llama.cpp
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# what a template's own expressions raise
_REJECTIONS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class _GenerationTag(jinja2.ext.Extension):
    """The tag {% generation %}, which marks the assistant's part for training: a prompt contains only its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class wants an instance-like attribute)

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatFormat:
    """A chat template, rendered in Jinja's sandbox because templates come from model files.

    is_given: by the user and not by the model. Raises EngineError for a template that Jinja cannot parse, InputError
    for a given one.
    """

    def __init__(self, template: str | None, *, bos: str = "", eos: str = "", is_given: bool = False) -> None:
        self.source = template or CHATML
        self.bos = bos
        self.eos = eos
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._is_given = is_given
        try:
            self._template = environment.from_string(self.source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(self.source)))
        except jinja2.TemplateError as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise self._error("Cannot parse {}" + line, error) from error

    def _error(self, what: str, error: Exception) -> MoeedgeError:
        """The error `what`, in which {} is the template's name."""
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        message = f"{what.format(_GIVEN if self._is_given else _OWN)}: {reason}."
        message = message[0].upper() + message[1:]
        if self._is_given:
            return InputError(message, "Correct it, or leave it out for the model's own.")
        return EngineError(message, "Use --raw to prompt it without a template.")

    def render(
        self, messages: list[dict[str, str]], *, add_assistant: bool = True, arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Returns the prompt for `messages` (role and content each); it ends where the assistant's answer begins.

        arguments: further variables of the template. If it rejects the system role, the system message becomes the
        start of the first user message.
        Raises EngineError (a given template: InputError) when the template rejects the conversation.
        """
        try:
            return self._render(messages, add_assistant, arguments or {})
        except _REJECTIONS as error:
            folded = _fold_system(messages)
            if folded != messages:
                try:
                    return self._render(folded, add_assistant, arguments or {})
                except _REJECTIONS:
                    pass  # report the first error
            raise self._error("{} rejects this conversation", error) from error

    def _render(self, messages: list[dict[str, str]], add_assistant: bool, arguments: Mapping[str, Any]) -> str:
        given = {"bos_token": self.bos, "eos_token": self.eos, **arguments}
        return self._template.render({**given, "messages": messages, "add_generation_prompt": add_assistant})


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return messages
    content = f"{messages[0]['content']}\n\n{messages[1]['content']}"
    return [{**messages[1], "content": content}, *messages[2:]]


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class StreamDecoder:
    """Decodes a stream of bytes to complete UTF-8 text; invalid bytes become U+FFFD.

    A token may end inside a character (emoji, CJK): its first bytes are held back until the rest arrives.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """Returns the text that `data` completes; may be empty."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Returns the rest at the end of an answer and resets the decoder."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
