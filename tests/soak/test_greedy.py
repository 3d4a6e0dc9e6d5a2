"""A few cases of the soak test of greedy answers; the long one is run by hand (see greedy.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.greedy import N_ANSWERS, N_PREDICT, batches, settings_of, summary


def test_a_seed_gives_a_case_again() -> None:
    assert settings_of(3, None) == settings_of(3, None) != settings_of(4, None)
    assert settings_of(3, "none")["device"] == "none"


def test_cases_are_shared_out_in_their_order() -> None:
    assert list(batches(5, 10, ())) == [[*range(5, 13)], [13, 14]]
    assert list(batches(0, 12, {0, 3, 11})) == [[1, 2, *range(4, 10)], [10]]


@pytest.mark.slow
def test_some_cases(tmp_path: Path) -> None:
    """In turns with an interruption, after which the record goes on."""
    record = tmp_path / "record.jsonl"
    for cases in (3, 5):
        words = ["-m", "tests.soak.greedy", "--cases", str(cases), "--out", str(record), "--workers", "1"]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in record.read_text().splitlines()][1:]
    assert [line["seed"] for line in lines] == [0, 1, 2, 3, 4]
    assert {line["tokens"] for line in lines if "tokens" in line} == {N_ANSWERS * N_PREDICT}
    assert summary(lines) in done.stdout
