"""The options of expert placement, from the command line to what is printed; and moeedge calibrate."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeedge.cli.engine_options import EngineOptions, PlacementOptions, limit_openmp_spin
from moeedge.scheduler.config import PlacementConfig
from tests.support.commands import refused, run, run_json

EMULATED = ["-dev", "emulated:threads=1"]


def chat(pair: list[str], *arguments: str) -> Any:
    return run("chat", *pair, "-p", "tell me", "--temp", "0", "-n", "24", *arguments)


def notes(result: Any) -> str:
    """The sentences of `-o json` about what was chosen and what is off."""
    return " ".join(json.loads(result.stdout)["stats"]["notes"])


def test_an_answer_with_experts_on_the_emulated_device(pair: list[str]) -> None:
    plain = json.loads(chat(pair, "-dev", "none", "-o", "json").stdout)
    result = chat(pair, *EMULATED, "--cache-ratio", "0.5", "--no-calibrate", "-o", "json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["tokens"] == plain["tokens"]
    assert (plain["stats"]["device"], plain["stats"]["policy"]) == ("none", "none")
    assert "emulated" in report["stats"]["device"] and report["stats"]["policy"] == "spac"
    assert any("24 of 48 (" in note for note in report["stats"]["notes"])


def test_placement_and_calibration_are_reported(pair: list[str]) -> None:
    options = (*EMULATED, "--cache-ratio", "0.5", "--policy", "lru", "-o", "json")
    result = chat(pair, *options)
    assert result.exit_code == 0
    assert "24 of 48" in result.stderr and json.loads(result.stdout)["stats"]["policy"] == "lru"
    assert "measured after the first answer" in notes(result) and "emulat" in notes(result)
    assert "Measured before" in notes(chat(pair, *options))


def test_stats_as_json(pair: list[str]) -> None:
    """Every counter in one line on standard error; the medians by batch size come from the backend's records."""
    options = [*EMULATED, "--cache-ratio", "0.5", "--no-calibrate", "--stats", "json"]
    result = chat(pair, *options, "--draft-max", "0", "-n", "300")  # long enough for the first transfers
    assert result.exit_code == 0
    stats = json.loads(result.stderr.splitlines()[-1])
    assert stats["steps"] > 23 and stats["pairs_hit"] > 0
    assert 0 < stats["partition_s"] < stats["decode_s"]
    assert len(stats["tau"]) == 3 and stats["lost"] is False
    assert stats["sensor"]["blocks"] > 0


def test_the_cache_is_governed_unless_it_is_kept(pair: list[str]) -> None:
    options = [*EMULATED, "--cache-ratio", "0.5", "--no-calibrate", "--stats", "json"]
    for extra, is_governed in (([], True), (["--keep-cache"], False)):
        stats = json.loads(chat(pair, *options, *extra).stderr.splitlines()[-1])
        assert ("cache_choice" in stats) == is_governed


def test_stats_without_a_device(pair: list[str]) -> None:
    result = chat(pair, "-dev", "none", "--stats", "json")
    assert json.loads(result.stderr.splitlines()[-1])["device"] == "none"


def test_too_small_is_off_with_a_line(pair: list[str]) -> None:
    result = chat(pair, *EMULATED, "--vram", "100B")
    assert result.exit_code == 0
    assert "cannot hold" in result.stderr and "all 48 on the CPU" in result.stderr


def test_ablations_reach_the_engine(pair: list[str]) -> None:
    result = chat(pair, *EMULATED, "--no-calibrate", "--ablate", "no-sd", "--ablate", "no-evict", "--stats", "json")
    assert result.exit_code == 0
    stats = json.loads(result.stderr.splitlines()[-1])
    assert stats["evictions"] == 0
    assert stats["steps"] == 23  # one token at a time


def test_ablations_are_named(pair: list[str]) -> None:
    """And one that the policy has no part for is said to change nothing."""
    options = [*EMULATED, "--no-calibrate", "--policy", "lru"]
    ablations = ("--ablate", "no-evict", "--ablate", "no-spec-ue", "--ablate", "no-sd")
    result = chat(pair, *options, *ablations, "-o", "json")
    assert result.exit_code == 0
    assert "lru, no-evict, no-sd" in notes(result)
    assert "--ablate no-spec-ue" in result.stderr
    assert "--ablate no-spec-ue" not in chat(pair, *EMULATED, "--no-calibrate", "--ablate", "no-spec-ue").stderr


def test_ablations_without_a_device(pair: list[str]) -> None:
    result = chat(pair, "-dev", "none", "--ablate", "no-evict", "--ablate", "no-sd")
    assert "--ablate no-evict" in result.stderr


def test_profile_takes_a_device(pair: list[str]) -> None:
    plain = run("profile", *pair, "-p", "tell me", "-n", "16", "-dev", "none", "-o", "json", "--layer", "1")
    placed = run(
        "profile", *pair, "-p", "tell me", "-n", "16", *EMULATED, "--no-calibrate", "-o", "json", "--layer", "1"
    )
    assert placed.exit_code == 0, placed.stderr
    assert "of 48 on an emulated GPU" in placed.stderr
    assert json.loads(placed.stdout)["unique_experts"] == json.loads(plain.stdout)["unique_experts"]


def test_calibrate_as_json(pair: list[str]) -> None:
    measured = run_json("calibrate", *pair, *EMULATED, "--cache-ratio", "0.5")
    assert (measured["threads"], measured["cache_slots"], measured["policy"]) == (1, 24, "spac")
    assert "emulated" in measured["device"]
    units = measured["units"]
    assert units["transfer_expert_s"] > 0 and len(units["r_c"]) == len(units["r_g"]) == 5
    assert measured["speed"] > 0 and measured["prefill_path"] in ("cpu", "resident")
    assert "Measured before" in notes(chat(pair, *EMULATED, "--cache-ratio", "0.5", "-o", "json"))  # it is kept


def test_calibrate_as_tables(pair: list[str]) -> None:
    result = run("calibrate", *pair, *EMULATED, "--cache-ratio", "0.5")
    assert result.exit_code == 0, result.stderr
    for heading in ("us per expert", "move an expert", "r_c: pairs on the CPU", "ms per step", "Chosen for prompts"):
        assert heading in result.stdout


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["-dev", "none"], "-dev emulated"),
        ([*EMULATED, "--cache-ratio", "0"], "--cache-ratio R or --vram SIZE"),
        ([*EMULATED, "--vram", "100B"], "--cache-ratio R or --vram SIZE"),
    ],
)
def test_calibrate_needs_experts_on_a_device(pair: list[str], options: list[str], hint: str) -> None:
    assert hint in refused("calibrate", *pair, *options)


def test_calibrate_needs_experts(tiny_draft: Path) -> None:
    assert "-m FILE" in refused("calibrate", "-m", tiny_draft, "-t", "1", "-c", "512", *EMULATED)


def test_defaults_of_the_options_are_those_of_the_configuration() -> None:
    assert PlacementOptions().config() == PlacementConfig()


@pytest.mark.parametrize(
    ("device", "may_emulate", "calm"),
    [("emulated", False, True), ("rpc://127.0.0.1:50052", False, True), ("auto", True, True), ("auto", False, False)],
)
def test_idle_threads_beside_the_emulated_device(
    monkeypatch: pytest.MonkeyPatch, device: str, may_emulate: bool, calm: bool
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    limit_openmp_spin(device, may_emulate=may_emulate)
    assert ("GOMP_SPINCOUNT" in os.environ) == calm
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_openmp_spin("none", reads_experts=True)
    assert os.environ["GOMP_SPINCOUNT"] == "7"  # the user's value stays


@pytest.mark.parametrize(
    ("ram", "n_free", "calm"), [("auto", 10, True), ("auto", 10**15, False), ("1GiB", 10**15, True), ("off", 10, False)]
)
def test_idle_threads_while_experts_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ram: str, n_free: int, calm: bool
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(100))
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=n_free, total=n_free))
    EngineOptions(model=model).limit_openmp_spin(ram=ram)
    assert ("GOMP_SPINCOUNT" in os.environ) == calm
