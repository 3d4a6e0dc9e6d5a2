"""The program as a user calls it, and its commands loaded for tests of their options and help."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from moeedge.cli.app import COMMANDS, LazyGroup, app, load_command

# what stops a command, and its exit code then
SIGNALS = [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]


def run(*arguments: object, piped: str = "") -> Result:
    """The result of `moeedge ARGUMENTS` with `piped` on standard input, which is no terminal."""
    return CliRunner().invoke(app, [*map(str, arguments)], input=piped)


def run_json(*arguments: object, piped: str = "") -> Any:
    """The JSON of `moeedge ARGUMENTS -o json`, which must be alone on standard output."""
    result = run(*arguments, "-o", "json", piped=piped)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: object, piped: str = "") -> str:
    """The message of `moeedge ARGUMENTS`, which must be bad input: exit code 2, and all on standard error."""
    result = run(*arguments, piped=piped)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def run_script(
    script: Path, *arguments: str, timeout_s: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`bash SCRIPT ARGUMENTS` with this Python."""
    environment = os.environ | {"PYTHON": sys.executable} | variables
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)


@cache
def reference() -> str:
    """The command reference, as a process of its own prints it: it adds to the help texts of the commands."""
    command = [sys.executable, "-m", "moeedge.cli.reference"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def all_commands(load: Callable[[str], Any] = load_command) -> dict[str, Any]:
    """Every command by its name, those of groups as "lab trace info"."""
    found: dict[str, Any] = {}
    for name in COMMANDS:
        command = load(name)
        if isinstance(command, LazyGroup):  # its commands have names of their own
            continue
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {key}": value for key, value in inner.items()}
    return found


def option_names() -> set[str]:
    options = [option for command in all_commands().values() for option in command.params]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}
