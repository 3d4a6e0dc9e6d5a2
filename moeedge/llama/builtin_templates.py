"""llama.cpp's own chat templates, which have names."""

from __future__ import annotations

import ctypes
from functools import cache

import llama_cpp.llama_cpp as lib

from moeedge.errors import EngineError, InputError


@cache
def builtin_names() -> tuple[str, ...]:
    """The names of all, sorted."""
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
    """One of them, as ChatFormat is for Jinja. It has no variables; its BOS is the tokenizer's."""

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
