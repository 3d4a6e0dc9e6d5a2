"""`moeedge simulate` from the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from moeedge.policies.registry import POLICIES, SIMULATED
from moeedge.sim import simulate as simulation
from tests.support.commands import run, run_json

SHORT = ("-n", "40", "--max-steps", "8", "--no-ranges")


def test_rows_are_flat_and_one_per_combination() -> None:
    rows = run_json("simulate", "--policy", "none,lru", "--gamma", "0,4", "--link", "1,2", *SHORT)
    assert [(row["policy"], row["gamma"], row["link_factor"], row["rejected_token_model"]) for row in rows] == [
        (policy, gamma, link, model)
        for policy in ("none", "lru")
        for gamma, models in ((0, [None]), (4, ["optimistic", "pessimistic"]))
        for link in (1.0, 2.0)
        for model in models
    ]
    for row in rows:
        assert not any(isinstance(value, (dict, list)) for value in row.values())
        assert {"tg_ts", "tpot_s", "stall_cpu_s", "stall_load_s", "stall_link_s", "cache_ratio", "hardware"} <= set(row)


def test_a_speed_has_a_range() -> None:
    short = [argument for argument in SHORT if argument != "--no-ranges"]
    (row,) = run_json("simulate", "--policy", "lru", "--gamma", "0", *short)
    assert row["tg_low_ts"] < row["tg_ts"] < row["tg_high_ts"] and row["host_s"] > 0
    (point,) = run_json("simulate", "--policy", "lru", "--gamma", "0", *SHORT)
    assert point["tg_low_ts"] == point["tg_ts"] == point["tg_high_ts"] == row["tg_ts"]


def test_a_table_a_picture_and_a_log(tmp_path: Path) -> None:
    logs = []
    for name in ("a", "b"):
        files = ("--gantt", tmp_path / "g.png", "--event-log", tmp_path / name)
        model = ("--rejected-token-model", "optimistic")
        result = run("simulate", "--policy", "sp-moe", "--gamma", 2, *model, *files, *SHORT)
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
        run_json("simulate", "--hardware", name, "--policy", "sp-moe", "--gamma", 1, *SHORT)[0]
        for name in (tmp_path / "mine.json", "a100")
    )
    assert slow["hardware"] == "mine" and slow["tpot_s"] > fast["tpot_s"]


@pytest.mark.slow
def test_all_means_every_system() -> None:
    rows = run_json("simulate", "--policy", "all", "--rejected-token-model", "pessimistic", *SHORT)
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
    result = run("simulate", "--policy", "lru,lfu,spac,static", "--gamma", "0", "-o", "json", *SHORT)
    assert result.exit_code == 130
    assert [row["policy"] for row in json.loads(result.stdout)] == ["lru", "lfu"]
