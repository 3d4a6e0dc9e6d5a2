"""The commands of the program, loaded, for tests of their options and help."""

from __future__ import annotations

from typing import Any

from moeedge.cli.app import COMMANDS, load_command


def all_commands() -> dict[str, Any]:
    """Every command by its name, those of groups as "trace info"."""
    found: dict[str, Any] = {}
    for name in COMMANDS:
        command = load_command(name)
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {key}": value for key, value in inner.items()}
    return found


def option_names() -> set[str]:
    """The spellings of all options."""
    return {name for command in all_commands().values() for option in command.params for name in option.opts}
