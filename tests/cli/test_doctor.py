"""`moeedge doctor` as a user runs it: one screen, exit code by what is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from moeedge.health.doctor import Finding, Report
from moeedge.ui.machine_views import print_report
from tests.support.commands import run, run_json


def test_every_topic_once_and_exit_code_0() -> None:
    report = run_json("doctor")
    topics = [finding["topic"] for finding in report["findings"]]
    assert {"library", "GPU", "kernels", "threads", "memory", "models", "disk", "kept files", "variables"} <= {*topics}
    assert set(report["findings"][0]) == {"topic", "status", "text", "hint"}
    assert report["is_broken"] is False
    assert run("doctor").exit_code == 0


def test_something_broken_is_exit_code_1_and_hides_no_other_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEEDGE_CATALOG", "/none/catalog.toml")
    result = run("doctor", "-o", "json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["is_broken"] is True
    assert {finding["topic"] for finding in report["findings"] if finding["status"] == "ok"} >= {"library", "memory"}


def test_without_llama_cpp(tmp_path: Path) -> None:
    """What fails first in a broken installation."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("raise OSError('no libllama.so')\n")
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "moeedge", "doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no libllama.so" in done.stdout and "kept files" in done.stdout


@pytest.mark.parametrize("columns", [80, 100])
def test_it_is_one_screen(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding(f"topic {i}", "ok", "a long text " * 20) for i in range(14)]
    findings += [Finding("threads", "warning", "a long text " * 20, "Do something about it.")]
    findings += [Finding("library", "broken", "what is wrong " * 20, "Install it again.")]
    print_report(Report(tuple(findings)), Console(width=columns, force_terminal=True, color_system=None))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= columns for line in lines)
    assert any("Do something about it." in line for line in lines)
    assert sum(line.count("what is wrong") for line in lines) > 20  # entire where it matters
