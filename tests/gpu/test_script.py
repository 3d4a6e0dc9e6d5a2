"""The GPU script without a GPU: it is sound shell, and its dry run goes through on the emulated device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "run_gpu_checks.sh"


def run(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck() -> None:
    for script in sorted(Path(__file__).parents[1].rglob("*.sh")):
        result = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_help_lists_every_option() -> None:
    result = run("--help")
    assert result.returncode == 0
    options = ("--pack", "--archive", "--build", "--check", "--dry-run", "--arch", "--layers", "--out", "--tests-only")
    assert all(option in result.stdout for option in options)
    assert "set -euo" not in result.stdout


def test_mistakes_are_told() -> None:
    assert run().returncode == 2
    unknown = run("--nonsense")
    assert unknown.returncode == 1 and "--nonsense" in unknown.stderr


def test_nothing_was_built(tmp_path: Path) -> None:
    result = run("--check", str(tmp_path))
    assert result.returncode == 1 and "--build" in result.stderr


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """One correctness test and a short benchmark with what is installed; the record has every lane."""
    out = tmp_path / "record.json"
    bench = ["--repeats", "2", "--n-predict", "16", "--threads", "1", "--out", str(out)]
    tests = ["--tests", "equals_stock and qwen3moe-f32 and 0.17"]
    result = run("--dry-run", "--check", str(tmp_path), *bench, *tests, timeout_s=300)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(out.read_text())
    assert record["schema"] == "moeedge-gpu-checks-1"
    assert record["dry_run"] is True
    assert record["tests"]["tests"] == 1 and record["tests"]["failures"] == 0
    assert set(record["lanes"]) == {f"{name}{sd}" for name in ("cpu-moe", "n-cpu-moe", "moeedge") for sd in ("", "-sd")}
    for lane in record["lanes"].values():
        assert len(lane["samples"]) == 2
        assert lane["tg_ts"] > 0 and lane["speed"] > 0
    assert record["lanes"]["moeedge-sd"]["samples"][1]["placement"]["pairs_hit"] > 0
    assert record["output"]["different"] == []
