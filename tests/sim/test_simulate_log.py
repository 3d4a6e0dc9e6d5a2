"""The event log through the command, in processes of their own: the same bytes whatever Python's hashes are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeedge.cli.app import app
from moeedge.sim.papers import Fit, Papers


@pytest.mark.parametrize(
    "policy",
    [
        "spac",
        pytest.param("moe-infinity", marks=pytest.mark.slow),
        pytest.param("hybrimoe", marks=pytest.mark.slow),
    ],
)
def test_the_log_of_a_seed_is_the_same_in_every_process(policy: str, tmp_path: Path) -> None:
    logs = []
    for name, hash_seed, seed in (("a", "1", "7"), ("b", "2", "7"), ("c", "1", "8")):
        command = [sys.executable, "-m", "moeedge", "simulate", "--policy", policy, "-n", "60", "--max-steps", "6"]
        command += ["-s", seed, "--event-log", str(tmp_path / name)]
        done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        logs.append((tmp_path / name).read_bytes())
    assert logs[0] == logs[1] and logs[0].count(b"\n") > 100
    assert logs[0] != logs[2]


def test_the_papers_from_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints is what the library says; the fit, which takes its time, is given."""
    monkeypatch.setattr(Papers, "fit", lambda self: Fit(51.0e9, 0.861))
    table = CliRunner().invoke(app, ["validate", "papers", "--part", "table3"])
    assert table.exit_code == 0, table.output
    assert "3 of 3 pairs in the published order" in table.stdout and "51.0 GB/s" in table.stdout
    rows = json.loads(CliRunner().invoke(app, ["validate", "papers", "--part", "table3", "-o", "json"]).stdout)
    assert [row["name"] for row in rows] == ["HybriMoE", "llama.cpp-w/ SD", "MoE-SpAc"]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["predicted_ts"] / row["published_ts"])
        assert f"{row['predicted_ts']:.2f}" in table.stdout
