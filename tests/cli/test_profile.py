"""`moeedge profile` from the command line: outputs, files, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from moeedge.cli.app import app
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


@pytest.fixture
def pair(tiny_moe: Path, tiny_draft: Path) -> list[str]:
    """Options that name the tiny target and draft, greedy and short."""
    return [
        "-m",
        str(tiny_moe),
        "-md",
        str(tiny_draft),
        "-c",
        "512",
        "-n",
        "16",
        "-t",
        "1",
        "--raw",
        "--draft-max",
        "3",
    ]


def _one_sentence(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
    for word in words:
        assert word in result.stderr


def test_json_of_one_layer(pair: list[str]) -> None:
    result = _run(*pair, "-p", "one two three four", "--layer", "2", "-o", "json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert report["layer"] == 2 and report["steps"] > 0
    accuracy = report["hot_cold_accuracy"]
    assert 0 <= accuracy["sd"] <= 1 and 0 <= accuracy["ar"] <= 1
    assert 0 <= report["overlap"] <= 1 and report["overlap_uniform"] == 0.25
    for kind in ("empirical", "uniform", "independence"):
        assert report["unique_experts"][kind]["1"] == pytest.approx(4.0)
    assert report["unique_experts"]["uniform"]["2"] == pytest.approx(7.0)
    assert len(report["hottest"]) > 0
    assert (report["n_experts"], report["n_experts_used"], report["gamma"]) == (16, 4, 3)
    assert report["dataset"] == "prompt" and report["temperature"] == 0.0


def test_the_last_layer_is_the_default(pair: list[str]) -> None:
    assert json.loads(_run(*pair, "-p", "one", "-o", "json").stdout)["layer"] == 2


@pytest.mark.parametrize(("layers", "expected"), [("all", [0, 1, 2]), ("2,0-1", [2, 0, 1]), ("1", [1])])
def test_json_of_layers_is_an_array(pair: list[str], layers: str, expected: list[int]) -> None:
    reports = json.loads(_run(*pair, "-p", "one", "--layers", layers, "-o", "json").stdout)
    assert [report["layer"] for report in reports] == expected


def test_tables(pair: list[str]) -> None:
    one = _run(*pair, "-p", "one two", "--layer", "1")
    assert one.exit_code == 0
    for part in (
        "layer 1: 16 experts, top-4",
        "Alg. 1, printed",
        "independence",
        "hottest experts",
        "always predicting cold",
    ):
        assert part in one.stdout
    assert max(map(len, one.stdout.splitlines())) <= 80
    several = _run(*pair, "-p", "one two", "--layers", "all")
    assert several.exit_code == 0
    assert "overlap" in several.stdout and max(map(len, several.stdout.splitlines())) <= 80


def test_same_run_gives_the_same_report(pair: list[str]) -> None:
    first, second = (_run(*pair, "-p", "again", "-o", "json").stdout for _ in range(2))
    assert first == second


def test_a_drawn_seed_is_reported(pair: list[str]) -> None:
    arguments = [*pair, "-p", "again", "--temp", "1.5", "-o", "json"]
    first = json.loads(_run(*arguments).stdout)
    assert isinstance(first["seed"], int)
    assert json.loads(_run(*arguments, "-s", str(first["seed"])).stdout) == first


def test_layers_for_a_gpu_that_is_not_there(pair: list[str]) -> None:
    result = _run(*pair, "-p", "one", "-ngl", "5", "-o", "json")
    assert result.exit_code == 0 and "-ngl" in result.stderr
    assert json.loads(result.stdout)["steps"] > 0


def test_files(pair: list[str], tmp_path: Path) -> None:
    trace_file, picture = tmp_path / "trace.npz", tmp_path / "picture.png"
    result = _run(*pair, "-p", "one", "-o", "json", "--trace-out", trace_file, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    trace = Trace.load(trace_file)
    report = json.loads(result.stdout)
    assert trace.meta.n_layers == 3
    verified = trace.phase == Phase.VERIFY
    assert report["activation_counts"]["step_tokens"] and verified.any()
    assert sum(report["activation_counts"]["step_tokens"]) == int((trace.phase != 1).sum())


def test_without_draft_there_is_no_sd(tiny_moe: Path) -> None:
    result = _run("-m", tiny_moe, "-c", "512", "-n", "12", "--raw", "-p", "one", "-o", "json")
    report = json.loads(result.stdout)
    assert report["gamma"] == 0 and report["draft"] == "none"
    assert report["hot_cold_accuracy"]["sd"] is None and report["hot_cold_accuracy"]["ar"] is not None


def test_ngram_draft(pair: list[str], tiny_moe: Path) -> None:
    result = _run("-m", tiny_moe, "-md", "ngram", "-c", "512", "-n", "40", "--raw", "-p", "a b a b a b", "-o", "json")
    assert json.loads(result.stdout)["draft"] == "ngram"


def test_own_sample_is_called_sample(pair: list[str]) -> None:
    report = json.loads(_run(*pair, "--limit", "2", "-n", "4", "-o", "json").stdout)
    assert report["dataset"] == "sample" and report["prompts"] == 2


def test_dataset_of_the_user(pair: list[str], tmp_path: Path) -> None:
    rows = [{"prompt": "first question"}, {"prompt": "second question"}, {"prompt": "third"}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = json.loads(_run(*pair, "--dataset", tmp_path / "mine.jsonl", "-n", "4", "-o", "json").stdout)
    assert (report["dataset"], report["prompts"], report["answers"]) == ("mine", 3, 3)


def test_layer_out_of_range(pair: list[str]) -> None:
    _one_sentence(_run(*pair, "-p", "one", "--layer", "3"), 2, "Layer 3 does not exist", "0 to 2")
    _one_sentence(_run(*pair, "-p", "one", "--layers", "0-3"), 2, "0 to 2")
    _one_sentence(_run(*pair, "-p", "one", "--layer", "-1"), 2, "0 to 2")


def test_dense_model(tiny_draft: Path) -> None:
    _one_sentence(_run("-m", tiny_draft, "-p", "one"), 2, "no experts")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layer", "one"], ["takes one layer"]),
        (["--layers", "x"], ["not a list of layers"]),
        (["--layer", "0", "--layers", "1"], ["exclude each other"]),
        (["-p", "  "], ["prompt is empty"]),
        (["-p", "x", "--dataset", "mtbench"], ["exclude each other"]),
        (["--dataset", "no-such-set"], ["no-such-set"]),
        (["--limit", "-1"], ["--limit"]),
        (["--temp", "-1"], ["temperature"]),
        (["-n", "0"], ["-n must be"]),
        (["-n", "-2"], ["-n must be"]),
        (["--layers", ""], ["not a list of layers"]),
        (["--layer", ""], ["takes one layer"]),
        (["--draft-max", "99"], ["draft-max"]),
        (["-dev", "no-such-device"], ["no-such-device"]),
        (["--plot", "x.gif"], ["x.gif"]),
        (["--plot", "/no/such/folder/x.png"], ["cannot be written"]),
        (["--trace-out", "/"], ["cannot be written"]),
        (["-m", "/no/such/model.gguf"], ["model.gguf"]),
        (["-p", "word " * 1000], ["context"]),
    ],
)
def test_bad_input(pair: list[str], options: list[str], words: list[str]) -> None:
    extra = [] if any(option in options for option in ("-p", "--dataset", "--limit")) else ["-p", "one"]
    _one_sentence(_run(*pair, *extra, *options), 2, *words)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_reports_what_there_is(pair: list[str], tmp_path: Path, signum: int, code: int) -> None:
    """The prompts last for minutes, so that the signal always comes first."""
    (tmp_path / "many.jsonl").write_text('{"prompt": "one two three"}\n' * 1000)
    command = [sys.executable, "-m", "moeedge", "profile", *pair, "--dataset", str(tmp_path / "many.jsonl")]
    command += ["--limit", "0", "-n", "256", "-o", "json"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    assert "experts" in process.stderr.readline()  # loaded: the run begins
    time.sleep(0.5)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in stderr and "Stopped" in stderr
    report: dict[str, Any] = json.loads(stdout)
    assert report["steps"] >= 0


def test_bundled_pair(bundled_pair: tuple[Path, Path]) -> None:
    result = _run("--layer", "47", "-n", "12", "--limit", "1", "-o", "json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["layer"], report["n_layers"], report["n_experts"]) == (47, 48, 128)
    assert report["hot_cold_accuracy"]["sd"] is not None
    _one_sentence(_run("--layer", "48"), 2, "0 to 47")
