"""/set: names, values, limits; and the input: triple quotes, completion, history."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from rich.console import Console

from moeedge.engine.types import SamplingConfig
from moeedge.errors import InputError
from moeedge.run import Run
from moeedge.ui.chat.commands import completions, help_rows
from moeedge.ui.chat.prompt import _CommandCompleter, block_is_open, edited, make_reader, open_history, unquote
from moeedge.ui.chat.settings import Settings, change, listing, names, restored
from moeedge.ui.console import show_figures
from moeedge.ui.figures import FigureRow


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("temp", "0.5", "temp = 0.5"),
        ("temperature", "0", "temp = 0"),
        ("--top-k", "5", "top_k = 5"),
        ("top_p", "1", "top_p = 1"),
        ("min-p", "0.1", "min_p = 0.1"),
        ("repeat_penalty", "1.1", "repeat_penalty = 1.1"),
        ("repeat_last_n", "32", "repeat_last_n = 32"),
        ("samplers", "top_k; temperature", "samplers = top_k, temperature"),
        ("typical", "0.7", "typical_p = 0.7"),
        ("grammar", "off", "grammar = off"),
        ("think", "off", "think = off"),
        ("seed", "7", "seed = 7"),
        ("seed", "-1", "seed = random"),
        ("n", "100", "n_predict = 100"),
        ("draft-max", "8", "gamma = 8"),
        ("budget", "16", "budget = 16"),
        ("expert-budget", "off", "budget = off"),
    ],
)
def test_a_value_is_set_and_reported_and_the_others_stay(name: str, text: str, line: str) -> None:
    before = Settings(sampling=SamplingConfig(seed=3, top_k=9), n_predict=5, gamma=2)
    changed, reported = change(before, name, text)
    assert reported == line
    shown, others = (
        {row.label: row.value.split("  ")[0].strip() for row in listing(each)} for each in (changed, before)
    )
    label, value = line.split(" = ")
    assert shown == others | {label: value}
    assert list(shown) == names()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("heat", "1", 'setting "heat"'),
        ("temp", "hot", "temp must be a number"),
        ("temp", "nan", "temp must be a number"),
        ("temp", "-1", "temperature (--temp) must be 0 or more"),
        ("top_k", "1.5", "top_k must be a whole number"),
        ("top_p", "2", "top_p must be above 0 and at most 1"),
        ("seed", "-2", "seed must be -1"),
        ("samplers", "top_k;foo", "'foo'"),
        ("grammar", "/no/such/file", "/no/such/file"),
        ("think", "maybe", "maybe is not one of"),
        ("gamma", "65", "gamma (--draft-max) must be auto or from 0 to 64"),
        ("n", "-2", "n_predict (-n) must be -1 or more"),
        ("budget", "0", "budget (--expert-budget) must be at least 1 or off"),
        ("budget", "some", "budget must be a whole number or off"),
    ],
)
def test_a_bad_value_is_one_sentence(name: str, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        change(Settings(), name, text)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "rows", [[row for row in listing(Settings()) if row.label != "samplers"], help_rows()], ids=["settings", "help"]
)
def test_lists_fit_a_small_terminal(rows: list[FigureRow]) -> None:
    """But for the samplers, whose value is long."""
    console = Console(file=io.StringIO(), width=80)
    show_figures(console, rows)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == len(rows) and max(map(len, lines)) <= 80 and (rows != help_rows() or len(lines) <= 23)


@pytest.mark.parametrize(
    "saved",
    [
        *({"sampling": {}, "n_predict": value} for value in (float("inf"), float("nan"), "many", None, -7)),
        {"sampling": [1]},
        {"sampling": {"seed": "x"}},
        {"sampling": {"top_k": 1.5}},
        {"sampling": {"stop": [1]}},
        {"sampling": {"grammar": 3}},
        {"sampling": {"logit_bias": [["a", "b"]]}},
        {"sampling": {"unknown": 1}},
        {"sampling": {}, "template": {"arguments": []}},
    ],
)
def test_unreadable_settings_of_a_saved_chat_change_nothing(saved: dict[str, Any]) -> None:
    current = Settings(n_predict=7)
    assert restored({"n_predict": 1, **saved}, current) == current


def test_names_stand_above_values_where_a_terminal_is_too_narrow_for_both() -> None:
    out = io.StringIO()
    show_figures(Console(file=out, width=20), listing(Settings()))
    lines = out.getvalue().splitlines()
    assert "frequency_penalty" in [line.strip() for line in lines]
    assert max(map(len, lines)) <= 20
    assert sum(len(line.strip()) > 8 for line in lines) > len(lines) / 2  # words, not columns of letters


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


def test_history_is_a_private_file_or_said_not_to_be_kept(tmp_path: Path) -> None:
    notes: list[str] = []
    assert isinstance(open_history(lambda: tmp_path / "history", Run(notes.append)), FileHistory)
    assert (tmp_path / "history").stat().st_mode & 0o077 == 0
    assert notes == []
    assert isinstance(open_history(lambda: tmp_path / "none" / "history", Run(notes.append)), InMemoryHistory)
    assert notes[0].startswith("Input history is not kept: ")


def test_a_history_that_can_no_longer_be_written_costs_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    folder = tmp_path / "cache"
    folder.mkdir()
    history = open_history(lambda: folder / "history", Run(notes.append))
    shutil.rmtree(folder)
    read = make_reader({}, history, Run(notes.append))
    assert (read(""), read("")) == ("one", "two")
    assert len(notes) == 1 and "not kept from here on" in notes[0]


@pytest.mark.parametrize("editor", ["/bin/false", "/no/such/editor"])
def test_an_editor_that_fails_on_a_dumb_terminal_leaves_the_message(
    editor: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("VISUAL", editor)
    read = make_reader({}, InMemoryHistory(), Run())
    assert read("a message") == ""
    assert editor in capsys.readouterr().err


@pytest.mark.parametrize(("editor", "kept"), [("sed -i s/one/two/", "two"), ("/bin/false", None), ('"vi', None)])
def test_the_editor_changes_the_text_or_is_told_to_fail(
    editor: str, kept: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VISUAL", editor)
    text = edited("one")
    assert (text and text.strip()) == kept and bool(capsys.readouterr().err) == (kept is None)
