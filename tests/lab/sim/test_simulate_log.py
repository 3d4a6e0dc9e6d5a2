"""`moeedge lab simulate` gives the same rows in every process, whatever Python's hashes are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "policy",
    [
        "spac",
        pytest.param("moe-infinity", marks=pytest.mark.slow),
        pytest.param("hybrimoe", marks=pytest.mark.slow),
    ],
)
def test_a_seed_gives_the_same_rows_in_every_process(policy: str) -> None:
    found = []
    for seed, hash_seed in ((7, "1"), (7, "2"), (8, "1")):
        command = ["lab", "simulate", "--policy", policy, "-n", "60", "--max-steps", "6", "-s", str(seed), "-o", "json"]
        done = subprocess.run(
            [sys.executable, "-m", "moeedge", *command],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode()
        found.append(done.stdout)
    assert found[0] == found[1] != found[2]
