"""Every source in the catalog: a file in its format is downloaded from a local server and parsed."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from moeedge.data.datasets import CATALOG, DatasetFile, load_dataset
from moeedge.scoring.answers import Reference, score_answer
from tests.support.hub import local_hub

_SPECULATION = "RedHatAI/speculator_benchmarks"
_HUMANEVAL = {"prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": "def check(g):\n    g()\n"}
# one record of each hub file, in its own columns; what is asked; and an answer that is right, if that can be scored
_RECORDS: dict[tuple[str, str], tuple[dict[str, Any], list[str], str | None]] = {
    ("mtbench", "HuggingFaceH4/mt_bench_prompts"): (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": []},
        ["Write.", "Rewrite."],
        None,
    ),
    ("humaneval", _SPECULATION): (
        {"task_id": "HumanEval/0", **_HUMANEVAL},
        ["Complete this Python function.\n\ndef f():\n"],
        "    return 1",
    ),
    ("humaneval", "bigcode/humanevalpack"): (
        {"task_id": "Python/0", "declaration": "", "bug_type": "", **_HUMANEVAL},
        ["Complete this Python function.\n\ndef f():\n"],
        "    return 1",
    ),
    ("gsm8k", "DaertML/gsm8k-jsonl"): ({"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"}, ["2 + 2?"], "It is 4."),
    ("gsm8k", _SPECULATION): (
        {"question_id": 401, "category": "math_reasoning", "turns": ["2 + 2?"], "reference": ["4"]},
        ["2 + 2?"],
        "It is 4.",
    ),
    ("mmlu-pro", "TIGER-Lab/MMLU-Pro"): (
        {"question_id": 70, "question": "1 + 1?", "options": ["1", "2"], "answer": "B", "answer_index": 1,
         "cot_content": "", "category": "math", "src": "x"},
        ["1 + 1?\n(A) 1\n(B) 2\nThink step by step, then finish with \"The answer is (X)\", where X is the letter of "
         "the right answer."],
        "The answer is (B).",
    ),
    ("alpaca", "HuggingFaceH4/self-instruct-eval"): (
        {"id": "t0", "motivation_app": "x", "instruction": "Do.", "instances": [{"input": "This.", "output": ""}]},
        ["Do.\n\nThis."],
        None,
    ),
    ("cnndm", _SPECULATION): (
        {"question_id": 241, "category": "summarization", "turns": ["Summarize: A."], "reference": ["A man slept."]},
        ["Summarize: A."],
        "A man slept.",
    ),
    ("qa", _SPECULATION): ({"question_id": 321, "category": "qa", "turns": ["Who?"]}, ["Who?"], None),
}  # fmt: skip


def _content(source: DatasetFile, record: dict[str, Any]) -> bytes:
    if not source.file.endswith(".parquet"):
        return (json.dumps(record) + "\n").encode()
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist([record]), out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "source"),
    [pytest.param(name, file, id=f"{name}-{file.repo}") for name, entry in CATALOG.items() for file in entry.hub],
)
@pytest.mark.usefixtures("cache_folder")
def test_a_hub_file_is_read(monkeypatch: pytest.MonkeyPatch, name: str, source: DatasetFile) -> None:
    monkeypatch.delenv("MOEEDGE_DATA", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    record, asked, right = _RECORDS[name, source.repo]
    with local_hub({(f"datasets/{source.repo}", source.file): _content(source, record)}) as hub:
        hub.revision = source.revision
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        dataset = load_dataset(name)
    assert (dataset.place, dataset.variant) == ("hub", source.variant)
    prompt = dataset.prompts[0]
    assert [message.content for turn in prompt.turns for message in turn] == asked
    reference = prompt.reference(0)
    if right is None:
        assert reference is None and dataset.unscored
    else:
        assert isinstance(reference, Reference)
        assert score_answer(reference, right, run_code=True).value == 1
