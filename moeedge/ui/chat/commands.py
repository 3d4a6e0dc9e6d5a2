"""The slash commands of the chat: each takes the chat and its argument, and returns the lines to show."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from moeedge.engine.autosave import UnfinishedChat, remove
from moeedge.engine.conversation import Conversation, Message
from moeedge.errors import InputError
from moeedge.paths import read_text, user_path
from moeedge.ui.chat import settings as setting_table
from moeedge.ui.chat.greeting import details
from moeedge.ui.chat.prompt import QUOTES
from moeedge.ui.figures import FigureRow, answer_rows, total_rows

if TYPE_CHECKING:
    from moeedge.ui.chat.session import Chat

_FIRST_WORDS = 40  # characters of a chat's first message in a list
_N_LAST = 4  # messages that are shown of a loaded conversation
_MESSAGE_ROWS, _MESSAGE_LENGTH = 4, 300  # shown of each


class Next(Enum):
    """The chat's next step after a command."""

    READ = "read"  # ask for the next message
    ANSWER = "answer"  # answer the open question
    EXIT = "exit"


@dataclass(frozen=True)
class Result:
    """The output of a command, its table first, and the chat's next step."""

    lines: list[str] = field(default_factory=list)
    table: list[FigureRow] = field(default_factory=list)
    next: Next = Next.READ


@dataclass(frozen=True)
class Command:
    """A slash command; `argument` is its argument as /help shows it."""

    name: str
    argument: str
    help: str
    run: Callable[[Chat, str], Result]
    aliases: tuple[str, ...] = ()


def help_rows() -> list[FigureRow]:
    """Every command and key of the chat, with its effect."""
    also = {item.name: f" Also {', '.join(item.aliases)}." for item in COMMANDS if item.aliases}
    return [
        *(FigureRow(f"{item.name} {item.argument}".strip(), item.help + also.get(item.name, "")) for item in COMMANDS),
        FigureRow("Alt-Enter, Ctrl-J", "A new line in a message."),
        FigureRow('"""', 'Begins a message of several lines; """ also ends it.'),
        FigureRow("Ctrl-X Ctrl-E", "Opens the message in $EDITOR, then sends it."),
        FigureRow("Ctrl-C", "Stops an answer, whose text stays; drops a typed line."),
    ]


def _info(chat: Chat, argument: str) -> Result:
    if argument == "system":  # as ollama's /show system and /show parameters
        return _system(chat, "")
    if argument == "parameters":
        return _set(chat, "")
    return Result(table=details(chat.info), lines=list(chat.info.notes))


def _clear(chat: Chat, _argument: str) -> Result:
    chat.conversation.clear()
    chat.attached = ""
    return Result(["Conversation cleared" + ("; the system prompt stays." if chat.conversation.system else ".")])


def _regen(chat: Chat, _argument: str) -> Result:
    chat.replaced = chat.conversation.reopen()
    chat.attempt += 1
    return Result(next=Next.ANSWER)


def _undo(chat: Chat, _argument: str) -> Result:
    return Result([f'Taken back, with its answer: "{first_words([chat.conversation.undo()])}"'])


def _edit(chat: Chat, _argument: str) -> Result:
    messages = chat.conversation.messages
    if not messages:
        raise InputError("There is no message to edit.")
    text = messages[-2].content
    chat.edited = f"{QUOTES}{text}{QUOTES}" if text.startswith("/") or text.lower() in LEAVING else text
    return Result(["Change the message and send it again; an empty one, or Ctrl-C there, leaves it as it was."])


def _model(chat: Chat, argument: str) -> Result:
    if not argument:
        return Result([f"{chat.info.model}. /model NAME or FILE goes on with another; moeedge list shows the names."])
    return Result(chat.use_model(argument))


def _system(chat: Chat, argument: str) -> Result:
    if chat.raw:
        raise InputError("There is no system prompt with --raw.")
    if not argument:
        return Result([chat.conversation.system or "No system prompt."])
    chat.conversation.system = "" if argument in ('""', "''") else argument
    return Result(["System prompt set." if chat.conversation.system else "System prompt removed."])


def _set(chat: Chat, argument: str) -> Result:
    name, value = _ASSIGNMENT.findall(_FROM_OLLAMA.get(argument, argument))[0]
    if name == "parameter":  # as ollama's /set parameter NAME VALUE
        return _set(chat, value)
    if name in _NOT_HERE:
        raise InputError(f"There is no setting {name} here.", _NOT_HERE[name])
    if name == "system":
        return _system(chat, value and (value.strip('"') or '""'))
    if name == "think" and not value:
        value = "on"
    if not name:
        return Result(table=setting_table.listing(chat.settings))
    if not value:
        raise InputError("/set takes a name and a value.", "Choose from: " + ", ".join(setting_table.names()) + ".")
    changed, line = setting_table.change(chat.settings, name, value)
    return Result([line, *chat.apply(changed)])


_ASSIGNMENT = re.compile(r"([^\s=]*)\s*=?\s*(.*)", re.DOTALL)  # NAME VALUE or NAME=VALUE, in which = may come again
# settings of ollama, and what to do instead
_NOT_HERE = {
    "format": "/set grammar FILE.json makes answers follow a JSON schema.",
    **dict.fromkeys(("history", "nohistory"), "Messages that were sent are always kept for the up arrow."),
    **dict.fromkeys(("wordwrap", "nowordwrap"), "Text is always wrapped between words on a terminal."),
}
_FROM_OLLAMA = {"verbose": "stats full", "quiet": "stats off", "nothink": "think off"}


def _stats(chat: Chat, _argument: str) -> Result:
    if not chat.turns:
        return Result(["No answer yet."])
    totals = total_rows(chat.info, chat.turns) if len(chat.turns) > 1 else []
    return Result(table=answer_rows(*chat.turns[-1]) + totals)


def _read(chat: Chat, argument: str) -> Result:
    text = read_text(user_path(argument))
    if not text.strip():
        raise InputError(f"{argument} is empty.")
    chat.attached += text if text.endswith("\n") else text + "\n"
    return Result([f"{len(text)} characters read; they are put before your next message."])


def _save(chat: Chat, argument: str) -> Result:
    """Writes the conversation to a file; asks before one is replaced."""
    path = user_path(argument)
    if path.exists() and not path.is_dir() and not chat.confirm(f"{path} exists. Replace it?"):
        return Result(["Not saved."])
    chat.conversation.save(path, model=chat.info.model)
    return Result([f"{_count(chat.conversation.messages)} saved to {path}."])


def _load(chat: Chat, argument: str) -> Result:
    """Replaces the conversation by that of a file; the lines end with its last messages."""
    path = user_path(argument)
    if path.suffix == ".gguf" or not path.exists():
        raise InputError(f"There is no conversation {path}.", "/model NAME or FILE goes on with another model.")
    loaded = Conversation.load(path)
    lines = [] if loaded.take_back() is None else ["Its last question has no answer and was left out."]
    chat.conversation = loaded
    return Result([f"{_count(loaded.messages)} loaded from {path}.", *lines, *last_messages(loaded.messages)])


def _sessions(chat: Chat, _argument: str) -> Result:
    if not chat.unfinished:
        return Result(["No chat ended unexpectedly. /save FILE keeps this one, /load FILE brings it back."])
    return Result(["/resume N goes on with one."], table=unfinished_rows(chat.unfinished))


def _resume(chat: Chat, argument: str) -> Result:
    if argument == "list":
        return _sessions(chat, "")
    if argument == "drop" and chat.unfinished:
        n_chats = len(chat.unfinished)
        if not chat.confirm(f"Delete {n_chats} unfinished chat{'s' * (n_chats > 1)}?"):
            return Result(["Nothing is deleted."])
        for chat_left in chat.unfinished:
            remove(chat_left)
        chat.unfinished.clear()
        return Result(["The unfinished chats were deleted."])
    if not chat.unfinished:
        hint = "" if argument == "drop" else "Chats that ended unexpectedly are kept; /save keeps others."
        raise InputError("There is no chat to resume.", hint)
    if argument and not (argument.isdecimal() and 1 <= int(argument) <= len(chat.unfinished)):
        raise InputError(f"There is no unfinished chat {argument}.", "/sessions lists them.")
    left = chat.unfinished[int(argument or 1) - 1]  # without a number the newest
    lines = [f"Resumed: {describe(left)}.", *chat.resume(left), *last_messages(chat.conversation.messages)]
    if not chat.conversation.has_question:
        return Result([*lines, "The last answer is complete."])
    goes_on = "The last answer goes on." if chat.begun else "The last message is answered now."
    return Result([*lines, goes_on], next=Next.ANSWER)


def last_messages(messages: Sequence[Message]) -> list[str]:
    """The end of a conversation, long messages shortened."""
    n_before = max(len(messages) - _N_LAST, 0)
    lines = [f"({n_before} earlier messages)"] if n_before else []
    for message in messages[n_before:]:
        text, prefix = message.content.strip(), ">>> " if message.role == "user" else ""
        short = "\n".join(text.split("\n")[:_MESSAGE_ROWS])[:_MESSAGE_LENGTH]
        lines.append(prefix + (short if short == text else f"{short.rstrip()}..."))
    return lines


def first_words(messages: Sequence[Message]) -> str:
    """The beginning of a conversation in one line."""
    words = " ".join(messages[0].content.split()) if messages else ""
    return words if len(words) <= _FIRST_WORDS else f"{words[:_FIRST_WORDS].rstrip()}..."


def unfinished_rows(unfinished: Sequence[UnfinishedChat]) -> list[FigureRow]:
    """Numbers and descriptions of the chats that can be resumed."""
    return [
        FigureRow(str(number), f'"{first_words(left.conversation.messages)}", {describe(left)}')
        for number, left in enumerate(unfinished, 1)
    ]


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


COMMANDS = (
    Command("/help", "", "Shows this list.", lambda _chat, _argument: Result(table=help_rows()), ("/?",)),
    Command(
        "/exit",
        "",
        "Leaves; so do Ctrl-D and bye.",
        lambda _chat, _argument: Result(next=Next.EXIT),
        ("/bye", "/quit", "/q"),
    ),
    Command("/regen", "", "Answers the last message again.", _regen, ("/retry",)),
    Command("/edit", "", "Lets you change the last message, and answers it anew.", _edit),
    Command("/undo", "", "Takes the last message and its answer back.", _undo),
    Command("/clear", "", "Forgets the conversation.", _clear, ("/reset", "/new")),
    Command("/read", "FILE", "Puts a text file before your next message.", _read),
    Command("/system", "[TEXT]", 'Shows or sets the system prompt; "" removes it.', _system),
    Command("/set", "[NAME VALUE]", "Lists or changes settings, as in /set temp 0.5.", _set),
    Command("/model", "[NAME|FILE]", "Goes on with another model.", _model),
    Command("/info", "", "Shows the model, where its experts are, and why.", _info, ("/show",)),
    Command("/stats", "", "Shows all figures of the last answer, and sums.", _stats),
    Command("/save", "FILE", "Saves the conversation as JSON.", _save),
    Command("/load", "FILE", "Loads a saved conversation.", _load),
    Command("/sessions", "", "Lists chats that ended unexpectedly.", _sessions),
    Command("/resume", "[N|drop]", "Goes on with one of these, or deletes all.", _resume),
)
_BY_NAME = {name: item for item in COMMANDS for name in (item.name, *item.aliases)}
LEAVING = ("exit", "quit", "bye")  # without a slash, as a message of its own
# commands of other programs: what to do instead
_ELSEWHERE = {
    ("/image", "/audio", "/video"): "moeedge reads text only; /read FILE puts a text file before your next message.",
    ("/glob",): "/read FILE reads one file; give it several times for several files.",
    ("/shell", "/!"): "moeedge runs no other programs.",
    ("/copy",): "/save FILE writes the conversation to a file.",
    ("/list", "/ls", "/models"): "moeedge list, in a shell, shows the models; /model NAME goes on with another.",
    ("/history",): "The up arrow brings back earlier messages; /save FILE writes the conversation.",
    ("/multiline",): 'Alt-Enter makes a new line; """ begins a message of several lines.',
    ("/think", "/nothink", "/no_think"): (
        "/set think on or off tells the model to; /set show_thinking on or off shows it."
    ),
}


def completions() -> dict[str, list[str]]:
    """All commands and aliases, sorted, with the first words that each takes."""
    words = {"/set": setting_table.names(), "/resume": ["list", "drop"], "/show": ["system", "parameters"]}
    return {name: words.get(name, []) for name in sorted(_BY_NAME)}


def run_command(chat: Chat, line: str) -> Result:
    """Run the command in `line`, which starts with a slash. Raises InputError."""
    word, _, argument = line.strip().partition(" ")
    word, argument = word.lower(), argument.strip()
    if (command := _BY_NAME.get(word)) is not None:
        if command.argument == "FILE" and not argument:
            raise InputError(f"{command.name} takes the name of a file.")
        return command.run(chat, argument)
    for names, sentence in _ELSEWHERE.items():
        if word in names:
            raise InputError(f'There is no command "{word}" here.', sentence)
    similar = difflib.get_close_matches(word, _BY_NAME, n=1)
    hint = f"Did you mean {similar[0]}? " if similar else ""
    raise InputError(f'Unknown command "{word}".', f'{hint}/help lists the commands; """quoted text""" is none.')
