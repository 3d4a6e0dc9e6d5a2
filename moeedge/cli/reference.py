"""The command reference, from the same declarations that --help shows: python -m moeedge.cli.reference > docs/cli.md"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from moeedge.ui.chat.commands import help_rows

_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "FILE"}

_INTRODUCTION = """\
# Commands

Results go to standard output, logs and progress to standard error. Exit codes: 0 done, 1 failure, 2 bad input,
130 stopped by Ctrl-C, 143 by SIGTERM. Options are named as in llama.cpp where it has them.

This file is made from the commands' own declarations: `python -m moeedge.cli.reference > docs/cli.md`.
"""


@dataclass(frozen=True)
class Parameter:
    """One option or argument as --help shows it."""

    names: tuple[str, ...]  # "-m", "--model"; an argument's metavar
    value: str  # what it takes; empty for a switch
    help: str
    default: str  # empty: none worth telling
    panel: str  # heading in --help; empty: the general one


@dataclass(frozen=True)
class Command:
    """One command and its parameters in the order of their declaration."""

    name: str
    help: str
    parameters: tuple[Parameter, ...]


def commands(app: typer.Typer) -> list[Command]:
    """Every command that is mounted on `app`, in that order, then those of its groups ("trace info")."""
    found = []
    for mounted in app.registered_commands:
        function = mounted.callback
        if function is None or mounted.hidden:
            continue
        name = mounted.name or function.__name__.replace("_", "-")
        text = inspect.getdoc(function) or mounted.help or ""  # help is the same, its lines run together
        found.append(Command(name, inspect.cleandoc(text), tuple(_parameters(function))))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            prefix = group.name if isinstance(group.name, str) else group.typer_instance.info.name
            found += [replace(command, name=f"{prefix} {command.name}") for command in commands(group.typer_instance)]
    return found


def markdown(app: typer.Typer) -> str:
    """The whole reference."""
    parts = [_INTRODUCTION]
    for command in commands(app):
        parts.append(f"## moeedge {command.name}\n\n{command.help}\n")
        panels = dict.fromkeys(["", *(parameter.panel for parameter in command.parameters)])  # as in --help
        for panel in panels:
            rows = [parameter for parameter in command.parameters if parameter.panel == panel]
            if not rows:
                continue
            heading = f"**{panel}**\n\n" if panel else ""
            parts.append(heading + "\n".join(_table(rows)) + "\n")
        if command.name == "chat":
            parts.append("**While chatting**\n\n" + "\n".join(_slash_commands()) + "\n")
    return "\n".join(parts)


def _table(rows: list[Parameter]) -> Iterator[str]:
    yield "| option | default | what it does |"
    yield "| --- | --- | --- |"
    for row in rows:
        names = ", ".join(row.names) + (f" {row.value}" if row.value else "")
        default = f"`{row.default}`" if row.default else ""
        yield f"| `{_cell(names)}` | {_cell(default)} | {_cell(row.help)} |"


def _slash_commands() -> Iterator[str]:
    """What /help lists."""
    yield "| command | what it does |"
    yield "| --- | --- |"
    for row in help_rows():
        yield f"| `{_cell(row.label)}` | {_cell(row.value)} |"


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _parameters(function: Callable[..., Any]) -> Iterator[Parameter]:
    """What the function's annotations declare, hidden options left out."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if get_origin(hint) is Union:  # Python 3.10 puts Optional around the annotation of what defaults to None
            hint = get_args(hint)[0]
        kind, *extras = get_args(hint) if get_origin(hint) is not None else (hint,)
        info = next((extra for extra in extras if isinstance(extra, OptionInfo | ArgumentInfo)), None)
        if info is None or info.hidden:
            continue
        first = (info.default,) if isinstance(info.default, str) else ()  # inside Annotated this is a name
        declared: tuple[str, ...] = (*first, *(info.param_decls or ()))
        if isinstance(info, ArgumentInfo):
            names: tuple[str, ...] = (info.metavar or name.upper(),)
            value = ""
        else:
            names = declared or (f"--{name.replace('_', '-')}",)
            value = "" if _bare(kind) is bool else info.metavar or _metavar(kind)
        default = parameter.default if info.show_default else None
        yield Parameter(names, value, info.help or "", _shown(default), info.rich_help_panel or "")


def _bare(kind: Any) -> Any:
    """The type inside Optional and list."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(inner for inner in get_args(kind) if inner is not type(None))
    if get_origin(kind) is list:
        return get_args(kind)[0]
    return kind


def _metavar(kind: Any) -> str:
    kind = _bare(kind)
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(choice.value) for choice in kind)
    return _METAVARS.get(kind, "VALUE")


def _shown(default: Any) -> str:
    """A default as it would be typed; nothing for what is absent or off."""
    if default is inspect.Parameter.empty or default is None or default is False or default == "" or default is ...:
        return ""
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, list | tuple):
        return ",".join(str(item) for item in default)
    return "on" if default is True else str(default)


def main() -> None:
    """Print the reference."""
    from moeedge.cli.app import app

    sys.stdout.write(markdown(app))


if __name__ == "__main__":
    main()
