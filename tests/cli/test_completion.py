"""What a shell completes, and that a key press and --help load nothing that takes long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from moeedge.cli import completion
from moeedge.cli.app import COMMANDS
from moeedge.data.datasets import CATALOG
from moeedge.lab.cli import simulate
from moeedge.lab.sim.model_shape import builtin_models
from moeedge.lab.sim.step_costs import builtin_hardware


def completed(lines: Iterable[str], shell: str = "bash") -> list[list[str]]:
    """What the shell offers for the last word of each line; a key press loads nothing that computes."""
    program = f"""
import contextlib, io, os, sys
from moeedge.cli.app import app
for line in {list(lines)!r}:
    n_words = len(line.split(" "))
    os.environ |= {{"_MOEEDGE_COMPLETE": "complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(n_words - 1)}}
    os.environ |= {{"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        app(prog_name="moeedge")
    print(*out.getvalue().split())
loaded = {{"numpy", "llama_cpp", "pydantic", "rich"}} & set(sys.modules)
if loaded:
    print("loaded", *loaded, file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert not ran.stderr
    return [line.split() for line in ran.stdout.splitlines()]


def test_commands_options_and_values() -> None:
    offered = {
        "moeedge ch": ["chat"],
        "moeedge chat --mod": ["--model", "--model-draft"],
        "moeedge chat -m gran": ["granite-3.1-1b-a400m", "granite-4.0-h-tiny"],
        "moeedge run -m phi-m": ["phi-mini-moe"],
        "moeedge show olm": ["olmoe-1b-7b"],
        "moeedge chat -md ng": ["ngram"],
        "moeedge chat --policy spac-": ["spac-paper", "spac-program"],
        "moeedge bench --policy lru,lf": ["lru,lfu"],
        "moeedge bench --dataset mt": ["mtbench"],
        "moeedge chat -dev em": ["emulated"],
        "moeedge plan -ngl a": ["auto", "all"],
        "moeedge lab replay x.npz --policy orac": ["oracle"],
        "moeedge lab simulate --hardware h20": ["h200", "h200:cpu"],
        "moeedge lab validate meas": ["measured"],
        "moeedge chat --temperature 1 --see": ["--seed"],
        "moeedge nothing --see": [],
    }
    assert dict(zip(offered, completed(offered), strict=True)) == offered


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell(shell: str) -> None:
    assert "spac-paper" in " ".join(*completed(["moeedge chat --policy spac-"], shell))
    command = [sys.executable, "-m", "moeedge", "--show-completion", shell]
    # otherwise Typer looks for a shell among the processes above the tests, where there may be none
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert shown.returncode == 0 and "MOEEDGE_COMPLETE" in shown.stdout


def test_names_are_those_of_the_tables() -> None:
    """They stand in a list of their own because a key press does not wait for NumPy."""
    assert set(CATALOG) < set(completion.datasets())
    assert set(builtin_hardware()) < set(simulate.hardware())
    assert set(builtin_models()) == set(simulate.simulated_models())
    assert {"auto", "none", "emulated"} <= set(completion.devices())
    assert set(completion.models()) < set(completion.drafts())


def test_an_unreadable_catalog_completes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEEDGE_CATALOG", "/absent/catalog.toml")
    assert completion.completer(completion.models)("gran") == []


def test_help_loads_nothing_that_computes() -> None:
    """One process for all commands: what one of them has loaded stays loaded for the next."""
    program = """
import contextlib, io, sys
from moeedge.cli.app import app
for line in ["", *sys.argv[1:]]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        app([*line.split(), "--help"], prog_name="moeedge")
    loaded = {"numpy", "llama_cpp", "pydantic", "huggingface_hub"} & set(sys.modules)
    if loaded or "Usage: moeedge" not in out.getvalue():
        sys.exit(f"{line} --help: {loaded} {out.getvalue()}")
"""
    ran = subprocess.run([sys.executable, "-c", program, *COMMANDS], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
