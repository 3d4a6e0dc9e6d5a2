"""The options of expert placement and budgets, from the command line to what is printed; and moeedge calibrate."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeedge.bench import budget_choice
from moeedge.cli.engine_options import EngineOptions, PlacementOptions, limit_openmp_spin
from moeedge.cli.options import parse_budget
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.run import Run
from moeedge.scheduler.config import PlacementConfig
from tests.support.commands import refused, run, run_json
from tests.support.machine import Here

EMULATED = ["-dev", "emulated:threads=1"]


def chat(pair: list[str], *arguments: str) -> Any:
    """The result of a short greedy answer, which must be one."""
    result = run("chat", *pair, "-p", "tell me", "--temp", "0", "-n", "24", *arguments)
    assert result.exit_code == 0, result.stderr
    return result


def counters(result: Any) -> Any:
    """What --stats json prints: every counter in one line on standard error."""
    return json.loads(result.stderr.splitlines()[-1])


def notes(result: Any) -> str:
    """The sentences of `-o json` about what was chosen and what is off."""
    return " ".join(json.loads(result.stdout)["stats"]["notes"])


def test_placement_and_calibration_are_reported(pair: list[str]) -> None:
    options = (*EMULATED, "--cache-ratio", "0.5", "--policy", "lru", "-o", "json")
    result = chat(pair, *options)
    assert "24 of 48" in result.stderr and json.loads(result.stdout)["stats"]["policy"] == "lru"
    assert "measured after the first answer" in notes(result) and "emulat" in notes(result)
    assert "measured 2" in notes(chat(pair, *options))  # the date of the calibration


def test_stats_as_json(pair: list[str]) -> None:
    """The medians by batch size come from the backend's records; the cache is governed unless it is kept."""
    options = [*EMULATED, "--cache-ratio", "0.5", "--no-calibrate", "--stats", "json"]
    stats = counters(chat(pair, *options, "--draft-max", "0", "-n", "300"))  # long enough for the first transfers
    assert stats["steps"] > 23 and stats["pairs_hit"] > 0
    assert 0 < stats["partition_s"] < stats["decode_s"]
    assert len(stats["tau"]) == 3 and stats["lost"] is False
    assert stats["sensor"]["blocks"] > 0 and "cache_choice" in stats
    assert "cache_choice" not in counters(chat(pair, *options, "--keep-cache"))
    assert counters(chat(pair, "-dev", "none", "--stats", "json"))["device"] == "none"


def test_ablations_reach_the_engine(pair: list[str]) -> None:
    options = (*EMULATED, "--no-calibrate", "--stats", "json")
    stats = counters(chat(pair, *options, "--ablate", "no-sd", "--ablate", "no-evict"))
    assert stats["evictions"] == 0
    assert stats["steps"] == 23  # one token at a time


def test_ablations_are_named(pair: list[str]) -> None:
    """And one that the policy has no part for, or all without a device, are said to change nothing."""
    options = [*EMULATED, "--no-calibrate", "--ablate", "no-spec-ue"]
    result = chat(pair, *options, "--policy", "lru", "--ablate", "no-evict", "--ablate", "no-sd", "-o", "json")
    assert "lru, no-evict, no-sd" in notes(result)
    assert "--ablate no-spec-ue" in result.stderr
    assert "--ablate no-spec-ue" not in chat(pair, *options).stderr
    assert "--ablate no-evict" in chat(pair, "-dev", "none", "--ablate", "no-evict", "--ablate", "no-sd").stderr


def test_profile_takes_a_device(pair: list[str]) -> None:
    common = ["profile", *pair, "-p", "tell me", "-n", "16", "--layer", "1", "-o", "json"]
    plain, placed = run(*common, "-dev", "none"), run(*common, *EMULATED, "--no-calibrate")
    assert placed.exit_code == 0, placed.stderr
    assert "of 48 on the emulated GPU" in placed.stderr
    assert json.loads(placed.stdout)["unique_experts"] == json.loads(plain.stdout)["unique_experts"]


@pytest.mark.flaky(reruns=2)
def test_calibrate(pair: list[str]) -> None:
    measured = run_json("calibrate", *pair, *EMULATED, "--cache-ratio", "0.5")
    assert (measured["threads"], measured["cache_slots"], measured["policy"]) == (1, 24, "spac")
    assert "emulated" in measured["device"]
    units = measured["units"]
    assert units["transfer_expert_s"] > 0 and len(units["r_c"]) == len(units["r_g"]) == 5
    assert measured["speed"] > 0 and measured["prefill_path"] in ("cpu", "resident")
    assert "measured 2" in notes(chat(pair, *EMULATED, "--cache-ratio", "0.5", "-o", "json"))  # it is kept


def test_calibrate_needs_experts_on_a_device(pair: list[str], tiny_draft: Path) -> None:
    assert "-dev emulated" in refused("calibrate", *pair, "-dev", "none")
    for size in (["--cache-ratio", "0"], ["--vram", "100B"]):
        assert "--cache-ratio R or --vram SIZE" in refused("calibrate", *pair, *EMULATED, *size)
    assert "-m FILE" in refused("calibrate", "-m", tiny_draft, "-t", "1", "-c", "512", *EMULATED)


def test_defaults_of_the_options_are_those_of_the_configuration() -> None:
    assert PlacementOptions().config() == PlacementConfig()


@pytest.mark.parametrize(
    ("device", "emulates", "calm"),
    [("emulated", False, True), ("rpc://127.0.0.1:50052", False, True), ("auto", True, True), ("auto", False, False)],
)
def test_idle_threads_beside_the_emulated_device(
    monkeypatch: pytest.MonkeyPatch, device: str, emulates: bool, calm: bool
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    EngineOptions(device=device).limit_openmp_spin(emulate_bundled=emulates)
    assert ("GOMP_SPINCOUNT" in os.environ) == calm
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_openmp_spin()
    assert os.environ["GOMP_SPINCOUNT"] == "7"  # the user's value stays


@pytest.mark.parametrize(
    ("ram", "n_free", "calm"), [("auto", 10, True), ("auto", 10**15, False), ("1GiB", 10**15, True), ("off", 10, False)]
)
def test_idle_threads_while_experts_are_read(
    monkeypatch: pytest.MonkeyPatch, here: Here, tmp_path: Path, ram: str, n_free: int, calm: bool
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(100))
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    here.set_memory(n_free)
    EngineOptions(model=model).limit_openmp_spin(ram=ram)
    assert ("GOMP_SPINCOUNT" in os.environ) == calm


def test_values_of_budgets() -> None:
    assert [parse_budget(text) for text in ("off", "AUTO", "16", " 8 ")] == [None, "auto", 16, 8]
    for text in ("0", "-1", "8.5", "many", "", "8,16", "²", "9" * 10, "9" * 5000):
        with pytest.raises(InputError, match="--expert-budget"):
            parse_budget(text)


def test_auto_measures_once_all_options_are_checked(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ExpertBudget] = []

    def find(_config: EngineConfig, template: ExpertBudget, _run: Run) -> ExpertBudget:
        asked.append(template)
        return replace(template, budget=6)

    monkeypatch.setattr(budget_choice, "find_budget", find)
    arguments = ("chat", *pair, "-dev", "none", "--expert-budget", "auto", "-p", "tell me", "-n", "8")
    for wrong in (["--resume"], ["--raw", "-sys", "be brief"], ["--budget-ranking", "static"]):
        assert refused(*arguments, *wrong)
    assert not asked
    stats = run_json(*arguments)["stats"]
    assert (stats["expert_budget"], stats["budget_policy"]) == (6, asked[0].coverage) == (6, "truncation")
