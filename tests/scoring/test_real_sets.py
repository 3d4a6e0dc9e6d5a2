"""The scorers on the published files, where $MOEEDGE_DATA has them: every set's own answers are right."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moeedge.data.datasets import load_dataset
from moeedge.data.prompts import Dataset
from moeedge.scoring.answers import Reference, compiles, program_of, score_answer


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, data_folder: Path) -> Path:
    monkeypatch.setenv("MOEEDGE_DATA", str(data_folder))
    return data_folder / "prompts"


def _rows(path: Path) -> list[dict[str, Any]]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in raw.decode().splitlines()]


def _references(dataset: Dataset) -> list[Reference]:
    found = [prompt.reference(0) for prompt in dataset.prompts]
    assert all(found)
    return found


def test_gsm8k_every_answer_is_right_and_its_neighbour_s_is_wrong(published: Path) -> None:
    references = _references(load_dataset("gsm8k"))
    answers = [row["answer"] for row in _rows(published / "gsm8k_test.jsonl")]
    assert len(answers) == 1319
    for reference, answer in zip(references, answers, strict=True):
        number = answer.rpartition("####")[2].strip()
        assert score_answer(reference, answer).value == 1
        assert score_answer(reference, f"{answer.partition('####')[0]}The answer is ${number}.").value == 1
        assert score_answer(reference, f"#### {number}1").value == 0
        assert score_answer(reference, "").value == 0


def test_mmlu_pro_every_letter(published: Path) -> None:
    dataset = load_dataset("mmlu-pro")
    rows = _rows(published / "mmlu_pro_140.jsonl")
    for reference, row in zip(_references(dataset), rows, strict=True):
        assert ord(row["answer"]) - ord("A") == row["answer_index"]
        others = [letter for letter in "ABCDEFGHIJ" if letter != row["answer"]]
        assert score_answer(reference, f"Let us see. (A) is out. The answer is ({row['answer']}).").value == 1
        assert all(score_answer(reference, f"The answer is ({letter}).").value == 0 for letter in others)


def test_cnndm_every_summary(published: Path) -> None:
    pytest.importorskip("rouge_score")
    references = _references(load_dataset("cnndm"))
    assert len(references) == 80
    values = []
    for reference, other in pairwise(references[:10]):
        assert score_answer(reference, reference.expect[0]).value == 1
        values.append(score_answer(reference, other.expect[0]).value)
    assert all(value is not None and value < 0.5 for value in values)


@pytest.mark.parametrize("limit", [10, pytest.param(None, marks=pytest.mark.slow)])
def test_humaneval_every_solution_passes_in_any_shape_and_no_empty_function(published: Path, limit: int | None) -> None:
    dataset = load_dataset("humaneval").limited(limit)
    solutions = {row["task_id"]: row["canonical_solution"] for row in _rows(published / "HumanEval.jsonl.gz")}
    wrong = []
    for prompt, reference in zip(dataset.prompts, _references(dataset), strict=True):
        body = solutions[prompt.id]
        code = reference.head + body
        fenced, among_words = f"Here:\n```python\n{code}\n```\nIt works.", f"Sure:\n\n{code}\n\nThat is it."
        shapes = (body, body.strip(), fenced, among_words)
        expected = [*((shape, 1) for shape in shapes), ("", 0), ("    pass", 0)]
        wrong += [prompt.id for text, value in expected if score_answer(reference, text, run_code=True).value != value]
    assert wrong == []


def test_humaneval_every_program_compiles(published: Path) -> None:
    solutions = [row["canonical_solution"] for row in _rows(published / "HumanEval.jsonl.gz")]
    for reference, body in zip(_references(load_dataset("humaneval")), solutions, strict=True):
        assert compiles(program_of(body, reference.tests, head=reference.head))


@pytest.mark.parametrize(
    ("name", "why"), [("mtbench", "another model"), ("alpaca", "people"), ("qa", "without answers")]
)
def test_unscored_sets_give_the_reason(published: Path, name: str, why: str) -> None:
    dataset = load_dataset(name)
    assert why in dataset.unscored
    assert all(prompt.reference(turn) is None for prompt in dataset.prompts for turn in range(len(prompt.turns)))
