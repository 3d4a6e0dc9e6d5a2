"""`moeedge simulate` from the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from moeedge.cli.app import app
from moeedge.policies.registry import POLICIES, SIMULATED
from moeedge.sim import simulate as simulation
from tests.support.traces import two_texts

SHORT = ("-n", "40", "--max-steps", "8")


def _simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_rows_are_flat_and_one_per_combination() -> None:
    result = _simulate("--policy", "none,lru", "--gamma", "0,4", "--link", "1,2", "-o", "json", *SHORT)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["policy"], row["gamma"], row["link_factor"]) for row in rows] == [
        (policy, gamma, link) for policy in ("none", "lru") for gamma in (0, 4) for link in (1.0, 2.0)
    ]
    for row in rows:
        assert not any(isinstance(value, (dict, list)) for value in row.values())
        assert {"tg_ts", "tpot_s", "stall_cpu_s", "stall_load_s", "stall_link_s", "cache_ratio", "hardware"} <= set(row)


def test_a_table_a_picture_and_a_log(tmp_path: Path) -> None:
    logs = []
    for name in ("a", "b"):
        result = _simulate(
            "--policy", "sp-moe", "--gamma", 2, "--gantt", tmp_path / "g.png", "--event-log", tmp_path / name, *SHORT
        )
        assert result.exit_code == 0, result.output
        assert "uploads" in result.stdout
        logs.append((tmp_path / name).read_bytes())
    assert logs[0] == logs[1] and logs[0].count(b"\n") > 100
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_may_describe_the_hardware(tmp_path: Path) -> None:
    from moeedge.sim.model_shape import read_data

    entry = read_data("hardware.json")["hardware"]["a100"]
    (tmp_path / "mine.json").write_text(json.dumps(entry | {"link_bytes_per_s": 1e9}))
    slow, fast = (
        json.loads(_simulate("--hardware", name, "--policy", "sp-moe", "-o", "json", *SHORT).stdout)[0]
        for name in (tmp_path / "mine.json", "a100")
    )
    assert slow["hardware"] == "mine" and slow["tpot_s"] > fast["tpot_s"]


def test_a_trace_drives_it(tmp_path: Path) -> None:
    two_texts().save(tmp_path / "t.npz")
    result = _simulate("--trace", tmp_path / "t.npz")
    assert result.exit_code == 2 and "Name the model of the trace." in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hardware", "abacus"), "Unknown hardware 'abacus'"),
        (("--model", "gpt-9"), "Unknown model 'gpt-9'"),
        (("--policy", "magic"), "unknown policy"),
        (("--gamma", "2.5"), "takes integers"),
        (("--cache-ratio", "much"), "takes numbers"),
        (("--cache-ratio", "2"), "must be in [0, 1]"),
        (("--seed", "-1"), "--seed must be >= 0"),
        (("--utility-cap", "0"), "must be in 1..64"),
        (("--model", "x.gguf"), "has no routing"),
        (("--gantt", "/proc/none/g.png"), "cannot be written"),
        (("--gantt", "g.txt"), "--gantt cannot write g.txt"),
        (("--event-log", "/"), "cannot be written"),
    ],
)
def test_what_cannot_be_simulated_says_why(arguments: tuple[str, ...], message: str) -> None:
    result = _simulate(*arguments, *SHORT)
    assert result.exit_code == 2 and message in result.stderr, result.output


def test_all_means_every_system() -> None:
    rows = json.loads(_simulate("--policy", "all", "-o", "json", *SHORT).stdout)
    names = [row["policy"] for row in rows]
    assert {"spac", "lru", "accelerate"} <= set(names)
    assert len(set(names)) == len(names) == len(POLICIES | SIMULATED) - 1
    assert not {"none", "oracle", "belady"} & set(names)


def test_an_interrupt_keeps_the_rows_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = simulation.simulate, itertools.count()

    def interrupted(*arguments: Any, **named: Any) -> simulation.SimulationResult:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(simulation, "simulate", interrupted)
    result = _simulate("--policy", "lru,lfu,spac,static", "-o", "json", *SHORT)
    assert result.exit_code == 130
    assert [row["policy"] for row in json.loads(result.stdout)] == ["lru", "lfu"]
