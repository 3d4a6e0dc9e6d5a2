"""Kept conversations in the chat: files of /save and /load, and chats that ended unexpectedly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moeedge.engine.autosave import UnfinishedChat, remove
from moeedge.engine.conversation import Conversation, Message
from moeedge.errors import InputError
from moeedge.ui.figures import Figure

if TYPE_CHECKING:
    from moeedge.ui.chat.state import Chat

_FIRST_WORDS = 40  # characters of a chat's first message in a list
_N_LAST = 4  # messages that are shown of a loaded conversation
_MESSAGE_ROWS, _MESSAGE_LENGTH = 4, 300  # shown of each


def save(chat: Chat, path: Path) -> list[str]:
    """Writes the conversation to a file; asks before one is replaced."""
    if path.exists() and not path.is_dir() and not chat.confirm(f"{path} exists. Replace it?"):
        return ["Not saved."]
    chat.conversation.save(path, model=chat.info.model)
    return [f"{_count(chat.conversation.messages)} saved to {path}."]


def load(chat: Chat, path: Path) -> list[str]:
    """Replaces the conversation by that of a file; the lines end with its last messages."""
    if path.suffix == ".gguf" or not path.exists():
        raise InputError(f"There is no conversation {path}.", "/model NAME or FILE goes on with another model.")
    loaded = Conversation.load(path)
    lines = [] if loaded.take_back() is None else ["Its last question has no answer and was left out."]
    chat.conversation.system = loaded.system
    chat.conversation.messages = loaded.messages
    chat.conversation.budgets = loaded.budgets
    return [f"{_count(loaded.messages)} loaded from {path}.", *lines, *last_messages(loaded.messages)]


def last_messages(messages: Sequence[Message]) -> list[str]:
    """The end of a conversation, long messages shortened."""
    n_before = max(len(messages) - _N_LAST, 0)
    lines = [f"({n_before} earlier messages)"] if n_before else []
    for message in messages[n_before:]:
        prefix = ">>> " if message.role == "user" else ""
        lines.append(prefix + shortened(message.content.strip()))
    return lines


def shortened(text: str) -> str:
    """The first rows of a text, and an ellipsis where there is more."""
    rows = text.split("\n")
    kept = "\n".join(rows[:_MESSAGE_ROWS])[:_MESSAGE_LENGTH]
    return kept if kept == text else f"{kept.rstrip()}..."


def first_words(messages: Sequence[Message]) -> str:
    """The beginning of a conversation in one line."""
    words = " ".join(messages[0].content.split()) if messages else ""
    return words if len(words) <= _FIRST_WORDS else f"{words[:_FIRST_WORDS].rstrip()}..."


def unfinished_rows(unfinished: Sequence[UnfinishedChat]) -> list[Figure]:
    """Numbers and descriptions of the chats that can be resumed."""
    return [
        Figure(str(number), f'"{first_words(left.conversation.messages)}", {describe(left)}')
        for number, left in enumerate(unfinished, 1)
    ]


def choose(unfinished: Sequence[UnfinishedChat], argument: str) -> UnfinishedChat:
    """The chat that `argument` names, a number from 1 on; empty: the newest. Raises InputError."""
    if not unfinished:
        raise InputError("There is no chat to resume.", "Chats that ended unexpectedly are kept; /save keeps others.")
    if argument and not (argument.isdecimal() and 1 <= int(argument) <= len(unfinished)):
        raise InputError(f"There is no unfinished chat {argument}.", "/sessions lists them.")
    return unfinished[int(argument or 1) - 1]


def drop(chat: Chat) -> list[str]:
    """Deletes the chats that could be resumed, after a question."""
    if not chat.unfinished:
        raise InputError("There is no chat to resume.")
    n_chats = len(chat.unfinished)
    if not chat.confirm(f"Delete {n_chats} unfinished chat{'s' * (n_chats > 1)}?"):
        return ["Nothing is deleted."]
    for left in chat.unfinished:
        remove(left)
    chat.unfinished.clear()
    return ["The unfinished chats were deleted."]


def describe(chat: UnfinishedChat) -> str:
    """Length, model and end of a chat in a few words."""
    at = time.localtime(chat.ended_s)
    day = "" if at[:3] == time.localtime()[:3] else time.strftime("%Y-%m-%d ", at)
    count = _count(chat.conversation.messages)
    return f"{count} with {chat.origin.model}, ended at {day}{time.strftime('%H:%M', at)}"


def offer(unfinished: Sequence[UnfinishedChat]) -> str:
    """The line at the start of a chat about earlier ones that ended unexpectedly; at least one."""
    more = f" /sessions lists all {len(unfinished)}." if len(unfinished) > 1 else ""
    return f"A chat ended unexpectedly: {describe(unfinished[0])}. /resume goes on with it.{more}"


def _count(messages: Sequence[Message]) -> str:
    return f"{len(messages)} message{'s' * (len(messages) != 1)}"
