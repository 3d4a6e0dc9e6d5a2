"""`moeedge list --fits`: what runs in some memory, the best placed first."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.hub.cache import hub_cache
from moeedge.hub.catalog import load_catalog
from tests.support.commands import refused, run, run_json

ORDER = ["GPU", "GPU and RAM", "RAM", "disk"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_gpu_of_12_gb() -> None:
    rows = run_json("list", "--all", "--fits", "12GB", "--ram", "32GB")
    places = {row["name"]: row["fit"]["place"] for row in rows}
    assert (places["granite-3.1-1b-a400m"], places["qwen3-30b-a3b"], places["gpt-oss-120b"]) == (
        "GPU",
        "GPU and RAM",
        "disk",
    )
    ranks = [ORDER.index(row["fit"]["place"]) for row in rows]
    assert ranks == sorted(ranks)
    fit = next(row["fit"] for row in rows if row["name"] == "qwen3-30b-a3b")
    assert 0.3 < fit["device_ratio"] < 0.7 and fit["ram_ratio"] == 1 and fit["n_ctx"] == 8192 and fit["estimated"]


def test_models_that_do_not_run_are_left_out() -> None:
    few, many = (run_json("list", "--all", "--fits", "none", "--ram", size) for size in ("2GB", "64GB"))
    assert {row["name"] for row in few} < {row["name"] for row in many}
    assert all(row["fit"]["place"] in ("RAM", "disk") for row in many)
    assert "too large" in run("list", "--all", "--fits", "none", "--ram", "2GB").stdout


def test_without_all_only_what_is_here() -> None:
    assert [row["name"] for row in run_json("list", "--fits", "auto")] == ["bundled"]


def test_bad_sizes() -> None:
    assert "12GB" in refused("list", "--fits", "12")
    assert "--fits" in refused("list", "--ram", "12GB")


def test_a_machine_without_models_is_offered_one() -> None:
    starter = load_catalog().starter()
    assert starter is not None and starter.command in run("list").stdout
    blob = hub_cache() / "models--me--x-GGUF" / "snapshots" / ("c" * 40) / "x.gguf"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"GGUF")
    assert starter.command not in run("list").stdout
