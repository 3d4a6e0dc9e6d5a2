"""The command reference, from the declarations that --help shows: python -m moeedge.cli.reference > docs/cli.md"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.cli import get_docs_for_click

from moeedge.cli.app import COMMANDS, load_command
from moeedge.cli.declare import hidden_spellings
from moeedge.ui.chat.commands import help_rows
from moeedge.ui.tables import markdown as markdown_table
from moeedge.ui.tables import text_column
from moeedge.variables import VARIABLES

_INTRODUCTION = """\
# Commands

Results go to standard output, logs and progress to standard error. Exit codes: 0 done, 1 failure, 2 bad input,
130 stopped by Ctrl-C, 143 by SIGTERM. Options are named as in llama.cpp where it has them.

This file is made from the commands' own declarations: `python -m moeedge.cli.reference > docs/cli.md`.

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
        _tell_all(command)
        context = typer.Context(command, info_name=name)
        text += get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="moeedge", indent=1)
        if name == "chat":
            rows = "".join(f"* `{row.label}`: {row.value}\n" for row in help_rows())
            text += f"**While chatting**:\n\n{rows}\n"
    return f"{text.strip()}\n\n{_variables()}"


def _variables() -> str:
    """The section about environment variables."""
    columns = [
        text_column("variable", lambda variable: f"`{variable.name}`"),
        text_column("effect", "effect"),
        text_column("default", "default"),
        text_column("read for", "reader"),
    ]
    return _VARIABLES_INTRODUCTION + markdown_table(columns, VARIABLES)


def _tell_all(command: Any) -> None:
    """Adds to the help of each option what --help leaves out: further spellings, and variables of the environment."""
    for inner in getattr(command, "commands", {}).values():
        _tell_all(inner)
    if hasattr(command, "commands"):
        return
    hidden = hidden_spellings(command)
    for param in command.params:
        also = [f"`{spelling}`" for spelling, first in hidden.items() if first in param.opts]
        variables = [f"`{name}`" for name in param.envvar or ()]
        param.help = " ".join(
            [
                param.help or "",
                *([f"Also {', '.join(also)}."] if also else []),
                *([f"Environment: {', '.join(variables)}."] if variables else []),
            ]
        ).strip()


if __name__ == "__main__":
    sys.stdout.write(markdown())
