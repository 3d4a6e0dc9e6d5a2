"""Input: triple quotes, completion, history."""

from __future__ import annotations

from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory

from moeedge.run import Run
from moeedge.ui.chat.commands import completions
from moeedge.ui.chat.prompt import _CommandCompleter, block_is_open, make_reader, open_history, unquote


@pytest.mark.parametrize(
    ("text", "is_open", "message"),
    [
        ("hello", False, "hello"),
        (" hello ", False, "hello"),
        ('"""', True, '"""'),
        ('"""one', True, '"""one'),
        ('"""one\ntwo"""', False, "one\ntwo"),
        ('"""\n  one\n"""', False, "  one"),
        ('""""""', False, ""),
        ('say """this"""', False, 'say """this"""'),
        ('""', False, '""'),
    ],
)
def test_triple_quotes(text: str, is_open: bool, message: str) -> None:
    assert block_is_open(text) is is_open
    assert unquote(text) == message


def test_commands_are_completed() -> None:
    def complete(line: str) -> list[str]:
        found = _CommandCompleter(completions()).get_completions(Document(line), CompleteEvent())
        return [line[: len(line) + completion.start_position] + completion.text for completion in found]

    assert complete("/st") == ["/stats"]
    assert complete("/se") == ["/sessions", "/set"]
    assert complete("/set b") == ["/set budget"]
    assert complete("/set budget 1") == complete("/save b") == complete("s") == []
    assert "/set gamma" in complete("/set ")


def test_history_is_a_private_file(tmp_path: Path) -> None:
    notes: list[str] = []
    assert isinstance(open_history(lambda: tmp_path / "history", Run(notes.append)), FileHistory)
    assert (tmp_path / "history").stat().st_mode & 0o077 == 0
    assert notes == []


def test_history_that_cannot_be_kept_is_reported(tmp_path: Path) -> None:
    notes: list[str] = []
    assert isinstance(open_history(lambda: tmp_path / "none" / "history", Run(notes.append)), InMemoryHistory)
    assert notes[0].startswith("Input history is not kept: ")


@pytest.mark.parametrize("editor", ["/bin/false", "/no/such/editor"])
def test_an_editor_that_fails_on_a_dumb_terminal_leaves_the_message(
    editor: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("VISUAL", editor)
    read = make_reader({}, InMemoryHistory())
    assert read("a message") == ""
    assert editor in capsys.readouterr().err
