"""The reference is what the commands declare, and --help shows the same."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moeedge.cli.app import COMMANDS, app, load_command
from moeedge.cli.declare import hidden_spellings
from moeedge.cli.foreign import foreign_options
from moeedge.ui.chat.commands import help_rows
from tests.support.commands import all_commands, option_names, reference

_OF_TYPER = {"-h", "--help", "--help-all", "--install-completion", "--show-completion"}
_NAME = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
COMMANDS_PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def words(text: str) -> str:
    """Text without the frames and line breaks of --help."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def help_of(name: str) -> str:
    result = CliRunner().invoke(app, [*name.split(), "--help-all"])
    assert result.exit_code == 0
    return result.stdout


def further_names() -> set[str]:
    """Spellings that --help does not show."""
    return {name for command in all_commands().values() for name in hidden_spellings(command)}


def sections(text: str) -> dict[str, str]:
    """The part of each command in the reference, by its name."""
    return dict(zip(*[iter(re.split(r"^##+ `moeedge (.*)`\n", text, flags=re.MULTILINE)[1:])] * 2, strict=True))


def spellings(option: Any) -> list[str]:
    return [spelling for spelling in option.opts if spelling.startswith("-")]


def test_the_reference_names_only_what_exists() -> None:
    text = reference()
    assert set(sections(text)) == set(COMMANDS) - {"lab"} | set(all_commands())
    assert {"# Coming from llama.cpp or ollama", "# Environment variables"} <= set(text.splitlines())
    assert set(_NAME.findall(text)) <= option_names() | further_names() | set(foreign_options()) | _OF_TYPER
    assert "<bool>" not in help_of("")
    for row in help_rows():
        assert f"* `{row.label}`: {row.value}\n" in sections(text)["chat"]


def test_the_page_of_commands_names_all_and_only_options_that_exist() -> None:
    text = COMMANDS_PAGE.read_text(encoding="utf-8")
    assert [name for name in COMMANDS if name != "lab" and f"`{name.removeprefix('lab ')}`" not in text] == []
    assert set(_NAME.findall(text)) <= option_names() | further_names() | _OF_TYPER


@pytest.mark.parametrize("name", all_commands())
def test_help_shows_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = words(help_of(name))
    assert "<bool>" not in shown  # later versions of Typer show flags as if they took a value
    for option in all_commands()[name].params:
        assert all(spelling in shown for spelling in spellings(option))
        assert words(option.help) in shown


@pytest.mark.parametrize("name", all_commands())
def test_the_terminal_breaks_the_lines_of_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks of the source would leave ragged ends in a terminal of another width."""
    monkeypatch.setenv("COLUMNS", "100")
    lines = [line.rstrip() for line in help_of(name).partition("╭")[0].splitlines()]
    for line, following in itertools.pairwise(lines):
        first_word = following.split(" ")[1] if following else ""
        assert not first_word or not line or len(line) + len(f" {first_word}") >= 100, f"{line}\n{following}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_paragraph_of_each(name: str) -> None:
    assert COMMANDS[name] == load_command(name).help.partition("\n\n")[0]
