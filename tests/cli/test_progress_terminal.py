"""Progress in a real terminal: a bar while it works; only the result stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.support.traces import plain_text

QUICK = ["-n", "8", "-t", "1"]
ENV = {"TERM": "xterm", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}


@pytest.mark.parametrize("rows", [pytest.param(40, id="tall"), pytest.param(5, id="flat", marks=pytest.mark.slow)])
def test_bench_draws_a_bar_where_it_fits(rows: int, tiny_moe: Path) -> None:
    arguments = ["bench", "-m", str(tiny_moe), "-md", "none", "-p", "16", "-r", "2", *QUICK]
    with Terminal(arguments, env=ENV, rows=rows) as terminal:
        assert terminal.wait() == 0, terminal.text
        assert "| pp16" in terminal.text
        assert ("━" in terminal.text) == (rows == 40)


def test_profile_shows_its_progress(tiny_moe: Path) -> None:
    arguments = ["profile", "-m", str(tiny_moe), "-md", "none", "--layer", "1", "-p", "hello", *QUICK]
    with Terminal(arguments, env=ENV) as terminal:
        assert terminal.wait() == 0, terminal.text
        assert "profiling" in terminal.text
        assert "layer 1: 16 experts" in terminal.text


def test_replay_shows_its_progress(tmp_path: Path) -> None:
    plain_text(400).save(tmp_path / "plain.npz")
    with Terminal(["lab", "replay", str(tmp_path / "plain.npz"), "--policy", "lru"], env=ENV) as terminal:
        assert terminal.wait() == 0, terminal.text
        assert "replaying" in terminal.text
        assert "optimistic" in terminal.text
