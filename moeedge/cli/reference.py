"""The command reference, from the declarations of --help: python -m moeedge.cli.reference > docs/cli.md"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.cli import get_docs_for_click

from moeedge.cli.app import COMMANDS, LazyGroup, load_command
from moeedge.cli.declare import hidden_spellings
from moeedge.cli.foreign import COMMAND_NAMES, OPTIONS, ForeignOption
from moeedge.cli.foreign import COMMANDS as FOREIGN_COMMANDS
from moeedge.cli.spelling import HUB_FILE, off_variable
from moeedge.health.doctor import VARIABLES
from moeedge.ui.chat.commands import help_rows
from moeedge.ui.tables import markdown as markdown_table
from moeedge.ui.tables import text_column

_INTRODUCTION = """\
# Commands

Results go to standard output, logs and progress to standard error. Exit codes: 0 done, 1 failure, 2 bad input,
130 stopped by Ctrl-C, 143 by SIGTERM. Options are named as in llama.cpp where it has them.

`moeedge --install-completion` lets bash, zsh or fish complete commands, options and values (models, policies, prompt
sets, machines, devices); `moeedge --show-completion` prints what it installs.

This page is made from the commands' own declarations: `python -m moeedge.cli.reference`.

"""

_OTHERS_INTRODUCTION = """\
# Coming from llama.cpp or ollama

What you know works: options have llama.cpp's names, older and newer ones, and ollama's run, ls, ps, show, pull and rm
are here. `moeedge chat` stands for llama-cli, `moeedge bench` for llama-bench. An option that moeedge does not have
ends with a sentence that names what to write; where answers do not depend on it, a line says that it has no effect,
and the command goes on. `moeedge COMMAND --help-all` has all options. moeedge is no server: programs
ask it with `moeedge chat -p TEXT -o json`, and ollama's variables (OLLAMA_HOST, OLLAMA_MODELS) have no meaning for it.
Models are in the cache of the Hugging Face hub, which llama.cpp uses as well. Options and commands that are not the
same here:

"""
_LLAMA_VARIABLES_INTRODUCTION = """\
**Environment variables of llama.cpp's options** set what the command line leaves open, in commands that run or plan a
model; a line on standard error says so. Switches take on, enabled, true or 1, and off, disabled, false or 0;
LLAMA_ARG_NO_MMAP and LLAMA_ARG_NO_CONTEXT_SHIFT, with any value, switch off. LLAMA_ARG_HF_FILE names the file of the
repository in LLAMA_ARG_HF_REPO or -hf.

"""

_VARIABLES_INTRODUCTION = """\
# Environment variables

An option on the command line wins over a variable. `moeedge doctor` shows those that are set and act here.

"""


def markdown() -> str:
    """The complete reference: a section for each command, and the slash commands of the chat."""
    text = _INTRODUCTION
    for name in COMMANDS:
        command = load_command(name)
        if isinstance(command, LazyGroup):
            text += f"# `{name}`\n\n{COMMANDS[name]}\n\n"
            continue
        for each in (command, *getattr(command, "commands", {}).values()):
            _complete_help(each)
        context = typer.Context(command, info_name=name)
        text += get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="moeedge", indent=1)
        if name == "chat":
            rows = "".join(f"* `{row.label}`: {row.value}\n" for row in help_rows())
            text += f"**While chatting**:\n\n{rows}\n"
    return f"{text.strip()}\n\n{_others()}\n{_variables()}"


def _others() -> str:
    """The section for users of other programs, and the environment variables of llama.cpp's options."""
    words = [(name, f"`{command}`") for name, command in COMMAND_NAMES.items()]
    words += [(name, _meaning(row)) for name, row in [*OPTIONS.items(), *FOREIGN_COMMANDS.items()]]
    columns = [
        text_column("you type", lambda row: ", ".join(f"`{name}`" for name in row[0].split(", "))),
        text_column("here", lambda row: row[1].replace("|", "/")),
    ]
    text = f"{_OTHERS_INTRODUCTION}{markdown_table(columns, words)}\n"
    rows = llama_variables()
    table = [
        text_column("variable", lambda row: f"`{row[0]}`"),
        text_column("option", lambda row: f"`{row[1]}`"),
        text_column("commands", lambda row: ", ".join(row[2])),
    ]
    return text + _LLAMA_VARIABLES_INTRODUCTION + markdown_table(table, [rows[name] for name in sorted(rows)])


def _meaning(row: ForeignOption) -> str:
    if row.kind == "means":
        by_value = [f"{value}: `{words}`" for value, words in row.by_value.items() if value and words]
        return f"`{row.text.format('VALUE')}`" if row.text else ", ".join(by_value)
    if row.kind == "always":
        return f"taken: {row.text}"
    return f"no effect, which a line says: {row.text}" if row.kind == "ignored" else f"{row.text} {row.hint}"


def llama_variables() -> dict[str, tuple[str, str, list[str]]]:
    """The environment variables of llama.cpp's options that act here, by name: name, option, commands."""
    rows: dict[str, tuple[str, str, list[str]]] = {}
    for name in ("chat", "bench", "profile", "plan"):
        for param in load_command(name).params:
            for variable in param.envvar or ():
                rows.setdefault(variable, (variable, param.opts[0], []))[2].append(name)
                if param.secondary_opts:
                    off = off_variable(variable)
                    rows.setdefault(off, (off, param.secondary_opts[0], []))[2].append(name)
    rows[HUB_FILE] = (HUB_FILE, "-hff", list(rows["LLAMA_ARG_HF_REPO"][2]))
    for spellings, row in OPTIONS.items():
        if row.variable:
            option = row.text.split()[0] if row.text else spellings.split(",")[0]
            rows[row.variable] = (row.variable, option, ["chat", "bench", "profile", "plan"])
    return rows


def _variables() -> str:
    columns = [
        text_column("variable", lambda variable: f"`{variable.name}`"),
        text_column("effect", "effect"),
        text_column("default", "default"),
        text_column("read for", "reader"),
    ]
    return _VARIABLES_INTRODUCTION + markdown_table(columns, VARIABLES)


def _complete_help(command: Any) -> None:
    """Adds to the help of each option its further spellings and environment variables, which --help leaves out."""
    if hasattr(command, "commands"):
        return
    hidden = hidden_spellings(command)
    for param in command.params:
        also = ", ".join(f"`{spelling}`" for spelling, first in hidden.items() if first in param.opts)
        variables = ", ".join(f"`{name}`" for name in param.envvar or ())
        parts = [param.help or "", also and f"Also {also}.", variables and f"Environment: {variables}."]
        param.help = " ".join(filter(None, parts))


if __name__ == "__main__":
    sys.stdout.write(markdown())
