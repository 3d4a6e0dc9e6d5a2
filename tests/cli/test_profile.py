"""`moeedge profile` from the command line: outputs, files, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from tests.support.commands import SIGNALS, run, run_json


@pytest.fixture
def pair(pair: list[str]) -> list[str]:
    """The same for short answers."""
    return [*pair, "-n", "16", "--raw", "--draft-max", "3"]


def test_a_drawn_seed_is_reported(pair: list[str]) -> None:
    arguments = [*pair, "-p", "again", "--temp", "1.5"]
    first = run_json("profile", *arguments)
    assert isinstance(first["seed"], int)
    again = run_json("profile", *arguments, "-s", first["seed"])
    assert again.pop("provenance")["time"] >= first.pop("provenance")["time"]
    assert again == first


def test_files(pair: list[str], tmp_path: Path) -> None:
    trace_file, picture = tmp_path / "trace.npz", tmp_path / "picture.png"
    result = run("profile", *pair, "-p", "one", "-o", "json", "--trace-out", trace_file, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.count("\n") == 1
    trace = Trace.load(trace_file)
    report = json.loads(result.stdout)
    assert trace.meta.n_layers == 3
    verified = trace.phase == Phase.VERIFY
    assert report["activation_counts"]["step_tokens"] and verified.any()
    assert sum(report["activation_counts"]["step_tokens"]) == int((trace.phase != 1).sum())


def test_datasets(pair: list[str], tmp_path: Path) -> None:
    rows = [{"prompt": "first question"}, {"prompt": "second question"}, {"prompt": "third"}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run_json("profile", *pair, "--dataset", tmp_path / "mine.jsonl", "-n", "4")
    assert (report["dataset"], report["prompts"], report["answers"]) == ("mine", 3, 3)
    report = run_json("profile", *pair, "--dataset", "sample,toy", "--limit", "2", "-n", "4")
    assert (report["dataset"], report["prompts"]) == ("sample,toy", 4)
    groups = report["model_profile"]["groups"]
    assert [group["name"] for group in groups if group["kind"] == "dataset"] == ["sample", "toy"]


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
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
