"""`moeedge bench --routing` and `--accept` from the outside, and what `lab surface` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeedge.native.abi import Phase
from tests.support.commands import refused, run, run_json
from tests.support.traces import make_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "trace.npz"
    make_trace([(Phase.DECODE, n // 40, n, True) for n in range(160)], n_layers=3, n_experts=16, n_used=4).save(path)
    return path


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, trace: Path, tiny_moe: Path, tiny_draft: Path) -> Path:
    """Rows of scripted acceptance under forced routing."""
    modes = "stock-ar,stock-sd:1,stock-sd:4,moeedge:auto,moeedge:2"
    rows = run_json(
        "bench", "-m", tiny_moe, "-md", tiny_draft, "-dev", "none", "--ram", "off", "-t", 1, "-n", 24, "-r", 2,
        "--routing", trace, "--accept", ".3,.9", "--modes", modes,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("records") / "record.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_rows_say_what_was_forced(record: Path, trace: Path) -> None:
    rows = json.loads(record.read_text(encoding="utf-8"))
    assert [(row["acceptance"], row["mode"], row["gamma"]) for row in rows if row["acceptance"] == 0.9] == [
        (0.9, "stock-ar", 0), (0.9, "stock-sd", 1), (0.9, "stock-sd", 4), (0.9, "moeedge", 16), (0.9, "moeedge", 2),
    ]  # fmt: skip
    for row in rows:
        assert row["routing"] == trace.name and row["routing_scaling"] == "" and len(row["trace_sha256"]) == 64
        assert row["routing_cost"] is not None and row["confidences"] == "calibrated"
        assert row["routing_boundaries"][0][:2] == [0, 40]
        assert row["output_check"] is None
    fixed = {row["gamma"]: row for row in rows if row["acceptance"] == 0.9 and not row["auto_gamma"]}
    assert fixed[1]["acceptance_rate"] > 0.6 and fixed[4]["tokens_per_step"] > fixed[1]["tokens_per_step"]
    assert all(row["best_stock"] for row in rows if row["mode"] == "moeedge")


def test_the_surface_of_a_record(record: Path) -> None:
    surface = run_json("lab", "surface", record)
    assert [point["acceptance"] for point in surface["points"]] == [0.3, 0.9]
    assert all(point["draft_cost"] > 0 and point["fixed_gamma"] == 2 for point in surface["points"])
    assert {each["acceptance"] for each in surface["break_even"]} == {0.3, 0.9}
    assert "T_D / T_T" in run("lab", "surface", record).stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--accept", "1.5"),
        ("--accept", "x"),
        ("--accept", ".5", "-n", "1"),
        ("--accept-confidence", "constant"),
        ("--accept", ".5", "--dataset", "toy"),
        ("--routing", "absent.npz"),
        ("--accept", ".5", "--parallel", "2"),
    ],
)
def test_what_cannot_be_forced_is_refused(options: tuple[str, ...], tiny_moe: Path, tiny_draft: Path) -> None:
    refused("bench", "-m", tiny_moe, "-md", tiny_draft, "-dev", "none", "--ram", "off", *options)


def test_other_files_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text("[{}]", encoding="utf-8")
    refused("lab", "surface", tmp_path / "own.json")
    refused("lab", "surface", tmp_path / "absent.json")
