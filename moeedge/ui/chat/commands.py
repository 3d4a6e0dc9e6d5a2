"""The slash commands of the chat. Each takes the chat and its argument and returns what to show.

An InputError in a command becomes one sentence on the screen; the chat goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moeedge.engine.autosave import UnfinishedChat, remove
from moeedge.engine.conversation import Conversation, read_text
from moeedge.errors import InputError
from moeedge.ui.chat import greeting
from moeedge.ui.chat import settings as setting_table
from moeedge.ui.chat.answer_figures import answer_rows, total_rows
from moeedge.ui.figures import Figure, budget

if TYPE_CHECKING:
    from moeedge.engine.types import EngineInfo, GenerationStats, StopReason
    from moeedge.scheduler.stats import PlacementStats
    from moeedge.ui.chat.settings import Settings


class Next(Enum):
    """The chat's next step after a command."""

    READ = "read"  # ask for the next message
    ANSWER = "answer"  # answer the open question
    EXIT = "exit"


@dataclass
class Turn:
    """The figures of one finished answer."""

    stats: GenerationStats
    stop_reason: StopReason | None
    info: EngineInfo  # as it was then
    cache: PlacementStats | None = None  # while the answer was decoded


class Chat(Protocol):
    """The part of the chat that commands read and change."""

    conversation: Conversation
    settings: Settings
    attached: str  # text of /read, put before the next message
    raw: bool
    turns: list[Turn]
    unfinished: list[UnfinishedChat]  # that /resume can take over, the newest first

    @property
    def info(self) -> EngineInfo: ...

    def apply(self, settings: Settings) -> list[str]:
        """Apply changed settings, also to the engine. Returns what the user should know about them."""

    def reopen(self) -> None:
        """Take the last answer back, so that its question is answered anew."""

    def resume(self, chat: UnfinishedChat) -> list[str]:
        """Take over a chat that ended unexpectedly. Returns how it goes on; an open question is answered next."""


@dataclass(frozen=True)
class Result:
    """The output of a command, its table first, and the chat's next step."""

    lines: list[str] = field(default_factory=list)
    table: list[Figure] = field(default_factory=list)
    next: Next = Next.READ


@dataclass(frozen=True)
class Command:
    """A slash command; `argument` is its argument as /help shows it."""

    name: str
    argument: str
    help: str
    run: Callable[[Chat, str], Result]
    aliases: tuple[str, ...] = ()


def help_rows() -> list[Figure]:
    """Every command and key of the chat, with its effect."""
    table = [
        Figure(f"{command.name} {command.argument}".strip(), command.help + _also(command)) for command in COMMANDS
    ]
    table.append(Figure('"""', 'Begins a message of several lines; another """ at the end of a line ends it.'))
    table.append(Figure("Ctrl-C", "Stops an answer and keeps its text; drops a line being typed."))
    return table


def _help(_chat: Chat, _argument: str) -> Result:
    return Result(table=help_rows())


def _also(command: Command) -> str:
    return f" Also {', '.join(command.aliases)}." if command.aliases else ""


def _exit(_chat: Chat, _argument: str) -> Result:
    return Result(next=Next.EXIT)


def _info(chat: Chat, _argument: str) -> Result:
    return Result(table=greeting.details(chat.info), lines=list(chat.info.notes))


def _clear(chat: Chat, _argument: str) -> Result:
    chat.conversation.clear()
    chat.attached = ""
    return Result(["Conversation cleared" + ("; the system prompt stays." if chat.conversation.system else ".")])


def _regen(chat: Chat, _argument: str) -> Result:
    chat.reopen()
    return Result(next=Next.ANSWER)


def _system(chat: Chat, argument: str) -> Result:
    if chat.raw:
        raise InputError("There is no system prompt with --raw.")
    if not argument:
        return Result([chat.conversation.system or "No system prompt."])
    chat.conversation.system = "" if argument in ('""', "''") else argument
    return Result(["System prompt set." if chat.conversation.system else "System prompt removed."])


def _set(chat: Chat, argument: str) -> Result:
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    if not name:
        return Result(table=setting_table.listing(chat.settings))
    if not value.strip():
        raise InputError("/set takes a name and a value.", "Choose from: " + ", ".join(setting_table.names()) + ".")
    changed, line = setting_table.change(chat.settings, name, value.strip())
    return Result([line, *chat.apply(changed)])


def _stats(chat: Chat, _argument: str) -> Result:
    if not chat.turns:
        return Result(["No answer yet."])
    last = chat.turns[-1]
    table = answer_rows(last.info, last.stats, last.stop_reason, last.cache)
    if len(chat.turns) > 1:
        table += total_rows(
            chat.info,
            [turn.stats for turn in chat.turns],
            [turn.cache for turn in chat.turns if turn.cache is not None],
            _budgets(chat),
        )
    return Result(table=table)


def _budgets(chat: Chat) -> list[str]:
    """The expert budgets under which answers were given, each once."""
    return list(dict.fromkeys(label for turn in chat.turns if (label := budget(turn.info))))


def _read(chat: Chat, argument: str) -> Result:
    text = read_text(_path(argument, "/read"))
    if not text.strip():
        raise InputError(f"{argument} is empty.")
    chat.attached += text if text.endswith("\n") else text + "\n"
    return Result([f"{len(text)} characters read; they go before your next message."])


def _save(chat: Chat, argument: str) -> Result:
    path = _path(argument, "/save")
    chat.conversation.save(path, model=chat.info.model)
    return Result([f"{len(chat.conversation.messages)} messages saved to {path}."])


def _load(chat: Chat, argument: str) -> Result:
    path = _path(argument, "/load")
    loaded = Conversation.load(path)
    lines = [] if loaded.take_back() is None else ["Its last question has no answer and was left out."]
    chat.conversation.system = loaded.system
    chat.conversation.messages = loaded.messages
    chat.conversation.budgets = loaded.budgets
    return Result([f"{len(loaded.messages)} messages loaded from {path}.", *lines])


def _resume(chat: Chat, argument: str) -> Result:
    if not chat.unfinished:
        raise InputError("There is no chat to resume.")
    if argument == "list":
        return Result(table=[Figure(str(i), describe(left)) for i, left in enumerate(chat.unfinished, 1)])
    if argument == "drop":
        for left in chat.unfinished:
            remove(left)
        chat.unfinished.clear()
        return Result(["Unfinished chats are deleted."])
    if argument and not (argument.isdecimal() and 1 <= int(argument) <= len(chat.unfinished)):
        raise InputError(f"There is no unfinished chat {argument}.", "/resume list shows them.")
    left = chat.unfinished[int(argument or 1) - 1]
    lines = [f"Resumed: {describe(left)}.", *chat.resume(left)]
    return Result(lines, next=Next.ANSWER if chat.conversation.has_question else Next.READ)


def describe(chat: UnfinishedChat) -> str:
    """Length, model and end of a chat in a few words."""
    n = len(chat.conversation.messages)
    at = time.localtime(chat.ended_s)
    day = "" if at[:3] == time.localtime()[:3] else time.strftime("%Y-%m-%d ", at)
    return f"{n} message{'s' * (n != 1)} with {chat.origin.model}, ended at {day}{time.strftime('%H:%M', at)}"


def offer(unfinished: Sequence[UnfinishedChat]) -> str:
    """The line at the start of a chat about earlier ones that ended unexpectedly; at least one."""
    more = f" There are {len(unfinished)}: /resume list." if len(unfinished) > 1 else ""
    return (
        f"A chat ended unexpectedly: {describe(unfinished[0])}. /resume goes on with it, /resume drop deletes it.{more}"
    )


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InputError(f"{command} takes the name of a file.")
    return Path(argument).expanduser()


COMMANDS = (
    Command("/help", "", "Shows this list.", _help, ("/?",)),
    Command("/exit", "", "Leaves; so does Ctrl-D.", _exit, ("/bye", "/quit")),
    Command("/info", "", "Shows the model, the draft, the expert cache and how they were set up.", _info),
    Command("/clear", "", "Forgets the conversation.", _clear),
    Command("/regen", "", "Answers the last message again.", _regen),
    Command("/system", "[TEXT]", 'Shows or sets the system prompt; "" removes it.', _system),
    Command("/set", "[NAME VALUE]", "Lists or changes settings: /set temp 0.5, /set gamma auto, /set budget 16.", _set),
    Command("/stats", "", "Shows the figures of the last answer and of all.", _stats),
    Command("/read", "FILE", "Puts a text file before your next message.", _read),
    Command("/save", "FILE", "Saves the conversation as JSON.", _save),
    Command("/load", "FILE", "Loads a saved conversation.", _load),
    Command("/resume", "[N|list|drop]", "Goes on with a chat that ended unexpectedly.", _resume),
)


def completions() -> dict[str, list[str]]:
    """All commands and aliases, sorted, with the first words that each takes."""
    words = {"/set": setting_table.names(), "/resume": ["list", "drop"]}
    return {name: words.get(name, []) for name in sorted(n for item in COMMANDS for n in (item.name, *item.aliases))}


def run_command(chat: Chat, line: str) -> Result:
    """Run the command in `line`, which starts with a slash. Raises InputError."""
    word, _, argument = line.strip().partition(" ")
    for command in COMMANDS:
        if word == command.name or word in command.aliases:
            return command.run(chat, argument.strip())
    raise InputError(f'Unknown command "{word}".', "/help lists the commands.")
