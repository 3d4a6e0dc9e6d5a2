"""The GPU script without a GPU: it is sound shell, and its dry run goes through on the emulated device."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import xml.etree.ElementTree
from functools import partial
from pathlib import Path

import pytest

from tests.gpu import micro
from tests.support.commands import run_script

run = partial(run_script, Path(__file__).parent / "run_gpu_checks.sh")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck() -> None:
    for script in sorted(Path(__file__).parents[1].rglob("*.sh")):
        result = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_help_lists_every_option() -> None:
    result = run("--help")
    assert result.returncode == 0
    options = ("--pack", "--archive", "--build", "--check", "--all", "--dry-run", "--arch", "--repeats", "--out")
    options += ("--micro-only", "--tests-only", "--bench-only", "--limit", "--python")
    assert all(option in result.stdout for option in options)
    assert "set -euo" not in result.stdout


def test_mistakes_are_told() -> None:
    assert run().returncode == 2
    unknown = run("--nonsense")
    assert unknown.returncode == 1 and "--nonsense" in unknown.stderr


def test_nothing_was_built(tmp_path: Path) -> None:
    result = run("--check", str(tmp_path))
    assert result.returncode == 1 and "--build" in result.stderr


def test_another_python_and_a_missing_compiler_are_told(tmp_path: Path) -> None:
    (tmp_path / "llama-cpp-python").mkdir()  # as if the archive had been unpacked
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / ".complete").touch()
    (tmp_path / "python-version").write_text("2.7\n")
    result = run("--build", str(tmp_path))
    assert result.returncode == 1 and "2.7" in result.stderr
    (tmp_path / "python-version").unlink()
    result = run("--build", str(tmp_path), "--arch", "90", PATH="/usr/bin:/bin", CUDA_HOME=str(tmp_path))
    if shutil.which("nvcc", path="/usr/bin:/bin") is None and not list(Path("/usr/local").glob("cuda*")):
        assert result.returncode == 1 and "nvcc" in result.stderr


def test_single_calls_on_any_device(tmp_path: Path) -> None:
    """The CPU is a ggml device too: every row has times, whatever they are worth."""
    out = tmp_path / "micro.json"
    assert micro.main(["--device", "CPU", "--dry-run", "--repeats", "2", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["schema"] == micro.SCHEMA
    names = {row["name"] for row in record["rows"]}
    assert {"launch and wait", "get, pageable", "layer, blocking copies, pageable", "expert matmul"} <= names
    assert {row["upload_chunk_bytes"] for row in record["rows"] if "ne02" not in row} == {0, *micro.CHUNKS_BYTES}
    matmuls = [row for row in record["rows"] if "ne02" in row]
    assert {(row["n_tokens"], row["layout"]) for row in matmuls} == set(
        itertools.product((1, 9, 64), ("rows", "columns"))
    )
    assert all(row["median_us"] > 0 for row in record["rows"])


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """One correctness test and a short benchmark with what is installed; a row for each mode."""
    out = tmp_path / "out"
    bench = ["--repeats", "2", "--n-predict", "16", "--threads", "1", "--out", str(out)]
    tests = ["--tests", "equals_stock and qwen3moe-f32 and 0.17"]
    result = run("--dry-run", "--check", str(tmp_path), *bench, *tests, timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    suite = xml.etree.ElementTree.parse(out / "tests.xml").getroot().find("testsuite")
    assert suite is not None and (suite.get("tests"), suite.get("failures")) == ("1", "0")
    rows = {row["mode"]: row for row in json.loads((out / "bench.json").read_text())}
    assert set(rows) == {"stock-ar", "stock-sd", "moeedge-ar", "moeedge"}
    assert all(row["tg_ts"] > 0 and row["n_samples"] >= 2 for row in rows.values())
    assert rows["moeedge"]["hit_rate_pairs"] > 0
    assert all(row["output_compared"] > 0 and row["different"] == [] for row in rows.values())
    assert {path.name for path in out.iterdir()} >= {"micro.json", "tests.log", "bench.log", "micro.log"}


@pytest.mark.slow
def test_a_part_that_fails_does_not_keep_the_next_from_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--repeats", "1", "--n-predict", "4", "--threads", "1", "--tests", "no_such_test", "--out", str(out)]
    result = run("--dry-run", "--check", str(tmp_path), *options, timeout_s=600)
    assert result.returncode == 1 and "tests: failed" in result.stderr
    assert json.loads((out / "bench.json").read_text())
