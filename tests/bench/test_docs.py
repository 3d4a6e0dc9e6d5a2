"""docs/bench.md names every key of a record, docs/datasets.md every file of a dataset and every scorer."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from moeedge.bench.config import MODES
from moeedge.bench.output_check import NEAR_TIE_GAP
from moeedge.bench.samples import COUNTERS
from moeedge.data import CATALOG, load_dataset
from moeedge.scoring.answers import SCORERS, Reference
from tests.bench.recording import make_plan, run, write_conversations
from tests.benchmarks.performance import read
from tests.benchmarks.policies_table import table

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_TEXT = (_DOCS / "bench.md").read_text(encoding="utf-8")
_DATASETS = (_DOCS / "datasets.md").read_text(encoding="utf-8")


def test_every_key_is_documented_and_no_other(tmp_path: Path, tiny_moe: Path) -> None:
    plan = make_plan(tiny_moe, None, dataset=write_conversations(tmp_path), n_predict=2, repetitions=1)
    rows, _ = run(plan)
    record = rows[0].as_dict()
    section = _TEXT.split("## The record")[1]
    table, samples = section.split("A sample has")
    table_rows = [line for line in table.splitlines() if line.startswith("| `")]
    documented = {key for row in table_rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == set(record)
    keys, counters = samples.split("The last two are objects")
    assert set(re.findall(r"`(\w+)`", keys)) == set(record["samples"][0])
    assert set(re.findall(r"`(\w+)`", counters)) == set(COUNTERS)


def test_the_readme_has_the_table_of_its_record() -> None:
    """Figures of README that a command measured are those of the record that it names."""
    record = _DOCS / "benchmarks" / "policies-bundled.json.gz"
    rows = read(record)
    readme = (_DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert table(rows) in readme
    assert {row["repetitions"] for row in rows} == {1} and len({row["time"] for row in rows}) == 3
    for part in ("--policy spac,lfu,spac-program,spac-paper,lru,static", "--cache-ratio 0.17", "--draft-max 8 -r 1"):
        assert part in readme
    assert {row["policy"] for row in rows} - {"none"} == set(
        ["spac", "lfu", "spac-program", "spac-paper", "lru", "static"]
    )
    assert all(row["gamma"] == 8 and row["cache_ratio"] == 0.17 for row in rows if row["mode"] == "moeedge")


def test_modes_and_the_bound() -> None:
    assert all(f"| {name} |" in _TEXT for name in MODES)
    assert f"Closer than {NEAR_TIE_GAP} " in _TEXT


def test_datasets_and_scorers() -> None:
    for entry in CATALOG.values():
        hub = "; ".join(f"{source.repo}: {source.file}" for source in entry.hub)
        assert f"| {entry.name} | {', '.join(entry.files)} | {hub} |" in _DATASETS
        assert all(source.revision == "main" or source.revision in _DATASETS for source in entry.hub)
    assert all(f"\n| `{name}` |" in _DATASETS for name in SCORERS)
    rows = _DATASETS.split("| field | meaning |")[1].splitlines()
    documented = {key for row in rows if row.startswith("| `") for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == {field.name for field in fields(Reference)}


def test_the_examples_of_own_rows_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(line for line in _DATASETS.splitlines() if line.startswith("    {")), encoding="utf-8")
    scorers = [
        reference.scorer
        for prompt in load_dataset(str(path)).prompts
        for reference in prompt.references
        if reference is not None
    ]
    assert scorers == ["number", "list", "code", "contains"]
