"""`moeedge list` of what is here or would run, and `show` against the file's metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.hub.catalog import load_catalog
from moeedge.hub.local import hub_cache
from tests.support.commands import refused, run, run_json


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_without_all_only_what_is_here() -> None:
    assert [row["name"] for row in run_json("list", "--fits", "auto")] == ["bundled"]


def test_all_tells_drafts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    drafts = [row["name"] for row in run_json("list", "--all") if row["draft_of"] and not row["drafts"]]
    shown = [line.split()[0] for line in run("list", "--all").stdout.splitlines() if "is a draft" in line]
    assert [name.removesuffix("*") for name in shown] == drafts != []


def test_a_machine_without_models_is_offered_one() -> None:
    starter = load_catalog().starter()
    assert starter is not None and starter.command in run("list").stdout
    blob = hub_cache() / "models--me--x-GGUF" / "snapshots" / ("c" * 40) / "x.gguf"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"GGUF")
    assert starter.command not in run("list").stdout


def test_show_of_a_dense_model_and_of_none(tiny_draft: Path) -> None:
    assert run_json("show", tiny_draft)["facts"]["n_experts"] == 0
    assert "none: a dense model" in run("show", tiny_draft).stdout
    assert "nothing.gguf" in refused("show", "nothing.gguf")


def test_show_without_network_says_what_the_catalog_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    card = run_json("show", "granite-3.1-1b-a400m")
    assert card["from_catalog"] is True and "HF_HUB_OFFLINE" in card["reason"]
    assert card["variant"]["size_bytes"] == 821847360 and card["shape"]["experts"] == 32
    assert "784 MiB" in run("show", "granite-3.1-1b-a400m").stdout
    assert run("show", "granite-3.1-1b-a400m", "--template").exit_code == 1  # which only the file has
    assert run("show", "hf:me/mine-GGUF:mine.gguf").exit_code == 1
