"""The native library, attached, and a file of experts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeedge import native
from tests.support.experts import ExpertFile, write_experts

ROOT = Path(__file__).parents[2]


def run_python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in a process of its own."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


def printed(*arguments: object, **environment: str) -> str:
    """What that process prints, which has to succeed."""
    result = run_python(*arguments, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="session", autouse=True)
def attached() -> None:
    native.attach()


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    """4 layers of 8 experts, all alike; no test changes it."""
    return write_experts(tmp_path_factory.mktemp("experts") / "experts.bin")
