"""`moeedge bench` from the outside: what stands on standard output, what it exits with, what bad input is told."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from moeedge import native
from moeedge.bench.config import SyntheticTest
from moeedge.bench.output_check import Difference, OutputCheck
from moeedge.bench.records import SCHEMA, BenchRow
from moeedge.bench.samples import CacheFigures, spread
from moeedge.bench.scores import Scores
from moeedge.cli import bench_run
from moeedge.cli.bench_options import SyntheticOptions, _gpu_layers, sizes
from moeedge.cli.bench_run import exit_code, make_bench_plan
from moeedge.data.datasets import load_sample
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.hardware.provenance import Provenance
from moeedge.ui.bench_plots import cache_plots, draw
from moeedge.ui.bench_views import difference_lines, quiet_lines, render, withheld_lines
from moeedge.ui.plots import default_plots
from tests.bench.recording import RecordedBench, Recorder
from tests.support.answers import setup_of
from tests.support.commands import SIGNALS, refused, run, run_json
from tests.support.markdown import table_rows

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
    rows = table_rows(text)
    assert [row["mode"] for row in rows] == ["stock-ar", "moeedge"] and {"tg t/s", "tokens/step"} <= set(rows[0])
    (model,) = table_rows(text, "model")
    assert (model["backend"], model["threads"]) == ("CPU", "1") and model["params"].endswith(" K")
    assert max(map(len, text.splitlines())) <= 100
    assert "no draft" in text
    plain = run("bench", *common, "-o", "text").stdout
    assert "|" not in plain and max(map(len, plain.splitlines())) <= 100
    with sqlite3.connect(":memory:") as base:
        base.executescript(run("bench", *common, "-o", "sql").stdout)
        found = base.execute('SELECT mode, output_check, tg_ts > 0, acceptance_rate, "limit" FROM moeedge_bench')
        assert found.fetchall() == [("stock-ar", "2/2", 1, None, None), ("moeedge", "2/2", 1, None, None)]


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
        base, "stock-ar", None, tests=SyntheticOptions().tests(None, has_dataset=False), repetitions=3
    )
    assert ([test.name for test in plain.tests], plain.dataset) == (["pp512", "tg128"], None)
    with_data, _ = make_bench_plan(
        base,
        "stock-ar",
        load_sample(),
        limit=3,
        tests=SyntheticOptions(n_prompt=[64]).tests([32], has_dataset=True),
        n_predict=32,
        repetitions=1,
        ignore_eos=True,
    )
    assert ([test.name for test in with_data.tests], with_data.n_predict) == (["pp64"], 32)
    assert with_data.dataset is not None
    assert len(with_data.dataset.prompts) == 3


@pytest.mark.parametrize(
    ("mode", "work"),
    [
        ("stock-ncmoe", ["-p", "8", "-n", "4"]),
        ("stock-ncmoe", ["--dataset", "sample", "--limit", "1"]),
        ("stock-sd", []),
    ],
)
def test_without_a_mode_that_can_run_the_reason_is_told(tiny_moe: Path, mode: str, work: list[str]) -> None:
    said = refused("bench", "-m", tiny_moe, "-md", "none", "--modes", mode, *work)
    assert said.count(f"{mode} is left out: ") == 1


def _row(output: OutputCheck) -> BenchRow:
    environment = Provenance("0.1.0", "f" * 40, True, "0.3.36", "A CPU", "Linux", "3.11", "2026-01-01T00:00:00+00:00")
    setup = {**vars(environment), "model": "m.gguf", "threads": 2, "draft": "d.gguf", "gamma": 4, "n_ctx": 256}
    setup["repetitions"] = 2
    setup |= {"model_description": "qwen3moe", "model_bytes": 1 << 30, "model_n_params": 2 * 10**9, "backend": "CPU"}
    return BenchRow(
        mode="moeedge", test="qa", policy="none", cache_ratio=None,
        pp=spread([100.0, 200.0]), tg=spread([10.0]), tg_drained_ts=9.5, drain_s=0.1, ttft_s=0.25, acceptance_rate=0.5,
        tokens_per_step=2.5, experts_per_verification=31.25, cache=CacheFigures(), output=output, scores=Scores(),
        ratio=1.234, ratio_pp=None, ratio_drained=1.2, ratio_cpu=None, setup=setup_of(**setup), samples=(),
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
    (cells,) = table_rows(text)
    assert (cells["pp t/s"], cells["tg t/s"]) == ("150.00 ± 70.71", "10.00")
    assert cells["TTFT ms"] == "250.0"
    assert table_rows(text, "model")[0]["params"] == "2.00 B"
    assert cells["experts/step"] == "31.2"
    assert (cells["output"], cells["tg ratio"], cells.get("pp ratio")) == ("8/8", "1.234", None)
    assert "commit ffffffffff (changed)" in text
    assert "m.gguf, draft d.gguf (gamma 4); A CPU, threads: 2, context: 256, repetitions: 2" in text
    assert "policy" not in cells
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


def _listed(mode: str = "moeedge", **setup: object) -> BenchRow:
    row = _row(OutputCheck(equal=8, compared=8))
    return replace(row, mode=mode, setup=replace(row.setup, **setup))  # type: ignore[arg-type]


def _lines(rows: list[BenchRow]) -> list[list[tuple[str, list[float]]]]:
    """Names and x of the lines of each default plot."""
    plots = default_plots(rows, lambda row: row.label)
    return [[(line.label, list(line.x)) for line in plot.lines] for plot in plots]


def test_default_plots_are_over_what_differs() -> None:
    modes = (("stock-ar", 0), ("moeedge", 4))
    by_threads = [_listed(mode, threads=n, gamma=gamma) for mode, gamma in modes for n in (2, 1)]
    assert _lines(by_threads) == [[("stock-ar", [1, 2]), ("moeedge", [1, 2])]] * 3  # speeds and their ratio
    titles = [plot.y_label.split()[0] for plot in default_plots(by_threads, lambda row: row.mode)]
    assert titles == ["Prefill", "Decoding", "Decoding"]
    by_prompt = [_listed(n_prompt=n, flash_attn=attn) for attn in ("on", "off") for n in (512, 128)]
    lines = [("moeedge, flash_attn on", [128, 512]), ("moeedge, flash_attn off", [128, 512])]
    assert _lines(by_prompt) == [lines] * 3
    assert _lines([_listed(mode, gamma=gamma) for mode, gamma in modes]) == _lines([_listed(n_prompt=128)]) == []


def test_lists_are_drawn_next_to_a_cache(tmp_path: Path) -> None:
    rows = [replace(_swept("spac", 0.17, 0.5), setup=_listed(n_prompt=n).setup) for n in (128, 512)]
    assert draw(rows, tmp_path / "lists.svg")
    text = (tmp_path / "lists.svg").read_text()
    assert "Prompt" in text and "median of pairs" in text
    assert draw([replace(row, disturbed="load") for row in rows], tmp_path / "lists.svg")
    assert "median of pairs" not in (tmp_path / "lists.svg").read_text()  # withheld, as in the table


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


def _swept(policy: str, ratio: float, hits: float) -> BenchRow:
    row = _row(OutputCheck(equal=8, compared=8))
    figures = CacheFigures(
        hit_rate_pairs=hits, hit_rate_experts=hits / 2, uploads_per_layer_step=12.34, bytes_moved=3 << 20
    )
    setup = replace(row.setup, device="emulated (CPU)")
    return replace(row, policy=policy, cache_ratio=ratio, cache=figures, setup=setup, ratio=1 + hits)


def test_the_table_of_a_sweep() -> None:
    text = render([_row(OutputCheck(equal=8, compared=8)), _swept("spac", 0.17, 0.5)], "md")
    plain, cells = table_rows(text)
    assert [cells[name] for name in ("policy", "cache", "pair hits", "expert hits")] == [
        "spac",
        "0.17",
        "0.500",
        "0.250",
    ]
    assert (cells["uploads"], cells["MiB moved"]) == ("12.34", "3.0")
    assert [plain[name] for name in ("policy", "cache", "pair hits", "MiB moved")] == ["-"] * 4
    assert "emulated (CPU)" in text


def test_the_picture_has_a_line_per_policy(tmp_path: Path) -> None:
    rows = [
        _swept(policy, ratio, ratio * best) for policy, best in (("spac", 1), ("lru", 0.5)) for ratio in (0.5, 0.17)
    ]
    hits, _ = cache_plots([_row(OutputCheck(equal=8, compared=8)), *rows])
    assert [(line.label, line.x, line.values) for line in hits.lines] == [
        ("spac", (0.17, 0.5), (0.17, 0.5)),
        ("lru", (0.17, 0.5), (0.085, 0.25)),
    ]
    picture = tmp_path / "sweep.png"
    assert draw(rows, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not draw([_row(OutputCheck(equal=8, compared=8))], tmp_path / "none.png")
    with pytest.raises(InputError, match="picture"):
        draw(rows, tmp_path / "absent" / "sweep.png")


def test_lists_of_batches(tiny_moe: Path) -> None:
    work = ["-p", "32", "-n", "0", "-b", "64", "-ub", "8-32*2", "-r", "1", "--modes", "stock-ar"]
    result = run("bench", "-m", tiny_moe, "-md", "none", *work, "-t", "1")
    assert [row["n_ubatch"] for row in table_rows(result.stdout)] == ["8", "16", "32"]
    rows = run_json("bench", "-m", tiny_moe, "-md", "none", *work, "-t", "1")
    assert [(row["n_batch"], row["n_ubatch"]) for row in rows] == [(64, 8), (64, 16), (64, 32)]


def test_lists_of_layers_and_settings_of_the_context(tiny_moe: Path) -> None:
    lists = ["-ngl", "0,all", "-fa", "1,off", "-ctk", "f16,BF16", "-ctv", "f16", "-ncmoe", "1"]
    rows = run_json("bench", "-m", tiny_moe, "-md", "none", "-p", "8", "-n", "0", *lists, "-r", "1", "-t", "1",
                    "--modes", "stock-ar", "--no-warmup")  # fmt: skip
    keys = ("n_gpu_layers", "flash_attn", "type_k", "type_v")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        (n, attention, kind, "f16") for n in (0, 999) for attention in ("on", "off") for kind in ("f16", "bf16")
    ]
    assert "q4" in refused("bench", "-m", tiny_moe, "-ctk", "f16,q4")
    assert "-ngl takes numbers" in refused("bench", "-m", tiny_moe, "-ngl", "0,half")
    assert "--cpu-moe and --n-cpu-moe" in refused("bench", "-m", tiny_moe, "--cpu-moe", "-ncmoe", "0,1")


def test_lists_of_sizes_depths_and_threads(tiny_moe: Path) -> None:
    work = ["-p", "8,16", "-n", "4", "-pg", "8,4", "-d", "0,32", "-t", "1,2", "-r", "1", "--modes", "stock-ar"]
    rows = run_json("bench", "-m", tiny_moe, "-md", "none", *work)
    tests = ["pp8", "pp16", "tg4", "pp8+tg4"]
    names = [*tests, *(f"{test} @ d32" for test in tests)]
    assert [(row["threads"], row["test"]) for row in rows] == [(n, test) for n in (1, 2) for test in names]
    both = rows[3]
    assert (both["n_prompt"], both["n_gen"], both["n_depth"]) == (8, 4, 0)
    (sample,) = both["samples"]
    assert both["total_ts"] == pytest.approx(12 / (sample["prefill_s"] + sample["decode_s"]))
    deep = next(row for row in rows if row["test"] == "tg4 @ d32")
    assert (deep["n_depth"], deep["samples"][0]["decode_tokens"], deep["n_ctx"]) == (32, 4, 256)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64,128", [64, 128]), ("1-4", [1, 2, 3, 4]), ("0-1024+512", [0, 512, 1024]), ("64-512*2", [64, 128, 256, 512])],
)
def test_ranges_are_llama_benchs(text: str, expected: list[int]) -> None:
    assert sizes(text, "-p") == expected


def test_layers_on_the_gpu_once_each() -> None:
    assert _gpu_layers("0-2,1,all,auto,-1", "-ngl") == [0, 1, 2, 999, None]
    with pytest.raises(InputError, match="auto or all"):
        _gpu_layers("-2", "-ngl")


@pytest.mark.parametrize("text", ["", "a", "-3", "4-1", "0-8*2", "1-8*1", "1-8+0", "1.5"])
def test_no_other_sizes(text: str) -> None:
    with pytest.raises(InputError):
        sizes(text, "-p")


@pytest.mark.parametrize(
    "work",
    [
        ["-pg", "512"], ["-pg", "0,4"], ["-d", "8", "-p", "0", "-n", "0"], ["--dataset", "sample", "-n", "8,16"],
        ["--dataset", "sample", "-d", "64"], ["-t", "1,2", "--parallel", "1", "--dataset", "sample"],
        ["--resume", "/absent.jsonl"],
    ],
)  # fmt: skip
def test_sizes_that_do_not_go_together(tiny_moe: Path, work: list[str]) -> None:
    refused("bench", "-m", tiny_moe, "-md", "none", *work)


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


@pytest.mark.parametrize("form", ["md", "text"])
@pytest.mark.parametrize("reason", ["load", "scatter"])
def test_a_ratio_of_disturbed_samples_is_withheld(form: str, reason: Literal["load", "scatter"]) -> None:
    quiet = replace(_row(OutputCheck(equal=8, compared=8)), ratio=44.07)
    assert "44.07" in render([quiet], form) and not withheld_lines([quiet])
    row = replace(quiet, disturbed=reason)
    text = render([row], form)
    assert "44.07" not in text and " ? " in text
    assert len(withheld_lines([row, row])) == 1 and "?: no ratio" in text
    (record,) = json.loads(render([row], "json"))
    assert (record["disturbed"], record["ratio"]) == (reason, 44.07)


def test_a_busy_machine_and_scatter_are_told() -> None:
    quiet = _row(OutputCheck(equal=8, compared=8))
    assert quiet_lines([replace(quiet, tg=spread([10.0, 10.5]))]) == []
    assert len(quiet_lines([replace(quiet, tg=spread([10.0, 11.5]))])) == 1
    assert len(quiet_lines([replace(quiet, tg=spread([10.0]), setup=replace(quiet.setup, other_load=0.5))])) == 1


def test_an_interrupted_run_is_resumed(tiny_moe: Path, talk: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moeedge", "bench", "-m", str(tiny_moe), "-md", "none", "--dataset", str(talk)]
    command += ["-n", "4", "-r", "150", "-t", "1"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "MOEEDGE_CACHE": str(tmp_path / "kept")}
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=environment
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "repetition 2" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    rows = table_rows(out)
    assert [row["partial"].split(" of ")[1] for row in rows] == ["450", "450"]
    (kept,) = (tmp_path / "kept" / "bench_runs").iterdir()
    assert f"--resume {kept}" in " ".join(err.split())
    n_kept = len(kept.read_text().splitlines()) - 1
    again = subprocess.run(
        [*command, "--resume", "-o", "json"], capture_output=True, text=True, cwd=root, env=environment
    )
    assert again.returncode == 0, again.stderr
    assert f"{n_kept} samples are from" in " ".join(again.stderr.split())
    assert all(row["n_samples"] == row["n_samples_planned"] == 450 for row in json.loads(again.stdout))
    assert not list((tmp_path / "kept" / "bench_runs").iterdir())
