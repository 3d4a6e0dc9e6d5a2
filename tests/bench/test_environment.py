"""The machine and the installation in a record."""

from __future__ import annotations

import hashlib
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import moeedge
from moeedge.hardware.provenance import HEADER_BYTES, _git_state, read_provenance


def _git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_versions_and_processor() -> None:
    environment = read_provenance()
    assert environment.version == moeedge.__version__
    assert environment.llama_cpp_version == version("llama-cpp-python")
    assert environment.cpu
    assert environment.time is not None and environment.time.endswith("+00:00")


def test_files_are_known_by_their_content(tmp_path: Path) -> None:
    model, trace = tmp_path / "model.gguf", tmp_path / "trace.npz"
    model.write_bytes(bytes(HEADER_BYTES) + b"weights")
    trace.write_bytes(b"routing")
    first = read_provenance(model, trace=trace, timed=False)
    assert first.model_header_sha256 == hashlib.sha256(bytes(HEADER_BYTES)).hexdigest()
    assert first.trace_sha256 == hashlib.sha256(b"routing").hexdigest() and first.time is None
    assert first == read_provenance(model, trace=trace, timed=False)
    assert read_provenance(tmp_path / "absent.gguf").model_header_sha256 is None


def test_commit_and_dirty_flag_of_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "moeedge"
    package.mkdir()
    assert _git_state(package) == (None, None)  # an installed wheel
    try:
        _git(tmp_path, "init", "-q")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    (package / "a.py").write_text("a = 1\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "First", "--no-verify")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert _git_state(package) == (commit, False)
    (package / "new.txt").write_text("untracked files do not count\n")
    assert _git_state(package) == (commit, False)
    (package / "a.py").write_text("a = 2\n")
    assert _git_state(package) == (commit, True)
