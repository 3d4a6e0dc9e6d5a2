"""docs/cli.md is what the commands declare, and the commands' --help says the same."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from moeedge.cli.app import app
from moeedge.cli.reference import Command, commands, markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"


def words(text: str) -> str:
    """Text without the frames and line breaks of --help."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_the_committed_reference_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(app), "run: python -m moeedge.cli.reference > docs/cli.md"


@pytest.mark.parametrize("command", commands(app), ids=lambda command: command.name)
def test_help_says_the_same(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    result = CliRunner().invoke(app, [*command.name.split(), "--help"])
    assert result.exit_code == 0
    shown = words(result.stdout)
    for parameter in command.parameters:
        for name in parameter.names:
            assert name in shown
        assert words(parameter.help) in shown


@pytest.mark.parametrize("command", commands(app), ids=lambda command: command.name)
def test_the_terminal_breaks_the_lines_of_help(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the source, in a terminal of another width, would leave ragged ends."""
    monkeypatch.setenv("COLUMNS", "100")
    shown = CliRunner().invoke(app, [*command.name.split(), "--help"]).stdout.partition("╭")[0]
    lines = [line.rstrip() for line in shown.splitlines()]
    for line, following in itertools.pairwise(lines):
        first_word = following.split(" ")[1] if following else ""
        assert not first_word or not line or len(line) + len(f" {first_word}") >= 100, f"{line}\n{following}"


def test_every_command_is_there() -> None:
    mounted = typer.main.get_command(app)
    groups = {name for name, command in mounted.commands.items() if hasattr(command, "commands")}  # type: ignore[attr-defined]
    listed = [command.name for command in commands(app)]
    assert {name.split(" ")[0] for name in listed} == set(mounted.commands)  # type: ignore[attr-defined]
    assert {name.split(" ")[0] for name in listed if " " in name} == groups
