"""`moeedge lab rivals`: what programs print, which of their settings count, and runs that fail or are interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moeedge.bench.journal import Journal
from moeedge.errors import EngineError, InputError
from moeedge.hardware.provenance import read_provenance
from moeedge.lab.experiments.rivals import (
    DRAFTS,
    RivalPlan,
    RivalSample,
    Variant,
    make_rows,
    measure,
    outrun,
    read_llama_bench,
    read_spec_bench,
    read_speculative,
    settings_of,
)
from moeedge.run import Run
from tests.lab.cli.test_schemas import errors
from tests.support.commands import refused, run, run_json

LLAMA_BENCH = os.environ.get("MOEEDGE_LLAMA_BENCH", "")
IK_LLAMA_BENCH = os.environ.get("MOEEDGE_IK_LLAMA_BENCH", "")
# 100 tokens/s, less by what the settings say; -rtr 1 fails as on a full memory
FAKE = """\
#!{python}
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if words.get("-rtr") == "1":
    sys.exit("loading ...\\nno memory")
n, speed = int(words["-r"]), 100 - 50 * (words.get("--repack") == "0") - 20 * (words.get("-fa") == "0")
tests = [(int(p), 0) for p in words["-p"].split(",") if int(p)] + [(0, int(words["-n"]))]
rows = [dict(build_number=7, build_commit="abc", n_prompt=p, n_gen=g, samples_ns=n * [(p or g) * 10**9 // speed])
        for p, g in tests]
print("~ [a line of ik_llama.cpp]")
print(json.dumps(rows, indent=2))
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "llama-bench"
    path.write_text(FAKE.replace("{python}", sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return path


def test_the_command_takes_the_fastest_settings(tiny_moe: Path, fake: Path) -> None:
    programs = ("--llama-bench", fake, "--ik-llama-bench", fake)
    sizes = ("-p", "8,2", "-n", 4, "-t", 1, "-r", 1, "--samples", 2)
    rows = run_json("lab", "rivals", "-m", tiny_moe, *sizes, *programs)
    assert not errors("rivals", rows)
    assert [row["test"] for row in rows] == ["pp8", "pp2", "tg4"]
    for row in rows:
        assert set(row["speeds"]) == {"llama.cpp", "ik_llama.cpp", "stock", "moeedge"}
        assert row["speeds"]["llama.cpp"] == row["speeds"]["ik_llama.cpp"] == pytest.approx(100, rel=0.01)
        assert row["settings"] == {
            "llama.cpp": "--repack 1", "ik_llama.cpp": "-fa 1 -rtr 0", "stock": "stock-ar", "moeedge": "moeedge-ar"
        }  # fmt: skip
        assert row["threads"] == 1 and row["fastest"] == "stock stock-ar"
        assert row["ratio"] == pytest.approx(row["speeds"]["moeedge"] / row["speeds"]["stock"])
        assert {sample["build"] for sample in row["samples"]} == {"7 (abc)", row["version"]}
        assert {sample["tokens"] for sample in row["samples"]} == {2 * int(row["test"][2:])}
        limits = [sample["limit_ts"] for sample in row["samples"] if sample["rival"] == "moeedge"]
        assert limits == [row["limit_ts"]] and limits[0] > 0


def test_programs_that_are_not_named_are_left_out(
    tiny_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = {"decode_tokens": 2, "decode_s": 0.5}
    row = {"test": "tg4", "n_prompt": 0, "dataset": None, "version": "1", "samples": [sample, sample]}
    monkeypatch.setattr("moeedge.lab.experiments.rivals._output", lambda command: json.dumps([row]))
    rivals = ("lab", "rivals", "-m", tiny_moe, "-p", "0", "-n", 4, "-t", 1)
    result = run(*rivals, "-o", "csv")
    assert result.exit_code == 0 and "--ik-llama-bench" in result.stderr
    header, line = result.stdout.splitlines()
    assert header.endswith(",stock,moeedge") and line.endswith(",4.0,4.0")
    assert "| tg4  |      4.00 |        4.00 | 1.00 (1.00 to 1.00) | stock stock" in run(*rivals, "-o", "md").stdout
    assert "versions: stock 1, moeedge 1" in run(*rivals).stdout
    assert "absent" in refused(*rivals, "--llama-bench", tmp_path / "absent")


def test_what_programs_print() -> None:
    text = "encoded   35 tokens in    0.252 seconds\ndecoded   61 tokens in    0.500 seconds, speed:  122.000 t/s"
    assert list(read_speculative(text)) == [(DRAFTS, 61, 0.5, "", None)]
    with pytest.raises(ValueError):
        list(read_speculative("encoded   35 tokens in    0.252 seconds"))
    attempt = {"row_type": "attempt", "generated": 8, "decode_s": 0.5, "error": None}
    lines = [json.dumps(row, separators=(",", ":")) for row in (attempt, {"row_type": "summary"})]
    assert list(read_spec_bench("\n".join(["loading", *lines]))) == [(DRAFTS, 8, 0.5, "", None)]
    with pytest.raises(ValueError, match="context"):
        list(read_spec_bench(lines[0].replace("null", '"context"')))
    with pytest.raises(ValueError):
        list(read_llama_bench("no JSON"))


def test_the_variants_of_an_answer(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    notes: list[str] = []
    program = tmp_path / "speculative"
    plan = RivalPlan(target=tiny_moe, draft_file=tiny_draft, ik_speculative=program, draft_max=(2, 8), threads=3)
    variants = list(plan.variants(tmp_path, Run(notes.append)))
    drafting = {variant.settings: variant for variant in variants[2:]}
    assert list(drafting) == [
        *("stock-ar", "stock-ngram:8", "stock-sd:2/p0", "stock-sd:8/p0", "stock-sd:8/p0.75", "moeedge:auto"),
        *("2/p0", "8/p0", "8/p0.75"),
    ]
    command = " ".join(drafting["8/p0.75"].command)
    assert command.startswith(str(program)) and "draft:n_max=8,n_min=0,p_min=0.75" in command
    assert all("-t 3" in " ".join(variant.command) for variant in variants)
    assert sum("left out" in note for note in notes) == 3


def plan_of(model: Path, **changes: Any) -> RivalPlan:
    return RivalPlan(target=model, repetitions=2, threads=1, **changes)


def variant(rival: str, settings: str, log: Path, *, seconds: float = 1.0, code: int = 0) -> Variant:
    """A program that says that it ran, and takes so long for a token."""
    program = f"open({str(log)!r}, 'a').write('{rival} {settings}\\n'); exit({code} and 'boom')"
    return Variant(rival, settings, (sys.executable, "-c", program), lambda _: iter([("tg1", 1, seconds, "1", None)]))


def measured(plan: RivalPlan, variants: list[Variant], journal: Journal, run: Run) -> list[RivalSample]:
    with journal:
        return list(measure(plan, variants, journal, run))


def nonsense(samples: str) -> str:
    about = '"build_number": 1, "build_commit": "a", "n_prompt": 8, "n_gen": 0'
    return f'[\n{{{about}, "samples_ns": {samples}}}]'


def test_processes_take_turns_and_failing_rivals_are_left_out(tmp_path: Path, tiny_moe: Path) -> None:
    plan, log, notes = plan_of(tiny_moe), tmp_path / "log", list[str]()
    make = partial(variant, log=log)
    variants = [make("moeedge", "auto"), make("llama.cpp", "a", seconds=2.0), make("ik_llama.cpp", "b", code=1)]
    samples = measured(plan, variants, Journal.begin([]), Run(notes.append))
    turns = ["moeedge auto", "llama.cpp a", "ik_llama.cpp b", "llama.cpp a", "moeedge auto"]
    assert log.read_text().splitlines() == turns
    assert [(sample.rival, sample.repetition, sample.order) for sample in samples] == [
        ("moeedge", 0, 0), ("llama.cpp", 0, 1), ("llama.cpp", 1, 0), ("moeedge", 1, 2)
    ]  # fmt: skip
    assert len(notes) == 1 and "ik_llama.cpp b" in notes[0] and "boom" in notes[0]
    (row,) = make_rows(plan, samples, source=read_provenance(), other_load_before=0.0)
    assert (row.speeds, row.fastest, row.ratio) == ({"llama.cpp": 0.5, "moeedge": 1.0}, "llama.cpp a", 2.0)
    assert row.low == pytest.approx(2.0) and row.high == pytest.approx(2.0)
    for output, reason in (("nonsense", "no JSON"), ('[\n{"n_prompt": 8}]', "build_number"),
                           (nonsense("[0]"), "a time"),
                           (nonsense('["x"]'), "not as expected"), (nonsense("[NaN]"), "a time")):  # fmt: skip
        bad = replace(variants[2], command=(sys.executable, "-c", f"print({output!r})"), read=read_llama_bench)
        notes.clear()
        assert not [sample for sample in measured(plan, [variants[0], bad], Journal.begin([]), Run(notes.append))
                    if sample.rival != "moeedge"]  # fmt: skip
        assert len(notes) == 1 and reason in notes[0]
    with pytest.raises(EngineError, match="moeedge auto"):
        measured(plan, [make("moeedge", "auto", code=1)], Journal.begin([]), Run())


def test_settings_that_lose_every_test_are_measured_once(tmp_path: Path, tiny_moe: Path) -> None:
    log, notes = tmp_path / "log", list[str]()
    make = partial(variant, log=log)
    variants = [make("moeedge", "auto"), make("ik_llama.cpp", "fast"), make("ik_llama.cpp", "slow", seconds=1.2)]
    variants.append(replace(make("llama.cpp", "a"), once=True))
    variants.append(replace(make("ik_llama.cpp", "lucky", seconds=0.9), once=True))
    samples = measured(plan_of(tiny_moe), variants, Journal.begin([]), Run(notes.append))
    (row,) = make_rows(plan_of(tiny_moe), samples, source=read_provenance(), other_load_before=0.0)
    assert row.fastest == "ik_llama.cpp fast" and row.ratio == row.low == pytest.approx(1.0)
    assert log.read_text().splitlines()[5:] == ["ik_llama.cpp fast", "moeedge auto"]
    assert len(notes) == 1 and "ik_llama.cpp slow" in notes[0]
    tests = [("a", "pp2", 1.0), ("a", "tg1", 1.0), ("b", "pp2", 1.3), ("b", "tg1", 1.1), ("c", "pp2", 1.2)]
    samples = [RivalSample("ik_llama.cpp", mode, test, 0, 0, 1, time, "") for mode, test, time in tests]
    assert outrun(samples) == {"ik_llama.cpp c"}  # b nearly keeps up in one test


def test_an_interrupted_run_goes_on(tmp_path: Path, tiny_moe: Path) -> None:
    plan, log = plan_of(tiny_moe), tmp_path / "log"
    variants = [variant("moeedge", "auto", log), variant("llama.cpp", "a", log)]
    settings = [settings_of(plan, read_provenance())]
    lines: Callable[[], list[str]] = lambda: log.read_text().splitlines()  # noqa: E731
    journal = Journal.begin(settings)
    first = measured(plan, variants, journal, Run(cancelled=lambda: len(lines()) == 3))
    assert len(first) == 3 and journal.path is not None
    resumed = Journal.resume(str(journal.path), settings, RivalSample)
    samples = measured(plan, variants, resumed, Run())
    assert samples[:3] == first and len(samples) == len(lines()) == 4
    with pytest.raises(InputError, match="repetitions: 2, now 3"):
        Journal.resume(str(journal.path), [settings_of(replace(plan, repetitions=3), read_provenance())], RivalSample)


@pytest.mark.parametrize(
    ("program", "words"),
    [(LLAMA_BENCH, "--repack 0"), (IK_LLAMA_BENCH, "-fa 1 -rtr 1")],
    ids=["MOEEDGE_LLAMA_BENCH", "MOEEDGE_IK_LLAMA_BENCH"],
)
def test_the_real_programs(program: str, words: str, tiny_moe: Path) -> None:
    if not program:
        pytest.skip("MOEEDGE_LLAMA_BENCH and MOEEDGE_IK_LLAMA_BENCH name no program")
    plan = replace(
        plan_of(tiny_moe), n_prompt=(8,), n_predict=4, llama_bench=Path(program), ik_llama_bench=Path(program)
    )
    command = next(v.command for v in plan.variants(tiny_moe.parent, Run()) if v.settings == words)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [(test, tokens) for test, tokens, *_ in read_llama_bench(done.stdout)] == [("pp8", 8), ("tg4", 4)]
    assert json.dumps(command)
