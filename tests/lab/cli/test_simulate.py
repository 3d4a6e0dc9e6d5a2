"""`moeedge lab simulate` from the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from moeedge.lab.sim import simulate as simulation
from moeedge.lab.sim.model_shape import entry_of, read_data
from tests.support.commands import refused, run, run_json
from tests.support.traces import two_texts

SHORT = ("-n", "40", "--max-steps", "8", "--no-ranges")


def test_rows_are_flat_and_one_per_combination() -> None:
    rows = run_json("lab", "simulate", "--policy", "none,lru", "--gamma", "0,4", "--link", "1,2", *SHORT)
    rows = rows[2:]  # after stock's
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


def test_an_assumed_acceptance_is_called_so() -> None:
    arguments = ("lab", "simulate", "--policy", "spac,llama-cpp", "--acceptance-chance", "0.7", *SHORT[:-1])
    rows = {row["policy"]: row for row in run_json(*arguments)}
    drafted, plain = rows["spac"], rows["llama-cpp"]
    assert (drafted["acceptance_source"], drafted["acceptance_chance"]) == ("assumed", 0.7)
    assert (plain["acceptance_source"], plain["acceptance_chance"]) == (None, None)
    assert "assumed chance of acceptance 0.7" in " ".join(run(*arguments).stdout.split())


def test_a_speed_has_a_range() -> None:
    command = ("lab", "simulate", "--policy", "lru", "--gamma", "0", *SHORT)
    _, row = run_json(*command[:-1])  # without --no-ranges
    assert row["tg_low_ts"] < row["tg_ts"] < row["tg_high_ts"] and row["host_s"] > 0
    _, point = run_json(*command)
    assert point["tg_low_ts"] == point["tg_ts"] == point["tg_high_ts"] == row["tg_ts"]


def test_a_file_may_describe_the_hardware(tmp_path: Path) -> None:
    entry = entry_of(read_data("hardware.json")["hardware"], "a100")
    (tmp_path / "mine.json").write_text(json.dumps(entry | {"link_bytes_per_s": 1e9}))
    slow, fast = (
        run_json("lab", "simulate", "--hardware", name, "--policy", "sp-moe", "--gamma", 1, *SHORT)[-1]
        for name in (tmp_path / "mine.json", "a100")
    )
    assert slow["hardware"] == "mine" and slow["tpot_s"] > fast["tpot_s"]


def test_an_interrupt_keeps_the_rows_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = simulation.simulate, itertools.count()

    def interrupted(*arguments: Any, **named: Any) -> simulation.SimulationResult:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(simulation, "simulate", interrupted)
    result = run("lab", "simulate", "--policy", "lru,lfu,spac,static", "--gamma", "0", "-o", "json", *SHORT)
    assert result.exit_code == 130
    assert [row["policy"] for row in json.loads(result.stdout)] == ["llama-cpp", "lru"]


def test_a_name_means_what_it_means_in_chat_and_the_output_names_its_quantization() -> None:
    names = ("qwen3-30b-a3b", "qwen3:30b-a3b", "qwen3-30b-a3b:q4_k_m", "qwen3:30b-a3b:f16")
    found = [run_json("lab", "simulate", "-m", name, "--gamma", "0", *SHORT)[-1] for name in names]
    assert [(row["model"], row["quant"], row["expert_bytes"]) for row in found] == [
        *[("qwen3-30b-a3b", "Q4_K_M", 2856960)] * 3,
        ("qwen3-30b-a3b:F16", "F16", 9437184),
    ]
    assert found[0]["tg_ts"] == found[1]["tg_ts"] == found[2]["tg_ts"] > found[3]["tg_ts"]
    title = run("lab", "simulate", "--gamma", "0", *SHORT).stdout.splitlines()[0]
    assert "Q4_K_M" in title and "2.72 MiB per expert" in title
    assert "Q4_K_M, Q6_K, F16" in refused("lab", "simulate", "-m", "qwen3-30b-a3b:IQ2_M", *SHORT)


def test_the_user_s_catalog_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = '[[model]]\nname = "qwen3-30b-a3b"\n[[model.variant]]\nquant = "Q6_K"\npath = "x.gguf"\n'
    (tmp_path / "catalog.toml").write_text(entry)
    monkeypatch.setenv("MOEEDGE_CATALOG", str(tmp_path / "catalog.toml"))
    assert run_json("lab", "simulate", "--gamma", "0", *SHORT)[-1]["quant"] == "Q6_K"


def test_a_row_of_stock_with_the_same_experts_on_the_gpu() -> None:
    rows = run_json("lab", "simulate", "--cache-ratio", "0.17,0.5", "--gamma", "0,4", *SHORT)
    stock = {row["cache_ratio"]: row for row in rows if row["policy"] == "llama-cpp"}
    assert [(row["policy"], row["whole_layers"]) for row in rows[:2]] == [("llama-cpp", 8), ("llama-cpp", 24)]
    for row in rows:
        assert row["over_stock"] == pytest.approx(row["tg_ts"] / stock[row["cache_ratio"]]["tg_ts"])
    asked = run_json("lab", "simulate", "--policy", "llama-cpp,lru", "--gamma", "0", *SHORT)
    assert [row["policy"] for row in asked] == ["llama-cpp", "lru"]


def test_a_file_of_other_sizes_than_the_trace_is_refused(tiny_moe: Path, tmp_path: Path) -> None:
    two_texts().save(tmp_path / "trace.npz")
    said = refused("lab", "simulate", "-m", tiny_moe, "--trace", tmp_path / "trace.npz", *SHORT)
    assert tiny_moe.stem in said and "layers of" in said
