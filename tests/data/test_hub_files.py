"""Every source in the catalog: what its file looks like is downloaded from the stand-in and read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeedge.data import CATALOG, load_dataset
from tests.data.hub import hub_stand_in

# one record of each hub file, in its own columns
_RECORDS = {
    "mtbench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": []},
    "humaneval": {
        "task_id": "Python/0",
        "prompt": "def f():\n",
        "declaration": "",
        "canonical_solution": "",
        "test": "",
    },
    "gsm8k": {"question_id": 401, "category": "math_reasoning", "turns": ["2 + 2?"], "reference": ["4"]},
    "alpaca": {
        "id": "t0",
        "motivation_app": "x",
        "instruction": "Do.",
        "instances": [{"input": "This.", "output": ""}],
    },
    "cnndm": {"question_id": 241, "category": "summarization", "turns": ["Summarize: A."], "reference": ["A"]},
    "qa": {"question_id": 321, "category": "qa", "turns": ["Who?"]},
}
_EXPECTED = {
    "mtbench": ["Write.", "Rewrite."],
    "humaneval": ["Complete this Python function.\n\ndef f():\n"],
    "gsm8k": ["2 + 2?"],
    "alpaca": ["Do.\n\nThis."],
    "cnndm": ["Summarize: A."],
    "qa": ["Who?"],
}


@pytest.mark.parametrize("name", [name for name, entry in CATALOG.items() if entry.hub is not None])
def test_a_hub_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    source = CATALOG[name].hub
    assert source is not None
    monkeypatch.delenv("MOEEDGE_DATA", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path))
    content = (json.dumps(_RECORDS[name]) + "\n").encode()
    with hub_stand_in({(source.repo, source.revision, source.file): content}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        dataset = load_dataset(name)
    assert (dataset.place, dataset.variant) == ("hub", source.variant)
    assert [message.content for turn in dataset.prompts[0].turns for message in turn] == _EXPECTED[name]
