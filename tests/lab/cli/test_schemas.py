"""Every published schema describes each key, real outputs are valid under it, and the document has every key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from moeedge.analysis.profile import complete_report, layer_report, profile_layers, profile_model, run_facts
from moeedge.engine.recording import Recording
from moeedge.lab.cli.schema import SCHEMAS, key_table, schema_text
from moeedge.lab.experiments.sp_moe import PairSimilarity
from tests.support.commands import refused, run, run_json
from tests.support.traces import two_texts

TEXT = (Path(__file__).parents[3] / "docs/lab/traces.md").read_text(encoding="utf-8")


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(schema_text(name)))


def errors(name: str, value: Any) -> list[str]:
    """What the schema forbids, and the keys that it does not describe."""
    strict = jsonschema.Draft202012Validator(closed(json.loads(schema_text(name))))
    return [f"{error.json_path}: {error.message[:200]}" for error in strict.iter_errors(value)]


def closed(schema: Any) -> Any:
    """The schema without other keys in objects that name theirs."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    others = {"additionalProperties": False} if "properties" in schema else {}
    return others | {key: closed(each) for key, each in schema.items()}


def members(schema: Any, path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and schema of every key, at every depth."""
    if isinstance(schema, dict):
        for name, member in schema.get("properties", {}).items():
            yield f"{path}.{name}", member
        for key, value in schema.items():
            yield from members(value, f"{path}.{key}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from members(value, f"{path}[{index}]")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_is_described(name: str) -> None:
    text = json.loads(schema_text(name))
    jsonschema.Draft202012Validator.check_schema(text)
    assert text["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    described = dict(members(text))
    assert described
    missing = [path for path, member in described.items() if not member.get("description") and "$ref" not in member]
    assert not missing


def test_bench_rows(pair: list[str]) -> None:
    """Answers with an expert cache and scores, synthetic tests, and texts decoded together."""
    common = ("-t", 1, "--no-calibrate")
    toy = ("--dataset", "toy", "--limit", 1, "-n", 4, "-r", 1)
    sweep = ("-dev", "emulated", "--policy", "lru", "--cache-ratio", 0.5, "--draft-max", 2, "--score")
    rows = run_json("bench", *pair, *common, *toy, *sweep)
    assert {row["mode"] for row in rows} == {"stock-ar", "stock-sd", "moeedge"}
    assert rows[-1]["samples"][0]["placement"]
    rows += run_json("bench", *pair, *common, "-p", 8, "-n", 4, "-r", 2, "-dev", "none")
    rows += run_json("bench", *pair, *common, *toy, "--parallel", 1, "-dev", "none", "--modes", "stock-ar,stock-sd")
    assert not errors("bench", rows)
    required = set(json.loads(schema_text("bench"))["items"]["required"])
    assert all(set(row) == required for row in rows)
    wrong = ({"unknown": 1}, {"tg_ts": "fast"}, {"samples": [{}]}, {"hit_rate_pairs": 1.5})
    assert all(errors("bench", [rows[0] | part]) for part in wrong)


@pytest.mark.parametrize(
    "options",
    [
        ("-dev", "emulated", "--policy", "spac", "--cache-ratio", 0.5),
        ("-dev", "none", "-md", "none"),
        ("-dev", "none", "--draft-max", 3, "--expert-budget", 4),
    ],
)
def test_a_chats_answer(options: tuple[object, ...], pair: list[str]) -> None:
    result = run("chat", *pair, "-p", "tell me", "-n", 12, "--no-calibrate", *options, "-o", "json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert not errors("chat", answer)
    stats = answer["stats"]
    assert ("placement" in stats) == ("emulated" in options) and None not in stats.values()
    assert stats["lossy"] == ("--expert-budget" in options)
    without = {key: value for key, value in stats.items() if key != "tg_ts"}
    wrong = ({"stop_reason": "tired"}, {"unknown": 1}, {"stats": without}, {"stats": stats | {"hit_rate_pairs": 2}})
    assert all(errors("chat", answer | part) for part in wrong)


def contents(path: Path) -> dict[str, Any]:
    """A trace file as its schema describes it."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(str(arrays.pop("meta")))
    shapes = {name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in arrays.items()}
    return {"meta": meta, **shapes}


def test_traces(tmp_path: Path, pair: list[str]) -> None:
    path = tmp_path / "routing.npz"
    two_texts(weights=True).save(path)
    made = contents(path)
    assert not errors("trace", made)
    arguments = ("--layer", 0, "--dataset", "toy", "--limit", 1, "-n", 4, "-t", 1)
    assert run("profile", *pair, *arguments, "--trace-out", path).exit_code == 0
    recorded = contents(path)
    assert not errors("trace", recorded)
    assert recorded["meta"]["parameters"]["expert_bytes"] and set(recorded) >= set(made) - {"weights"}
    assert errors("trace", {name: part for name, part in recorded.items() if name != "ids"})
    assert errors("trace", recorded | {"step": {"dtype": "int64", "shape": [3]}})
    assert errors("trace", recorded | {"ids": {"dtype": "uint8", "shape": [3]}})


def test_rows_of_a_replay(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    two_texts(weights=True).save(path)
    rows = run_json("lab", "replay", path, "--cache-ratio", 0.5, "--policy", "lru,sp-moe")
    assert rows and not errors("replay", rows)
    rows = run_json("lab", "replay", path, "--cache-ratio", 0.5, "--policy", "lru", "--expert-budget", "off,2")
    assert {"lossy", "experts_kept"} < set(rows[0]) and not list(validator("replay").iter_errors(rows))


def test_the_command_prints_them() -> None:
    assert run("lab", "schema").stdout.split() == [*SCHEMAS] and {"bench", "chat", "trace"} <= set(SCHEMAS)
    assert json.loads(run("lab", "schema", "bench").stdout) == json.loads(schema_text("bench"))
    assert "bench" in refused("lab", "schema", "benches")


def test_the_documents_table_is_made_from_the_declarations() -> None:
    _, _, table = TEXT.partition("<!-- made by: moeedge lab schema trace -o md -->\n")
    assert table.startswith(key_table("trace") + "\n")


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    two_texts().save(Path("story.npz"))
    examples = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "docs/lab/traces.md", "exec"), {})
    assert "hottest expert:" in capsys.readouterr().out


def test_the_document_names_every_key_of_a_profile() -> None:
    trace = two_texts()
    report = layer_report(profile_layers(trace, [0])[0], run_facts(trace, Recording(trace, 1, 1, 1, [])))
    inner = ("hot_cold_accuracy", "unique_experts", "activation_counts", "skew", "persistence")
    complete = complete_report(profile_model(trace, [0]), {})
    model = complete["model_profile"]
    names = (*report, *(key for name in inner for key in report[name]), *report["utility"][0], *complete, *model)
    for name in (*names, *model["speculation"], *(field.name for field in fields(PairSimilarity))):
        assert f"`{name}`" in TEXT, name
