"""Chat templates, rendered by llama.cpp or by Jinja in a process of its own."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import llama_cpp.llama_cpp as lib

from moeedge.errors import EngineError, InputError, MoeedgeError
from moeedge.llama import template_child
from moeedge.llama.template_child import CPU_S, MEMORY_BYTES, MORE_CHARACTERS

_OWN = "the model's chat template"
_GIVEN = "the chat template of --chat-template or --chat-template-file"

# for a model without a template, as in llama.cpp
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class _TemplateError(Exception):
    """An error of a template that is parsed or rendered; `line` of its source, where Jinja names it."""

    def __init__(self, reason: str, line: int | None) -> None:
        super().__init__(reason)
        self.line = line


class _LimitError(Exception):
    """A template takes more than it may."""


class _TemplateProcess:
    """The process that renders all templates, started by the first and again after one that went beyond the limits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked process: the other process keeps its child, whose pipes carry one conversation."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0  # never awaited here
            self._process = None

    def ask(self, source: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer of `template_child` about a template. Raises _TemplateError, _LimitError, EngineError."""
        request = {"source": source} if variables is None else {"source": source, "given": variables}
        with self._lock:
            reply = self._exchange(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(reply) if reply else {}
        if not answer:
            raise _LimitError
        if "error" in answer:
            raise _TemplateError(answer["error"], answer["line"])
        return answer

    def _exchange(self, request: bytes) -> bytes:
        """The process's line for this one; empty where it ended instead."""
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        self._process = self._process or _started()
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        reply = b""
        try:
            with suppress(BrokenPipeError):
                pipe_in.write(request)
                pipe_in.flush()
                reply = pipe_out.readline()
        finally:
            if not reply.endswith(b"\n"):  # it ended, or Ctrl-C came before its answer
                self._stop()
        return reply if reply.endswith(b"\n") else b""

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-IS", template_child.__file__, *map(os.path.abspath, sys.path)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:  # in a session of its own: Ctrl-C is for us
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
    except OSError as error:
        raise EngineError(f"Cannot start a process for chat templates: {error.strerror or error}.") from None


_process = _TemplateProcess()


@cache
def builtin_names() -> tuple[str, ...]:
    """The names of llama.cpp's own chat templates, sorted."""
    n = lib.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * n)()
    lib.llama_chat_builtin_templates(names, n)
    return tuple(sorted(name.decode() for name in names if name))


def check_source(source: str) -> None:
    """Raises InputError for a text that is neither a name nor Jinja."""
    if source and source not in builtin_names() and "{{" not in source and "{%" not in source:
        raise InputError(
            f"Unknown chat template {source[:40]!r}.", f"Choose from: {', '.join(builtin_names())}; or give Jinja text."
        )


class BuiltinFormat:
    """One of llama.cpp's own templates, as ChatFormat is for Jinja. It has no variables; its BOS is the tokenizer's."""

    bos = ""
    variables: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.source = name

    def render(self, messages: list[dict[str, str]], *, add_assistant: bool = True, arguments: object = None) -> str:
        """Returns the prompt for `messages`. Raises EngineError where llama.cpp cannot write it."""
        chat = (lib.llama_chat_message * len(messages))()
        for place, message in zip(chat, messages, strict=True):
            place.role, place.content = message["role"].encode(), message["content"].encode()
        name, size = self.source.encode(), 0
        while True:
            buffer = ctypes.create_string_buffer(size + 1)
            n = lib.llama_chat_apply_template(name, chat, len(messages), add_assistant, buffer, size)
            if n < 0:
                raise EngineError(f"llama.cpp cannot write this conversation with its chat template {self.source}.")
            if n <= size:
                return buffer.raw[:n].decode("utf-8", "replace")
            size = n


class ChatFormat:
    """A chat template, rendered with limits and in Jinja's sandbox because templates come from model files.

    is_given: by the user. Raises EngineError (given: InputError) where it cannot be parsed, InputError beyond limits.
    """

    def __init__(self, template: str | None, *, bos: str = "", eos: str = "", is_given: bool = False) -> None:
        self.source = template or CHATML
        self.bos = bos
        self.eos = eos
        self._is_given = is_given
        self._name = _GIVEN if is_given else _OWN
        try:
            self.variables = frozenset(_process.ask(self.source)["variables"])
        except _TemplateError as error:
            line = f", line {error.line}" if error.line else ""
            raise self._error("Cannot parse {}" + line, error) from None
        except _LimitError:
            raise self._limit_error() from None

    def _error(self, what: str, error: _TemplateError) -> MoeedgeError:
        """The error `what`, in which {} is the template's name."""
        reason = next(iter(str(error).splitlines()), "").rstrip(".")
        message = f"{what.format(self._name)}: {reason}."
        message = message[0].upper() + message[1:]
        if self._is_given:
            return InputError(message, "Correct it, or leave it out for the model's own.")
        return EngineError(message, "Use --raw to prompt it without a template.")

    def _limit_error(self) -> InputError:
        return InputError(
            f"{self._name.capitalize()} takes more than {CPU_S:g} s, {MEMORY_BYTES / 2**30:g} GiB of memory or "
            f"{MORE_CHARACTERS / 1e6:g} million characters: it may never end.",
            "Correct it, or leave it out for the model's own."
            if self._is_given
            else "Use --raw to prompt without a template, or --chat-template NAME for one of llama.cpp's.",
        )

    def render(
        self, messages: list[dict[str, str]], *, add_assistant: bool = True, arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Returns the prompt for `messages` (role and content each); it ends where the assistant's answer begins.

        arguments: further variables of the template, JSON values. If it rejects the system role, the system message
        becomes the start of the first user message. Raises EngineError (a given template: InputError) when the template
        rejects the conversation, InputError when it takes more than a prompt may take.
        """
        try:
            return self._render(messages, add_assistant, arguments or {})
        except _TemplateError as error:
            if [message["role"] for message in messages[:2]] == ["system", "user"]:
                content = f"{messages[0]['content']}\n\n{messages[1]['content']}"
                with suppress(_TemplateError):  # report the first error
                    folded = [{**messages[1], "content": content}, *messages[2:]]
                    return self._render(folded, add_assistant, arguments or {})
            raise self._error("{} rejects this conversation", error) from None

    def _render(self, messages: list[dict[str, str]], add_assistant: bool, arguments: Mapping[str, Any]) -> str:
        variables = {"bos_token": self.bos, "eos_token": self.eos, **arguments}
        variables |= {"messages": messages, "add_generation_prompt": add_assistant}
        try:
            return str(_process.ask(self.source, variables)["text"])
        except _LimitError:
            raise self._limit_error() from None
