"""`moeedge bench --score` from the outside."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from moeedge import paths
from tests.support.commands import refused, run, run_json
from tests.support.markdown import table_rows

_ROWS = (
    {"category": "who", "prompt": "Who are you?", "reference": {"scorer": "contains", "expect": "toy"}},
    {"category": "who", "prompt": "Hello", "reference": {"scorer": "exact", "expect": "xyzzy"}},
    {"category": "code", "prompt": "Set x", "reference": {"scorer": "code", "tests": "pass"}},
)
_QUICK = ["-t", "1", "--no-warmup"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file of a user's with three references."""
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
    return path


def test_the_bundled_pair_on_a_file_of_one_s_own(own: Path) -> None:
    if not paths.bundled_target().is_file():
        pytest.skip("the bundled pair is not there")
    result = run("bench", "--dataset", own, "--score", *_QUICK)
    assert result.exit_code == 0, result.stderr
    rows = table_rows(result.stdout)
    assert [row["score"] for row in rows] == ["0.500 (2/3)"] * 3
    assert "score: contains,exact; 0 of 3 answers cut at 512 tokens" in result.stdout
    assert "not scored: 1 of 3, a program, and programs are run with --run-code only" in result.stdout
    assert "SCORES DIFFER" not in result.stdout
    assert "repetitions: 1" in result.stdout
    assert "1 of 3" in result.stderr and "--run-code" in result.stderr


def test_the_record_has_answers_and_reasons(tiny_moe: Path, own: Path) -> None:
    common = ["-m", tiny_moe, "-md", "none", "--dataset", own, "--score", "-n", "4", *_QUICK]
    for row in run_json("bench", *common, "--run-code"):
        assert not any(isinstance(value, dict) for value in row.values())
        assert (row["n_scored"], row["n_answers"], row["n_cut"], row["run_code"]) == (3, 3, 3, True)
        assert [one["category"] for one in row["score_by_category"]] == ["who", "code"]
        assert all(isinstance(sample["answer"], str) for sample in row["samples"])
    table = list(csv.DictReader(io.StringIO(run("bench", *common, "-o", "csv").stdout)))
    assert [row["n_scored"] for row in table] == ["2", "2"]
    assert json.loads(table[0]["unscored"])[0]["n"] == 1


def test_a_set_without_references_says_so(tiny_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "Hi"}\n')
    result = run("bench", "-m", tiny_moe, "--dataset", path, "--score", "-n", "2", *_QUICK)
    assert result.exit_code == 0
    assert "- (0/1)" in result.stdout
    assert "1 of 1" in result.stdout
    assert "no reference" in result.stderr


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ('{"scorer": "bleu", "expect": "x"}', "own.jsonl, line 1: "),
        ('{"scorer": "number", "expect": "x"}', 'own.jsonl, line 1: "expect"'),
    ],
)
def test_a_bad_reference_exits_with_2_and_the_line(tiny_moe: Path, tmp_path: Path, reference: str, said: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(f'{{"prompt": "Hi", "reference": {reference}}}\n')
    assert said in refused("bench", "-m", tiny_moe, "--dataset", path)


def test_references_must_match_the_turns(tiny_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"turns": ["Hi", "Ho"], "reference": {"scorer": "exact", "expect": "x"}}\n')
    assert "2 turns" in refused("bench", "-m", tiny_moe, "--dataset", path)
