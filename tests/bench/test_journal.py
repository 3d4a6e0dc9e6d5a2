"""An interrupted run goes on from the file that it kept, and marks what it lacks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench.config import BenchPlan, ScriptedTest
from moeedge.bench.journal import LAST, Journal, folder, settings_of
from moeedge.bench.samples import Sample
from moeedge.errors import InputError
from moeedge.hardware.provenance import read_provenance
from moeedge.records import as_dict
from moeedge.ui.bench_views import render
from tests.bench.recording import in_ram, make_plan, run, write_conversations
from tests.support.machine import Here
from tests.support.markdown import table_rows

pytestmark = pytest.mark.usefixtures("cache_folder")


def begun(plan: BenchPlan) -> Journal:
    return Journal.begin([settings_of(plan, read_provenance())])


def resumed(plan: BenchPlan, name: str = LAST) -> Journal:
    return Journal.resume(name, [settings_of(plan, read_provenance())])


def keys(samples: Sequence[Sample]) -> list[tuple[str, str, int, int, float]]:
    return sorted((s.mode, s.prompt, s.turn, s.repetition, s.decode_s + s.prefill_s) for s in samples)


def test_the_rest_alone_is_measured(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    """Conversations of 2 and 1 turns, 3 modes, 2 repetitions, and tests of 1 and 2 samples for 2 modes."""
    plan = make_plan(tiny_moe, tiny_draft, dataset=write_conversations(tmp_path), n_prompt=8, n_gen=20)
    journal = begun(plan)
    _, first = run(plan, journal, stop_after=11)
    journal.path.write_text(journal.path.read_text() + '{"part": 0, "sam')  # a line that an abort cut
    again = resumed(plan)
    assert again.n_done == 11
    rows, recorder = run(plan, again)
    assert len(recorder.samples) == recorder.total == 2 * (3 * 3 + 2 * (1 + 2))
    # the first conversation of the first repetition has 6 samples, the second 3: 9 of the 11 are complete
    assert keys(recorder.samples[:9]) == keys(first.samples[:9])
    assert not set(keys(recorder.samples[9:])) & set(keys(first.samples))
    for row in rows:
        assert not row.is_partial and len(row.samples) == row.n_planned
        if row.test == "talk":
            assert row.output is not None and row.output.compared == 2 and row.output.passed
    complete = resumed(plan)  # everything is there: the models are loaded, and nothing is measured
    _, last = run(plan, complete)
    assert keys(last.samples) == keys(recorder.samples)
    complete.drop()
    with pytest.raises(InputError, match="no interrupted bench"):
        resumed(plan)


def test_a_file_that_is_written_is_left_alone(tiny_moe: Path, tiny_draft: Path) -> None:
    plan = make_plan(tiny_moe, tiny_draft, n_prompt=8)
    with begun(plan) as running:
        for _ in range(8):
            other = folder() / f"{time.monotonic_ns()}.jsonl"
            other.write_text("{}")
        begun(plan)
        assert running.path.exists() and len(list(folder().glob("*.jsonl"))) == 6
        with pytest.raises(InputError, match="running"), resumed(plan, str(running.path)):
            pass


def test_a_model_of_the_same_size_is_another(tiny_moe: Path, tiny_draft: Path) -> None:
    plan = make_plan(tiny_moe, tiny_draft, n_prompt=8)
    before = settings_of(plan, read_provenance(tiny_moe))
    os.utime(tiny_moe, ns=(0, 0))
    assert settings_of(plan, read_provenance(tiny_moe)) != before


def test_the_newest_file_is_that_of_bench(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    """`lab rivals` keeps its own there, too."""
    plan = make_plan(tiny_moe, tiny_draft, n_prompt=8)
    journal = begun(plan)
    run(plan, journal, stop_after=1)
    head = {"schema": "moeedge-bench-run-1", "settings": [{"llama_bench": "x"}]}
    (folder() / "99999999-000000-1.jsonl").write_text(json.dumps(head) + "\n")
    assert resumed(plan).path == journal.path


def test_modes_in_turn_go_on(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    plan = in_ram(make_plan(tiny_moe, tiny_draft, dataset=write_conversations(tmp_path), n_gen=8))
    _, first = run(plan, begun(plan), stop_after=6)
    rows, recorder = run(plan, resumed(plan))
    assert keys(recorder.samples[:6]) == keys(first.samples)
    assert len(recorder.samples) == recorder.total
    assert all(len(row.samples) == row.n_planned for row in rows)
    assert all(row.output.passed for row in rows if row.output is not None)


def test_other_settings_are_refused(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    plan = make_plan(tiny_moe, None, n_prompt=8, n_gen=8)
    journal = begun(plan)
    run(plan, journal, stop_after=2)
    others = [
        (replace(plan, repetitions=5), "repetitions: 2, now 5"),
        (replace(plan, base=replace(plan.base, n_threads=2)), "n_threads: 1, now 2"),
        (replace(plan, base=replace(plan.base, model=tiny_draft)), tiny_draft.name),
        (make_plan(tiny_moe, None, n_prompt=16, n_gen=8), "pp16"),
    ]
    for other, said in others:
        with pytest.raises(InputError, match=said):
            resumed(other, str(journal.path))


def test_a_run_without_samples_leaves_no_file(tmp_path: Path, tiny_moe: Path) -> None:
    plan = make_plan(tiny_moe, None, n_prompt=8, n_gen=8)
    with pytest.raises(RuntimeError), begun(plan) as journal:
        assert journal.path is not None and journal.path.is_file()
        raise RuntimeError
    assert journal.path is None
    with pytest.raises(InputError, match="no interrupted bench"):
        resumed(plan)
    assert run(plan, begun(plan), stop_after=0)[0] == []
    run(plan, begun(plan), stop_after=1)
    assert resumed(plan).n_done == 1


def test_partial_rows_say_so(tmp_path: Path, tiny_moe: Path) -> None:
    plan = make_plan(tiny_moe, None, dataset=write_conversations(tmp_path))
    rows, _ = run(plan, begun(plan), stop_after=4)
    assert [(len(row.samples), row.n_planned, row.is_partial) for row in rows] == [(2, 6, True)] * 2
    assert rows[0].tg is not None and rows[0].tg.stddev is None
    record = as_dict(rows[0])
    assert [record[key] for key in ("n_samples", "n_samples_planned", "tg_ts_stddev", "scatter")] == [2, 6, None, None]
    assert [row["partial"] for row in table_rows(render(rows, "md"))] == ["2 of 6"] * 2
    assert record["other_load"] >= 0 and record["other_load_before"] >= 0


def test_a_disk_without_room_gets_no_file(tiny_moe: Path, here: Here) -> None:
    plan = make_plan(tiny_moe, None, n_prompt=8, n_gen=8)
    here.set_disk(1 << 20)
    journal = begun(plan)
    assert journal.path is None
    assert len(run(plan, journal)[0]) == 4


def test_scripted_answers_go_on(tiny_moe: Path, tiny_draft: Path) -> None:
    plan = replace(make_plan(tiny_moe, tiny_draft, n_prompt=0, n_gen=8), tests=(), scripted=(ScriptedTest(8, 0.5),))
    journal = begun(plan)
    run(plan, journal, stop_after=4)
    with pytest.raises(InputError, match="accept"):
        resumed(replace(plan, scripted=(ScriptedTest(8, 0.7),)), str(journal.path))
    rows, recorder = run(plan, resumed(plan))
    assert len(recorder.samples) == 2 * 3 and [len(row.samples) for row in rows] == [2] * 3
    for row in rows:  # all modes and repetitions have the same texts
        assert [sample.tokens for sample in row.samples] == [sample.tokens for sample in rows[0].samples]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_ends_the_writing_and_not_the_run(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    plan = make_plan(tiny_moe, tiny_draft, dataset=write_conversations(tmp_path), n_prompt=0, n_gen=0)
    full = Path("/dev/full")
    with Journal(full, [settings_of(plan, read_provenance())]) as journal:  # its first line does not fit
        assert journal.path is None
    _, recorder = run(plan, begun(plan))
    place = (0, 0, "")
    later = Journal(full, [], [(place, recorder.samples[0])])
    _, again = run(plan, later)  # the first sample does not fit
    assert later.path is None
    assert len(again.samples) >= len(recorder.samples) - 1


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with pytest.raises(InputError):
        Journal.resume(str(file), [])
    heads = ("", "[]", '{"schema": "other"}', '{"schema": "moeedge-bench-run-1"}', '{"sch', '[{"schema": "x"}]')
    for head in heads:
        file.write_text(head)
        with pytest.raises(InputError) as caught:
            Journal.resume(str(file), [])
        assert "--resume alone" in caught.value.hint and file.read_text() == head
