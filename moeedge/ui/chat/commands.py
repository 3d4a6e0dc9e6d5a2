"""The slash commands of the chat. Each takes the chat and its argument and returns what to show.

An InputError in a command becomes one sentence on the screen; the chat goes on.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from moeedge.engine.conversation import read_text
from moeedge.errors import InputError
from moeedge.paths import user_path
from moeedge.ui.chat import greeting, sessions
from moeedge.ui.chat import settings as setting_table
from moeedge.ui.chat.answer_figures import answer_rows, total_rows
from moeedge.ui.chat.state import Chat
from moeedge.ui.figures import Figure, budget


class Next(Enum):
    """The chat's next step after a command."""

    READ = "read"  # ask for the next message
    ANSWER = "answer"  # answer the open question
    EXIT = "exit"


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
    table.append(Figure("Alt-Enter, Ctrl-J", "A new line in a message."))
    table.append(Figure('"""', 'Begins a message of several lines; """ also ends it.'))
    table.append(Figure("Ctrl-X Ctrl-E", "Opens the message in $EDITOR, then sends it."))
    table.append(Figure("Ctrl-C", "Stops an answer, whose text stays; drops a typed line."))
    return table


def _help(_chat: Chat, _argument: str) -> Result:
    return Result(table=help_rows())


def _also(command: Command) -> str:
    return f" Also {', '.join(command.aliases)}." if command.aliases else ""


def _exit(_chat: Chat, _argument: str) -> Result:
    return Result(next=Next.EXIT)


def _info(chat: Chat, argument: str) -> Result:
    if argument == "system":  # as ollama's /show system and /show parameters
        return _system(chat, "")
    if argument == "parameters":
        return _set(chat, "")
    return Result(table=greeting.details(chat.info), lines=list(chat.info.notes))


def _clear(chat: Chat, _argument: str) -> Result:
    chat.conversation.clear()
    chat.attached = ""
    return Result(["Conversation cleared" + ("; the system prompt stays." if chat.conversation.system else ".")])


def _regen(chat: Chat, _argument: str) -> Result:
    chat.reopen()
    return Result(next=Next.ANSWER)


def _undo(chat: Chat, _argument: str) -> Result:
    question = chat.conversation.undo()
    return Result([f'Taken back, with its answer: "{sessions.first_words([question])}"'])


def _edit(chat: Chat, _argument: str) -> Result:
    messages = chat.conversation.messages
    if not messages:
        raise InputError("There is no message to edit.")
    chat.edit(messages[-2].content)
    return Result(["Change the message and send it again; Ctrl-C leaves it as it was."])


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
    name, blank, value = argument.partition(" ")
    name, equals, begun = name.partition("=")  # NAME=VALUE; an = within the value is part of it
    value = f"{begun}{blank}{value}" if equals else value.lstrip().removeprefix("=")
    name, value = _FROM_OLLAMA.get(name, name), value.strip()
    if name == "parameter":  # as ollama's /set parameter NAME VALUE
        return _set(chat, value)
    if name in _NOT_HERE:
        raise InputError(f"There is no setting {name} here.", _NOT_HERE[name])
    if name == "system":
        return _system(chat, value and (value.strip('"') or '""'))
    if name == "think" and not value:
        value = "on"
    if " " in name and not value:
        name, value = name.split()
    if not name:
        return Result(table=setting_table.listing(chat.settings))
    if not value:
        raise InputError("/set takes a name and a value.", "Choose from: " + ", ".join(setting_table.names()) + ".")
    changed, line = setting_table.change(chat.settings, name, value)
    return Result([line, *chat.apply(changed)])


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
    return Result([f"{len(text)} characters read; they are put before your next message."])


def _save(chat: Chat, argument: str) -> Result:
    return Result(sessions.save(chat, _path(argument, "/save")))


def _load(chat: Chat, argument: str) -> Result:
    return Result(sessions.load(chat, _path(argument, "/load")))


def _sessions(chat: Chat, _argument: str) -> Result:
    if not chat.unfinished:
        return Result(["No chat ended unexpectedly. /save FILE keeps this one, /load FILE brings it back."])
    return Result(["/resume N goes on with one."], table=sessions.unfinished_rows(chat.unfinished))


def _resume(chat: Chat, argument: str) -> Result:
    if argument == "list":
        return _sessions(chat, "")
    if argument == "drop":
        return Result(sessions.drop(chat))
    left = sessions.choose(chat.unfinished, argument)
    lines = [f"Resumed: {sessions.describe(left)}.", *chat.resume(left)]
    return Result(lines, next=Next.ANSWER if chat.conversation.has_question else Next.READ)


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InputError(f"{command} takes the name of a file.")
    return user_path(argument)


COMMANDS = (
    Command("/help", "", "Shows this list.", _help, ("/?",)),
    Command("/exit", "", "Leaves; so do Ctrl-D and bye.", _exit, ("/bye", "/quit", "/q")),
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
    (
        "/think",
        "/nothink",
        "/no_think",
    ): "/set think on or off tells the model to; /set show_thinking on or off shows it.",
}


def completions() -> dict[str, list[str]]:
    """All commands and aliases, sorted, with the first words that each takes."""
    words = {"/set": setting_table.names(), "/resume": ["list", "drop"], "/show": ["system", "parameters"]}
    return {name: words.get(name, []) for name in sorted(n for item in COMMANDS for n in (item.name, *item.aliases))}


def run_command(chat: Chat, line: str) -> Result:
    """Run the command in `line`, which starts with a slash. Raises InputError."""
    word, _, argument = line.strip().partition(" ")
    word = word.lower()
    for command in COMMANDS:
        if word == command.name or word in command.aliases:
            return command.run(chat, argument.strip())
    for names, sentence in _ELSEWHERE.items():
        if word in names:
            raise InputError(f'There is no command "{word}" here.', sentence)
    similar = difflib.get_close_matches(word, list(completions()), n=1)
    hint = f"Did you mean {similar[0]}? " if similar else ""
    raise InputError(f'Unknown command "{word}".', f"{hint}/help lists the commands.")
