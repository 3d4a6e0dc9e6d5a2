"""The event log of `moeedge lab simulate` is the same in every process, whatever Python's hashes are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeedge.cli.app import app


@pytest.mark.parametrize(
    "policy",
    [
        "spac",
        pytest.param("moe-infinity", marks=pytest.mark.slow),
        pytest.param("hybrimoe", marks=pytest.mark.slow),
    ],
)
def test_the_log_of_a_seed_is_the_same_in_every_process(policy: str, tmp_path: Path) -> None:
    def arguments(name: str, seed: int) -> list[str]:
        command = ["lab", "simulate", "--policy", policy, "-n", "60", "--max-steps", "6"]
        return [*command, "-s", str(seed), "--event-log", str(tmp_path / name)]

    for name, hash_seed in (("a", "1"), ("b", "2")):
        done = subprocess.run(
            [sys.executable, "-m", "moeedge", *arguments(name, 7)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode()
    assert CliRunner().invoke(app, arguments("c", 8)).exit_code == 0
    first, second, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == second and first.count(b"\n") > 100
    assert first != other
