"""The command reference, from the declarations that --help shows: python -m moeedge.cli.reference > docs/cli.md"""

from __future__ import annotations

import sys

import typer
from typer.cli import get_docs_for_click

from moeedge.cli.app import COMMANDS, load_command
from moeedge.ui.chat.commands import help_rows

_INTRODUCTION = """\
# Commands

Results go to standard output, logs and progress to standard error. Exit codes: 0 done, 1 failure, 2 bad input,
130 stopped by Ctrl-C, 143 by SIGTERM. Options are named as in llama.cpp where it has them.

This file is made from the commands' own declarations: `python -m moeedge.cli.reference > docs/cli.md`.

"""


def markdown() -> str:
    """The complete reference: a section for each command, and the slash commands of the chat."""
    text = _INTRODUCTION
    for name in COMMANDS:
        command = load_command(name)
        context = typer.Context(command, info_name=name)
        text += get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="moeedge", indent=1)
        if name == "chat":
            rows = "".join(f"* `{row.label}`: {row.value}\n" for row in help_rows())
            text += f"**While chatting**:\n\n{rows}\n"
    return text.strip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
