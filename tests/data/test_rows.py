"""Malformed files raise errors with line and reason; parsers turn valid rows into prompts."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest

from moeedge.data.datasets import load_dataset
from moeedge.data.prompts import PromptMessage, Row, parse_gsm8k, parse_instructions, read_rows
from moeedge.errors import DatasetError

_GOOD = '{"prompt": "Hello"}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "Hel', r"not valid JSON \(Unterminated string"),
        ("[1, 2]", "expected a JSON object, not list"),
        ('{"text": "Hello"}', 'none of "prompt", "turns", "messages"'),
        ('{"prompt": ""}', '"prompt" must be a non-empty string'),
        ('{"prompt": 3}', '"prompt" must be a non-empty string'),
        ('{"turns": []}', '"turns" must be a non-empty list'),
        ('{"turns": ["a", 1]}', '"turns" must be a non-empty list'),
        ('{"messages": []}', '"messages" must be a non-empty list'),
        ('{"messages": [{"role": "robot", "content": "Hi"}]}', 'every message needs a "role"'),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}', "the last message must be the user's"),
        ('{"turns": ["Hi", "Ho"], "reference": {"scorer": "exact", "expect": "x"}}', "expected one reference"),
        ("[" * 100_000, "not valid JSON .*nested"),
        (f'{{"prompt": {"9" * 5000}}}', "not valid JSON .*digits"),
        ('{"prompt": "\\ud800"}', "not valid JSON .*half of a character"),
    ],
    ids=range(14),
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(_GOOD + "\n" + line + "\n" + _GOOD)  # an empty line counts, but is no error
    with pytest.raises(DatasetError, match=rf"own\.jsonl, line 3: {reason}"):
        load_dataset(str(path))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="There is no file"):
        load_dataset(str(tmp_path / "absent.jsonl"))
    for name, content, reason in (
        ("empty.jsonl", b"\n\n", "no prompts"),
        ("latin.jsonl", _GOOD.encode() + b'{"prompt": "caf\xe9"}\n', "line 2: not UTF-8"),
        ("cut.jsonl.gz", gzip.compress(_GOOD.encode() * 99)[:-9], "Cannot read"),
        ("bomb.jsonl.gz", gzip.compress(bytes(300 << 20), 1), "256 MiB"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DatasetError, match=reason):
            load_dataset(str(tmp_path / name))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DatasetError, match="Cannot read"):
        load_dataset(str(tmp_path / "folder.jsonl"))


def test_the_three_forms_of_a_users_record(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    records = [
        {"prompt": "One\u2028line"},
        {"id": "b", "turns": ["First", "Second"]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    ]
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records), encoding="utf-8")
    prompts = load_dataset(str(path)).prompts
    assert [prompt.id for prompt in prompts] == ["1", "b", "3"]
    assert prompts[0].turns == ((PromptMessage("user", "One\u2028line"),),)
    assert prompts[1].turns == ((PromptMessage("user", "First"),), (PromptMessage("user", "Second"),))
    assert prompts[2].turns == ((PromptMessage("system", "Be brief."), PromptMessage("user", "Hi")),)


def test_json_and_csv(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"prompt": "x"}, {"prompt": "y"}]')
    assert [row.fields["prompt"] for row in read_rows(tmp_path / "a.json")] == ["x", "y"]
    (tmp_path / "b.json").write_text('[{"prompt": "x"},\n oops]')
    with pytest.raises(DatasetError, match=r"b\.json, line 2: not valid JSON"):
        read_rows(tmp_path / "b.json")
    (tmp_path / "c.csv").write_text('prompt,category\n"a, b",test\n')
    assert [(row.fields["prompt"], row.number) for row in read_rows(tmp_path / "c.csv")] == [("a, b", 2)]
    (tmp_path / "d.csv").write_text(f"prompt\n{'a' * 200_000}\n")  # csv itself takes 131,072 characters
    assert len(read_rows(tmp_path / "d.csv")[0].fields["prompt"]) == 200_000
    (tmp_path / "e.csv").write_text('prompt\n"a\n')
    assert [row.fields["prompt"] for row in read_rows(tmp_path / "e.csv")] == ["a\n"]
    (tmp_path / "f.csv").write_bytes(b"prompt\na\0b\n")
    with suppress(DatasetError):  # Python 3.10 refuses the character
        read_rows(tmp_path / "f.csv")


def test_the_shapes_of_published_records() -> None:
    given = parse_instructions(Row({"instruction": "Shorten.", "input": "A text."}, 1, "x, line 1"))
    assert given.turns[0][0].content == "Shorten.\n\nA text."
    for fields in ({"question": "2 + 2?"}, {"turns": ["2 + 2?"]}, {"prompt": "2 + 2?"}, {"prompt": ["2 + 2?"]}):
        assert parse_gsm8k(Row(dict(fields), 1, "x, line 1")).turns[0][0].content == "2 + 2?"
