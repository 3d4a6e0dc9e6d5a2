"""What a shell completes, and how long a key press and --help take."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from moeedge.cli import completion
from moeedge.cli.app import COMMANDS
from moeedge.data.datasets import CATALOG
from moeedge.lab.cli import simulate
from moeedge.lab.sim.model_shape import builtin_models
from moeedge.lab.sim.step_costs import builtin_hardware

# seconds of processor time, on a machine that does other work: about five times of what a quiet one takes
MAX_HELP_S = 1.5
MAX_COMPLETION_S = 1.0
SHELLS = ["bash", "zsh", "fish"]


def completed(line: str, shell: str = "bash") -> list[str]:
    """What the shell offers for the last word of `line`."""
    environment = {"_MOEEDGE_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "_TYPER_COMPLETE_ARGS": line}
    environment |= {"COMP_CWORD": str(len(line.split(" ")) - 1), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    program = f"""
import os, sys
os.environ |= {environment!r}
from moeedge.cli.app import app
try:
    app(prog_name="moeedge")
finally:
    loaded = {{"numpy", "llama_cpp", "pydantic", "rich"}} & set(sys.modules)
    if loaded:
        print("loaded", *loaded, file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert not ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("moeedge ch", ["chat"]),
        ("moeedge chat --mod", ["--model", "--model-draft"]),
        ("moeedge chat -m gran", ["granite-3.1-1b-a400m", "granite-4.0-h-tiny"]),
        ("moeedge run -m phi-m", ["phi-mini-moe"]),
        ("moeedge show olm", ["olmoe-1b-7b"]),
        ("moeedge chat -md ng", ["ngram"]),
        ("moeedge chat --policy spac-", ["spac-paper", "spac-program"]),
        ("moeedge bench --policy lru,lf", ["lru,lfu"]),
        ("moeedge bench --dataset mt", ["mtbench"]),
        ("moeedge chat -dev em", ["emulated"]),
        ("moeedge plan -ngl a", ["auto", "all"]),
        ("moeedge lab replay x.npz --policy orac", ["oracle"]),
        ("moeedge lab simulate --hardware h20", ["h200", "h200:cpu"]),
        ("moeedge lab validate meas", ["measured"]),
        ("moeedge chat --temperature 1 --see", ["--seed"]),
        ("moeedge nothing --see", []),
    ],
)
def test_commands_options_and_values(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell(shell: str) -> None:
    assert "spac-paper" in " ".join(completed("moeedge chat --policy spac-", shell))
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


def processor_s(*words: str, **environment: str) -> float:
    """The least processor time of three runs."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        program = f"import os; os.environ |= {environment!r}; from moeedge.__main__ import main; main()"
        subprocess.run([sys.executable, "-c", program, *words], stdout=subprocess.DEVNULL, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


@pytest.mark.parametrize("command", ["chat", "bench", "lab replay"])
def test_help_comes_at_once(command: str) -> None:
    assert processor_s(*command.split(), "--help") < MAX_HELP_S


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_nothing_that_computes(command: str) -> None:
    program = f"""
import sys
from moeedge.cli.app import app
try:
    app([*"{command}".split(), "--help"], prog_name="moeedge")
finally:
    print(*{{"numpy", "llama_cpp", "pydantic", "huggingface_hub"}} & set(sys.modules), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stderr.split() == []
    assert "<bool>" not in ran.stdout  # a flag has no value


def test_completion_comes_at_once() -> None:
    line = {"COMP_WORDS": "moeedge chat -m gran", "COMP_CWORD": "3"}
    assert processor_s(_MOEEDGE_COMPLETE="complete_bash", **line) < MAX_COMPLETION_S
