"""`moeedge lab ablate`: SP-MoE's parts, one row each, every answer stock's."""

from __future__ import annotations

from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moeedge.engine.speculative import SpeculativeLoop
from moeedge.errors import InputError
from moeedge.lab.cli.sp_moe import print_ablation
from moeedge.lab.experiments.sp_moe import AblationRow, quantized
from moeedge.lab.policies import prefetching
from moeedge.llama.model import Model
from moeedge.policies.base import Plan
from moeedge.scheduler.driver import StepDriver
from tests.conftest import TinyFactory
from tests.support.commands import refused, run, run_json

SHORT = ["--draft-max", "3", "-n", "12", "--limit", "2", "-r", "1", "-t", "1", "-c", "512"]
DEVICE = ["-dev", "emulated:threads=1,link=20MB/s,latency=50us"]


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("qwen3moe", layers=4, experts=32, expert_type="Q8_0", dense_type="F16")


def ablate(*arguments: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run_json("lab", "ablate", "sp-moe", *SHORT, *arguments)
    return rows


@pytest.mark.flaky(reruns=2)
def test_figure_12(target: Path, cache: Path) -> None:
    """The target drafts for itself, quantized: near-perfect drafts, hidden states that predict nearly all experts."""
    fast = ["-dev", "emulated:threads=1,link=1GB/s,latency=5us"]
    rows = ablate("-m", str(target), *fast, "--cache-ratio", "0.5", "--cutoff", "4")
    assert [row["variant"] for row in rows] == ["baseline", "vanilla", "worker", "batched"]
    assert all(row["equal"] == row["answers"] == 2 for row in rows)
    assert list(cache.glob("drafts/*-q4_0.gguf"))
    baseline, *prefetching = rows
    assert {row["cutoff_layer"] for row in rows} == {4}
    assert baseline["predicted_right"] is None and baseline["speedup"] == 1.0
    for row in prefetching:
        assert row["predicted_right"] > 0.6
        assert row["loaded_per_step"] < baseline["loaded_per_step"]
        assert row["acceptance_rate"] > 0.5
    stops = {row["variant"]: row["draft_stops_per_step"] for row in rows}
    assert stops.pop("vanilla") > 0 and set(stops.values()) == {0.0}, "vanilla alone waits while it drafts"
    assert baseline["ahead_per_step"] == 0.0 and baseline["plans_per_step"] == 0.0, "all on demand"
    assert prefetching[0]["ahead_per_step"] > 0.0
    *single, batched = rows
    assert all(row["transfers_per_step"] == pytest.approx(row["uploads_per_step"]) for row in single)
    assert batched["transfers_per_step"] < 0.9 * batched["uploads_per_step"]


def test_the_cutoff_is_solved_from_measured_times(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --cutoff. How many layers it is depends on how busy the machine is: the solver's answer is given."""
    times: list[tuple[float, float]] = []

    def cutoff_layer(
        n_layers: int, n_prefetched: float, n_slots: int, draft_s: float, expert_s: float, *_: float
    ) -> int:
        times.append((draft_s, expert_s))
        return 2

    monkeypatch.setattr(prefetching, "cutoff_layer", cutoff_layer)
    rows = ablate("-m", str(target), *DEVICE, "--cache-ratio", "0.5")
    assert {row["cutoff_layer"] for row in rows} == {2}
    assert times and min(times[-1]) > 0.0


def test_figure_14(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row per cutoff layer; all prefetched experts belong to layers before it."""
    asked: dict[int, set[int]] = {}
    push = StepDriver.push

    def watched(self: StepDriver) -> Plan | None:
        if self.pending is not None and self.filter_plan is not None:  # not that of the calibration
            asked.setdefault(id(self), set()).update(self.pending.uploads[:, 0].tolist())
        return push(self)

    monkeypatch.setattr(StepDriver, "push", watched)
    rows = ablate("-m", str(target), *DEVICE, "--cache-ratio", "0.5", "--cutoff", "0,2,4")
    assert [row["cutoff_layer"] for row in rows] == [0, 2, 4]
    assert all(row["equal"] == row["answers"] for row in rows)
    assert list(asked.values()) == [set(), {0, 1}, {0, 1, 2, 3}]
    assert rows[0]["ahead_per_step"] == 0.0 and rows[0]["predicted_right"] is None


def test_a_draft_of_another_width(target: Path, tiny: TinyFactory) -> None:
    draft = tiny("qwen3", embd=32, heads=2, heads_kv=1)
    assert " 32 " in refused("lab", "ablate", *SHORT, "-m", target, "-md", draft, *DEVICE, "--cutoff", "1")


def test_a_dense_model_and_a_folder_that_may_not_be_written(
    tiny_draft: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no experts" in refused("lab", "ablate", "-m", tiny_draft, *DEVICE)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOEEDGE_CACHE", str(tmp_path / "file"))
    assert "MOEEDGE_CACHE" in refused("lab", "ablate", "-m", target, *DEVICE)


def test_an_interrupt_within_an_answer_ends_it_all(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def step(*_: object) -> None:
        nonlocal steps
        steps += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(SpeculativeLoop, "_step", step)
    result = run("lab", "ablate", *SHORT, "-m", target, *DEVICE, "--cutoff", "1")
    assert result.exit_code == 130, result.output
    assert steps == 1 and not result.stdout


def test_a_quantization_is_made_once(target: Path) -> None:
    first = quantized(target, "q4_0")
    made = first.stat().st_mtime_ns
    assert quantized(target, "q4_0") == first and first.stat().st_mtime_ns == made
    assert quantized(target, "q8_0") != first
    with Model.load(first) as draft, Model.load(target) as model:
        assert draft.info.n_embd == model.info.n_embd and draft.info.n_layers == model.info.n_layers
        assert draft.info.size_bytes < model.info.size_bytes
    with pytest.raises(InputError, match="q1"):
        quantized(target, "q1")


def test_the_table_tells_the_counts_behind_an_order() -> None:
    """In 80 columns, every heading whole."""
    numbers = {field.name: 0.0 for field in fields(AblationRow)} | {"cutoff_layer": 18, "equal": 4, "answers": 4}
    first = AblationRow(**numbers | {"variant": "baseline", "hit_rate_experts": 0.5, "loaded_per_step": 517.3})  # type: ignore[arg-type]
    console = Console(width=80, file=StringIO())
    print_ablation([first], console)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    titles = "variant cutoff ms/token speed expert hits waits ahead MB sends stops right equal"
    assert lines[0].split() == titles.split()
    assert lines[1].split()[:2] == ["baseline", "18"] and "517.3" in lines[1]
