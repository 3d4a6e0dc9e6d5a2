"""docs/bench.md names every key of a record and every file that is looked for."""

from __future__ import annotations

import re
from pathlib import Path

from moeedge.bench.modes import MODES
from moeedge.bench.placement import COUNTERS
from moeedge.bench.runner import Bench
from moeedge.data import CATALOG
from moeedge.engine.agreement import NEAR_TIE_GAP
from tests.bench.recording import Recorder, make_plan, write_conversations

_TEXT = (Path(__file__).resolve().parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")


def test_every_key_is_documented_and_no_other(tmp_path: Path, tiny_moe: Path) -> None:
    plan = make_plan(tiny_moe, None, dataset=write_conversations(tmp_path), n_predict=2, repetitions=1)
    with Bench(plan, Recorder()) as bench:
        bench.run()
        record = bench.rows()[0].as_dict()
    section = _TEXT.split("## The record")[1]
    table, samples = section.split("A sample has")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == set(record)
    keys, counters = samples.split("The last two are objects")
    assert set(re.findall(r"`(\w+)`", keys)) == set(record["samples"][0])
    assert set(re.findall(r"`(\w+)`", counters)) == set(COUNTERS)


def test_modes_datasets_and_the_bound() -> None:
    assert all(f"| {name} |" in _TEXT for name in MODES)
    for entry in CATALOG.values():
        repo = "no: only as parquet" if entry.hub is None else entry.hub.repo
        assert f"| {entry.name} | {', '.join(entry.files)} | {repo}" in _TEXT
    assert f"Closer than {NEAR_TIE_GAP} " in _TEXT
