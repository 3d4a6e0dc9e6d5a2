"""`moeedge bench` from the outside: what stands on standard output, and what it exits with."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from moeedge.bench.config import SyntheticTest
from moeedge.bench.journal import Journal
from moeedge.cli import bench_run
from moeedge.cli.bench_options import _gpu_layers, sizes
from moeedge.cli.bench_run import make_bench_plan
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError, InputError
from moeedge.native.abi import Phase
from tests.bench.recording import RecordedBench, Recorder
from tests.support.commands import SIGNALS, refused, run, run_json
from tests.support.traces import make_trace


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """Two prompts of a user's, the second of two turns."""
    path = tmp_path / "talk.jsonl"
    path.write_text('{"prompt": "Tell me of the sea."}\n{"turns": ["Who are you?", "And I?"]}\n')
    return path


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    """Prompts with references, one of them a program."""
    rows = (
        {"category": "a", "prompt": "the cat and the dog", "reference": {"scorer": "contains", "expect": "the"}},
        {"category": "b", "prompt": "we saw the sea", "reference": {"scorer": "exact", "expect": "xyzzy"}},
        {"category": "code", "prompt": "Set x", "reference": {"scorer": "code", "tests": "pass"}},
    )
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_error_hides_no_row_that_was_measured(
    tiny_moe: Path, talk: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["bench", "-m", tiny_moe, "-md", "none", "--dataset", talk, "-n", "4", "-r", "3", "-t", "1", "-o", "json"]
    add, calls = Journal.add, count(1)

    def failing(self: Journal, *place: Any) -> None:
        add(self, *place)
        if next(calls) == 8:  # 3 turns, 2 modes
            raise EngineError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", failing)
        result = run(*command)
    rows = json.loads(result.stdout)
    assert result.exit_code == 1 and "the device is gone" in result.stderr and "--resume" in result.stderr
    assert {len(row["samples"]) for row in rows} == {3} and len(rows) == 2  # whole repetitions
    again = run_json(*command, "--resume")
    assert {len(row["samples"]) for row in again} == {9}


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_an_interrupted_run_prints_what_was_measured_and_is_resumed(
    tiny_moe: Path, talk: Path, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "moeedge", "bench", "-m", str(tiny_moe), "-md", "none", "--dataset", str(talk)]
    command += ["-n", "4", "-r", "150", "-t", "1", "-o", "json"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "MOEEDGE_CACHE": str(tmp_path / "kept")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "repetition 2" in line:
                break
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Interrupted" in err and "Traceback" not in err
    rows = json.loads(out)
    assert [(row["mode"], row["n_samples_planned"]) for row in rows] == [("stock-ar", 450), ("moeedge", 450)]
    assert len(rows[0]["samples"]) == len(rows[1]["samples"]) >= 3
    (kept,) = (tmp_path / "kept" / "bench_runs").iterdir()
    assert f"--resume {kept}" in " ".join(err.split())
    n_kept = len(kept.read_text().splitlines()) - 1
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    assert f"{n_kept} samples are from" in " ".join(again.stderr.split())
    assert all(row["n_samples"] == row["n_samples_planned"] == 450 for row in json.loads(again.stdout))
    assert not list((tmp_path / "kept" / "bench_runs").iterdir())


@pytest.mark.parametrize(("mode", "work"), [("stock-ncmoe", ["-p", "8", "-n", "4"]), ("stock-sd", [])])
def test_without_a_mode_that_can_run_the_reason_is_told(tiny_moe: Path, mode: str, work: list[str]) -> None:
    said = refused("bench", "-m", tiny_moe, "-md", "none", "--modes", mode, *work)
    assert said.count(f"{mode} is left out: ") == 1


@pytest.mark.parametrize(
    ("options", "has"),
    [([], False), (["-p", "8", "-n", "4"], False), (["-pg", "8,4"], False), (["-p", "8,16"], True),
     (["-d", "0,8"], True), (["-t", "1,2"], True), (["-fa", "0,1"], False)],
)  # fmt: skip
def test_a_plot_needs_an_axis(options: list[str], has: bool, monkeypatch: pytest.MonkeyPatch, tiny_moe: Path) -> None:
    asked = list[object]()
    monkeypatch.setattr(bench_run, "measure", lambda plans, *_, **__: asked.append(plans) or 0)
    result = run("bench", "-m", tiny_moe, "-md", "none", "-dev", "none", *options, "--plot", "picture.svg")
    assert (result.exit_code == 0, bool(asked)) == (has, has)


def test_ranges_are_llama_benchs() -> None:
    found = {"64,128": [64, 128], "1-4": [1, 2, 3, 4], "0-1024+512": [0, 512, 1024], "64-512*2": [64, 128, 256, 512]}
    assert {text: sizes(text, "-p") for text in found} == found
    assert _gpu_layers("0-2,1,all,auto,-1", "-ngl") == [0, 1, 2, 999, None]  # once each
    for text in ("", "a", "-3", "4-1", "0-8*2", "1-8*1", "1-8+0", "1.5"):
        with pytest.raises(InputError):
            sizes(text, "-p")
    for text in ("-2", "0,half"):
        with pytest.raises(InputError):
            _gpu_layers(text, "-ngl")


def test_depth_fills_the_context(tiny_moe: Path) -> None:
    """The tokens before a test are decoded, and not in its time."""
    decoded: list[int] = []
    base = EngineConfig(model=tiny_moe, n_threads=1)
    plan, _ = make_bench_plan(base, "stock-ar", None, tests=[SyntheticTest(8, 4, 32)])
    with RecordedBench(plan, Recorder()) as bench:
        target = bench.arms.reference.session.target
        decode = target.decode

        def counted(tokens: list[int], **options: object) -> None:
            decoded.append(len(tokens))
            decode(tokens, **options)  # type: ignore[arg-type]

        target.decode = counted  # type: ignore[method-assign,assignment]
        assert bench.measure()
        (row,) = bench.rows()
    assert decoded == [32, 8, 1, 1, 1, 1] * 4  # a warm-up and three repetitions
    assert {(sample.prefill_tokens, sample.decode_tokens) for sample in row.samples} == {(8, 4)}


def test_budgets_and_draft_lengths(pair: list[str], scored: Path, tmp_path: Path) -> None:
    text, picture = tmp_path / "text.txt", tmp_path / "curve.svg"
    text.write_text("the cat and the dog saw the sea " * 3)
    rows = run_json(
        "bench", *pair, "--dataset", scored, "--limit", "2", "-n", "8", "--no-warmup", "-dev", "none", "--score",
        "--expert-budget", "off,6", "--draft-max", "2,4", "--perplexity", text, "--plot", picture,
    )  # fmt: skip
    assert [(row["mode"], row["gamma"], row["budget"], row["expert_budget"], row["lossy"]) for row in rows] == [
        ("stock-ar", 0, None, None, False), ("stock-sd", 2, None, None, False), ("stock-sd", 4, None, None, False),
        ("moeedge", 2, None, None, False), ("moeedge", 2, "budget 6 (lossy)", 6, True),
        ("moeedge", 4, None, None, False), ("moeedge", 4, "budget 6 (lossy)", 6, True),
    ]  # fmt: skip
    ours = rows[3:]
    assert [row["perplexity_batch"] for row in ours] == [3, 3, 5, 5]
    assert all(row["perplexity"] > 1 for row in ours)
    assert all((row["ratio_unbudgeted"], row["agreement"], row["score_change"]) == (1.0, 1.0, 0.0) for row in ours[::2])
    for row in ours[1::2]:
        assert row["experts_max"] <= 6 < row["experts_natural"]
        assert row["experts_per_verification"] <= 6
        assert 0 < row["kept_probability"] < 1
    assert "<svg" in picture.read_text()


def test_scores_have_answers_and_reasons(tiny_moe: Path, scored: Path) -> None:
    common = ["-m", tiny_moe, "-md", "none", "--dataset", scored, "--score", "-n", "4", "-t", "1", "--no-warmup"]
    for row in run_json("bench", *common, "--run-code"):
        assert not any(isinstance(value, dict) for value in row.values())
        assert (row["n_scored"], row["n_answers"], row["n_cut"], row["run_code"]) == (3, 3, 3, True)
        assert [one["category"] for one in row["score_by_category"]] == ["a", "b", "code"]
        assert all(isinstance(sample["answer"], str) for sample in row["samples"])
    table = list(csv.DictReader(io.StringIO(run("bench", *common, "-o", "csv").stdout)))
    assert [(row["mode"], row["n_scored"]) for row in table] == [("stock-ar", "2"), ("moeedge", "2")]
    assert json.loads(table[0]["unscored"])[0]["n"] == 1


def test_routing_and_acceptance_that_are_forced(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    """What the rows say of them, and what `lab surface` makes of the record."""
    trace, record = tmp_path / "trace.npz", tmp_path / "record.json"
    make_trace([(Phase.DECODE, n // 40, n, True) for n in range(160)], n_layers=3, n_experts=16, n_used=4).save(trace)
    rows = run_json(
        "bench", "-m", tiny_moe, "-md", tiny_draft, "-dev", "none", "--ram", "off", "-t", 1, "-n", 24, "-r", 2,
        "--routing", trace, "--accept", ".3,.9", "--modes", "stock-ar,stock-sd:1,stock-sd:4,moeedge:auto,moeedge:2",
    )  # fmt: skip
    assert [(row["mode"], row["gamma"]) for row in rows if row["acceptance"] == 0.9] == [
        ("stock-ar", 0), ("stock-sd", 1), ("stock-sd", 4), ("moeedge", 16), ("moeedge", 2),
    ]  # fmt: skip
    for row in rows:
        assert row["routing"] == trace.name and row["routing_scaling"] == "" and len(row["trace_sha256"]) == 64
        assert row["routing_cost"] is not None and row["confidences"] == "calibrated"
        assert row["routing_boundaries"][0][:2] == [0, 40]
        assert row["output_check"] is None
        assert row["mode"] != "moeedge" or row["best_stock"]
    fixed = {row["gamma"]: row for row in rows if row["acceptance"] == 0.9 and not row["auto_gamma"]}
    assert fixed[1]["acceptance_rate"] > 0.6 and fixed[4]["tokens_per_step"] > fixed[1]["tokens_per_step"]
    record.write_text(json.dumps(rows), encoding="utf-8")
    surface = run_json("lab", "surface", record)
    assert [point["acceptance"] for point in surface["points"]] == [0.3, 0.9]
    assert all(point["draft_cost"] > 0 and point["fixed_gamma"] == 2 for point in surface["points"])
    assert {each["acceptance"] for each in surface["break_even"]} == {0.3, 0.9}
    assert "T_D / T_T" in run("lab", "surface", record).stdout
