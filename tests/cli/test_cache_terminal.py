"""The expert cache in the chat's terminal: header, panel in windows of several sizes, /stats; and in a pipe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import TinyFactory
from tests.support.commands import run

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from tests.cli.terminal import PROMPT, Terminal

DEVICE = ["-dev", "emulated:link=1GB/s", "--cache-ratio", "0.5", "--no-calibrate", "--keep-cache"]


@pytest.fixture
def endless(tiny: TinyFactory) -> list[str]:
    """Options under which an answer with drafts runs until it is stopped."""
    models = ["-m", str(tiny("qwen3moe")), "-md", str(tiny("qwen3"))]
    return ["chat", *models, *DEVICE, "-t", "1", "-c", "512", "--context-shift", "--temp", "0"]


@pytest.mark.parametrize(
    ("columns", "rows"),
    [pytest.param(120, 40, marks=pytest.mark.slow), pytest.param(60, 20, marks=pytest.mark.slow), (40, 15)],
)
def test_the_panel_shows_the_cache(endless: list[str], columns: int, rows: int) -> None:
    with Terminal(endless, env={}, columns=columns, rows=rows) as terminal:
        terminal.expect(PROMPT)
        assert "24 of 48" in terminal.text  # of 3 x 16 experts
        terminal.type("tell me\r")
        terminal.expect_all("speed", "tokens", "drafts accepted", "emulated GPU", "CPU")
        terminal.type("\x03")
        terminal.expect("stopped", PROMPT)
        terminal.ask(
            "/stats", "pair hits", "expert hits", "slots", "24/24", "uploads/layer", "slots in RAM", "tau", "CPU"
        )
        terminal.leave()
    # rows never run over the window's edge
    assert {len(line) for line in terminal.text.split("\n") if line.startswith("╭")} == {columns}


@pytest.mark.parametrize(
    "env", [pytest.param({"NO_COLOR": "1"}, marks=pytest.mark.slow), {"TERM": "dumb"}], ids=["no-color", "dumb"]
)
def test_plain_terminals_get_the_figures_behind_the_answer(endless: list[str], env: dict[str, str]) -> None:
    with Terminal([*endless, "-n", "60"], env=env) as terminal:
        terminal.expect(PROMPT)
        terminal.ask("tell me", "60 tokens, ")
        terminal.ask("/stats", "pair hits", "slots in RAM")
        terminal.leave()
    assert "╭" not in terminal.raw


def test_a_pipe_gets_the_answer_alone(endless: list[str], cache: Path) -> None:
    result = run(*endless, "-p", "tell me", "-n", "40")
    assert result.exit_code == 0
    assert "pair hits" not in result.stdout
    assert "24 of 48" in result.stderr
    assert "40 tokens, " in result.stderr
    assert "pair hits" in run(*endless, "-p", "tell me", "-n", "40", "--verbose").stderr
    assert "\x1b" not in result.stdout + result.stderr
