"""`moeedge bench` from the outside: what stands on standard output, what it exits with, what bad input is told."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeedge import native
from moeedge.bench.output_check import Difference, OutputCheck
from moeedge.bench.records import SCHEMA, BenchRow, Environment
from moeedge.bench.samples import CacheFigures, spread
from moeedge.bench.scores import Scores
from moeedge.cli.bench import make_bench_plan
from moeedge.cli.bench_exit import exit_code
from moeedge.data import load_sample
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.ui.bench_views import difference_lines, render
from moeedge.ui.plots import draw_sweep, lines_of
from tests.support.commands import SIGNALS, refused, run, run_json

_QUICK = ["-n", "6", "-r", "1", "-t", "1", "--draft-max", "3"]


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """Two prompts of a user's, the second of two turns."""
    path = tmp_path / "talk.jsonl"
    path.write_text('{"prompt": "Tell me of the sea."}\n{"turns": ["Who are you?", "And I?"]}\n')
    return path


def test_json_is_one_array_of_flat_rows(tiny_moe: Path, tiny_draft: Path, talk: Path) -> None:
    result = run("bench", "-m", tiny_moe, "-md", tiny_draft, "--dataset", talk, *_QUICK, "-o", "json", "--cpu-moe")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["mode"], row["test"]) for row in rows] == [(m, "talk") for m in ("stock-ar", "stock-sd", "moeedge")]
    for row in rows:
        assert (row["schema"], row["threads"], row["n_predict"], row["gamma"]) == (
            SCHEMA, 1, 6, 0 if row["mode"] == "stock-ar" else 3,
        )  # fmt: skip
        assert row["limit_share"] == pytest.approx(
            row["tg_ts_median"] * row["bytes_per_token"] / row["read_bytes_per_s"]
        )
        assert row["output_compared"] == 2
        assert not any(isinstance(value, dict) for value in row.values())
    assert "repetition 1" in result.stderr
    if not any(device.kind in ("GPU", "IGPU") for device in native.devices()):
        assert "--cpu-moe has no effect" in " ".join(result.stderr.split())


def test_the_routing_of_the_answers_can_be_kept(tiny_moe: Path, tiny_draft: Path, talk: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.npz"
    rows = run_json("bench", "-m", tiny_moe, "-md", tiny_draft, "--dataset", talk, *_QUICK, "--trace-out", out)
    trace = Trace.load(out)
    assert (trace.meta.gamma, trace.meta.source.split()[-1]) == (3, "bench")
    assert trace.meta.parameters["mode"] == "moeedge" and trace.expert_bytes() is not None
    assert np.unique(trace.sequence).size == 3  # two prompts, one of two turns
    assert np.count_nonzero(trace.phase == Phase.VERIFY) > 0
    assert [row["mode"] for row in rows] == ["stock-ar", "stock-sd", "moeedge"]


def test_without_a_draft_n_grams_draft_what_pays(tiny_moe: Path, talk: Path) -> None:
    rows = run_json("bench", "-m", tiny_moe, "--dataset", talk, "-n", "6", "-r", "1", "-t", "1")
    assert [(row["mode"], row["draft"], row["auto_gamma"]) for row in rows] == [
        ("stock-ar", "none", False),
        ("stock-sd", "ngram", False),
        ("moeedge", "ngram", True),
    ]


def test_json_lines_csv_and_markdown(tiny_moe: Path, talk: Path) -> None:
    common = ["-m", tiny_moe, "-md", "none", "--dataset", talk, *_QUICK]
    lines = run("bench", *common, "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["mode"] for line in lines] == ["stock-ar", "moeedge"]
    table = list(csv.DictReader(io.StringIO(run("bench", *common, "-o", "csv").stdout)))
    assert [row["output_check"] for row in table] == ["2/2", "2/2"]
    assert float(table[1]["tg_ts"]) > 0
    assert table[0]["acceptance_rate"] == ""
    text = run("bench", *common).stdout
    heads, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert "tg t/s" in heads
    assert set(rule) <= set("|-:")
    assert len(rows) == 2
    assert all(len(line) == len(heads) for line in rows)
    assert "no draft" in text


def test_without_a_dataset_llama_benchs_tests_run(tiny_moe: Path, tiny_draft: Path) -> None:
    result = run("bench", "-m", tiny_moe, "-md", tiny_draft, "-p", "16", "-n", "4", "-r", "2", "-t", "1", "-o", "json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["test"], row["mode"]) for row in rows] == [
        ("pp16", "stock-ar"), ("pp16", "moeedge"), ("tg4", "stock-ar"), ("tg4", "moeedge"),
    ]  # fmt: skip
    assert len(rows[0]["pp_ts_samples"]) == 2
    assert "stock-sd" in result.stderr


def test_our_sample_is_named_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_moe: Path) -> None:
    monkeypatch.delenv("MOEEDGE_DATA", raising=False)
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no server may be asked
    arguments = ["-m", tiny_moe, "--dataset", "mtbench", "--offline-sample", "--limit", "1", *_QUICK]
    rows = run_json("bench", *arguments)
    assert {row["test"] for row in rows} == {row["dataset"] for row in rows} == {"sample"}
    assert "mtbench" not in {row["test"] for row in rows}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "Hi"}\n{"prompt": oops}\n', "talk.jsonl, line 2:"),
        ('{"prompt": "Hi"}\n{"text": "Hi"}\n', "talk.jsonl, line 2:"),
        ("", "talk.jsonl"),
    ],
)
def test_a_malformed_file_exits_with_2_and_the_line(tiny_moe: Path, talk: Path, content: str, said: str) -> None:
    talk.write_text(content)
    assert said in refused("bench", "-m", tiny_moe, "--dataset", talk)


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_a_signal_prints_what_was_measured(tiny_moe: Path, talk: Path, signum: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "moeedge", "bench", "-m", str(tiny_moe), "-md", "none", "--dataset", str(talk)]
    with subprocess.Popen(
        [*command, "-n", "4", "-r", "100000", "-t", "1", "-o", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "repetition 2" in line:
                break
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    rows = json.loads(out)
    assert [row["mode"] for row in rows] == ["stock-ar", "moeedge"]
    assert len(rows[0]["samples"]) == len(rows[1]["samples"]) >= 3
    assert "Interrupted" in err
    assert "Traceback" not in err


def test_what_the_options_mean_together(tiny_moe: Path) -> None:
    base = EngineConfig(model=tiny_moe, draft="ngram")
    plain, _ = make_bench_plan(
        base, "stock-ar", None, limit=None, n_prompt=None, n_predict=None, repetitions=3, ignore_eos=False
    )
    assert (plain.n_prompt, plain.n_gen, plain.dataset) == (512, 128, None)
    with_data, _ = make_bench_plan(
        base, "stock-ar", load_sample(), limit=3, n_prompt=64, n_predict=32, repetitions=1, ignore_eos=True
    )
    assert (with_data.n_prompt, with_data.n_gen, with_data.n_predict) == (64, 0, 32)
    assert with_data.dataset is not None
    assert len(with_data.dataset.prompts) == 3


@pytest.mark.parametrize(
    ("mode", "work"),
    [
        ("stock-ncmoe", ["-p", "8", "-n", "4"]),
        ("stock-fit", ["-p", "8", "-n", "4"]),
        ("stock-ncmoe", ["--dataset", "sample", "--limit", "1"]),
        ("stock-sd", []),
    ],
)
def test_without_a_mode_that_can_run_the_reason_is_told(tiny_moe: Path, mode: str, work: list[str]) -> None:
    said = refused("bench", "-m", tiny_moe, "-md", "none", "--modes", mode, *work)
    assert said.count(f"{mode} is left out: ") == 1


def _row(output: OutputCheck) -> BenchRow:
    environment = Environment("0.1.0", "f" * 40, True, "0.3.36", "A CPU", "Linux", "3.11", "2026-01-01T00:00:00+00:00")
    setup = {**vars(environment), "model": "m.gguf", "threads": 2, "draft": "d.gguf", "gamma": 4, "n_ctx": 256}
    return BenchRow(
        mode="moeedge", test="qa", policy="none", cache_ratio=None,
        pp=spread([100.0, 200.0]), tg=spread([10.0]), tg_drained_ts=9.5, drain_s=0.1, ttft_s=0.25, acceptance_rate=0.5,
        tokens_per_step=2.5, experts_per_verification=31.25, cache=CacheFigures(), output=output, scores=Scores(),
        ratio=1.234, ratio_pp=None, ratio_drained=1.2, ratio_cpu=None, setup={**setup, "repetitions": 2}, samples=(),
    )  # fmt: skip


def test_a_difference_that_is_no_near_tie_fails(capsys: pytest.CaptureFixture[str]) -> None:
    tie = Difference("7", 1, 0, 4, 11, 12, 0.01, True)
    wrong = Difference("8", 0, 0, 2, 11, None, 3.5, False)
    tied = _row(OutputCheck(equal=7, compared=8, near_ties=(tie,)))
    assert exit_code([tied]) == 0
    assert difference_lines([tied]) == [
        "near-tie: moeedge, qa prompt 7, turn 2, token 5: token 12 instead of token 11, 0.0100 logits apart"
    ]
    failed = _row(OutputCheck(equal=6, compared=8, near_ties=(tie,), different=(wrong,)))
    assert exit_code([failed]) == 1
    assert "1 position(s)" in capsys.readouterr().err
    assert difference_lines([failed])[1].startswith("DIFFERENT: moeedge, qa prompt 8, turn 1, token 3: the end instead")


def test_the_table() -> None:
    text = render([_row(OutputCheck(equal=8, compared=8))], "md")
    heads, _, row = text.splitlines()[:3]
    cells = dict(zip(heads.replace(" ", "").split("|"), row.replace(" ", "").split("|"), strict=True))
    assert cells["ppt/s"] == "150.00±70.71"
    assert cells["TTFTms"] == "250.0"
    assert cells["experts/step"] == "31.2"
    assert (cells["output"], cells["tgratio"], cells["ppratio"]) == ("8/8", "1.234", "-")
    assert "commit ffffffffff (changed)" in text
    assert "m.gguf, draft d.gguf (gamma 4); A CPU, threads: 2, context: 256, repetitions: 2" in text
    assert "policy" not in heads
    assert render([], "md") == ""
    assert json.loads(render([], "json")) == []


def test_a_sweep_from_the_command_line(tiny_moe: Path, tiny_draft: Path, talk: Path, tmp_path: Path) -> None:
    arguments = ["--policy", "lru,static", "--cache-ratio", "0.25,0.5", "-dev", "emulated", "--no-calibrate"]
    picture = tmp_path / "sweep.svg"
    models = ["-m", tiny_moe, "-md", tiny_draft]
    rows = run_json("bench", *models, "--dataset", talk, *_QUICK, *arguments, "--plot", picture)
    swept = [row for row in rows if row["mode"] == "moeedge"]
    assert [(row["policy"], row["cache_ratio"]) for row in swept] == [
        ("lru", 0.25), ("lru", 0.5), ("static", 0.25), ("static", 0.5),
    ]  # fmt: skip
    assert all(0 <= row["hit_rate_pairs"] <= 1 and row["device"].startswith("emulated") for row in swept)
    assert "<svg" in picture.read_text()


def _swept(policy: str, ratio: float, hits: float) -> BenchRow:
    row = _row(OutputCheck(equal=8, compared=8))
    figures = CacheFigures(
        hit_rate_pairs=hits, hit_rate_experts=hits / 2, uploads_per_layer_step=12.34, bytes_moved=3 << 20
    )
    setup = row.setup | {"device": "emulated (CPU)"}
    return replace(row, policy=policy, cache_ratio=ratio, cache=figures, setup=setup, ratio=1 + hits)


def test_the_table_of_a_sweep() -> None:
    text = render([_row(OutputCheck(equal=8, compared=8)), _swept("spac", 0.17, 0.5)], "md")
    heads, _, stock, swept = text.splitlines()[:4]
    names = heads.replace(" ", "").split("|")
    cells = dict(zip(names, swept.replace(" ", "").split("|"), strict=True))
    assert (cells["policy"], cells["cache"], cells["pairhits"], cells["experthits"]) == (
        "spac",
        "0.17",
        "0.500",
        "0.250",
    )
    assert (cells["uploads"], cells["MiBmoved"]) == ("12.34", "3.0")
    plain = dict(zip(names, stock.replace(" ", "").split("|"), strict=True))
    assert (plain["policy"], plain["cache"], plain["pairhits"], plain["MiBmoved"]) == ("-", "-", "-", "-")
    assert "emulated (CPU)" in text


def test_the_picture_has_a_line_per_policy(tmp_path: Path) -> None:
    rows = [
        _swept(policy, ratio, ratio * best) for policy, best in (("spac", 1), ("lru", 0.5)) for ratio in (0.5, 0.17)
    ]
    lines = lines_of([_row(OutputCheck(equal=8, compared=8)), *rows], lambda row: row.cache.hit_rate_pairs)
    assert lines == {"spac": [(0.17, 0.17), (0.5, 0.5)], "lru": [(0.17, 0.085), (0.5, 0.25)]}
    picture = tmp_path / "sweep.png"
    assert draw_sweep(rows, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not draw_sweep([_row(OutputCheck(equal=8, compared=8))], tmp_path / "none.png")
    with pytest.raises(InputError, match="picture"):
        draw_sweep(rows, tmp_path / "absent" / "sweep.png")
