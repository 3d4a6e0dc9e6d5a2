"""The examples of docs/lab/traces.md run, and its tables name what the code has."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from moeedge.analysis.model_profile import complete_report, layer_report, profile_model, run_facts
from moeedge.analysis.profile import profile_layers
from moeedge.engine.recording import Recording
from moeedge.lab.analysis.pair_similarity import PairSimilarity
from tests.support.traces import two_texts

TEXT = (Path(__file__).parents[3] / "docs" / "lab" / "traces.md").read_text(encoding="utf-8")


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    two_texts().save(Path("story.npz"))
    examples = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "docs/lab/traces.md", "exec"), {})
    assert "hottest expert:" in capsys.readouterr().out


def test_tables_name_every_array_and_key(tmp_path: Path) -> None:
    two_texts().save(tmp_path / "story.npz")
    saved = np.load(tmp_path / "story.npz")
    for array in (*saved.files, "weights", "states"):
        assert re.search(rf"\| `{array}` +\|", TEXT), array
    for key in json.loads(str(saved["meta"])):
        assert f"`meta.{key}`" in TEXT, key
    trace = two_texts()
    report = layer_report(profile_layers(trace, [0])[0], run_facts(trace, Recording(trace, 1, 1, 1, [])))
    inner = ("hot_cold_accuracy", "unique_experts", "activation_counts", "skew", "persistence")
    for key_name in (*report, *(key for name in inner for key in report[name]), *report["utility"][0]):
        assert f"`{key_name}`" in TEXT, key_name
    profile = profile_model(trace, [0])
    complete = complete_report(profile, {})
    model = complete["model_profile"]
    for key_name in (*complete, *model, *model["speculation"], *(field.name for field in fields(PairSimilarity))):
        assert f"`{key_name}`" in TEXT, key_name
