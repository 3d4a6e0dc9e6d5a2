"""`moeedge show` against the file's own metadata, and `moeedge ps` next to a process that runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from moeedge.health.running import command_of
from tests.support.commands import refused, run, run_json


def test_show_says_what_the_file_says(bundled_pair: tuple[Path, Path]) -> None:
    reader = GGUFReader(bundled_pair[0])

    def value(key: str) -> object:
        return reader.get_field(key).contents()

    card = run_json("show", bundled_pair[0])
    facts = card["facts"]
    assert (facts["architecture"], card["licence"]) == (value("general.architecture"), value("general.license"))
    assert card["template"] == value("tokenizer.chat_template")
    assert facts["n_experts"] == value("qwen3moe.expert_count")
    assert facts["n_ctx_train"] == value("qwen3moe.context_length")
    assert facts["n_weights"] == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert run("show", "--template").stdout == f"{card['template']}\n"
    text = run("show").stdout
    assert "qwen3moe" in text and "Q4_0" in text and "apache-2.0" in text


def test_show_of_a_dense_model_and_of_none(tiny_draft: Path) -> None:
    assert run_json("show", tiny_draft)["facts"]["n_experts"] == 0
    assert "none: a dense model" in run("show", tiny_draft).stdout
    assert "nothing.gguf" in refused("show", "nothing.gguf")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/usr/bin/python3", "-m", "moeedge", "chat", "-m", "x"], "chat"),
        (["/usr/bin/python3", "/home/me/.venv/bin/moeedge", "bench"], "bench"),
        (["moeedge"], ""),
        (["vim", "moeedge"], None),
        (["/usr/bin/python3", "-m", "pytest", "moeedge"], None),
        ([], None),
    ],
)
def test_command_lines_of_moeedge(words: list[str], command: str | None) -> None:
    assert command_of(words) == command


def test_ps_lists_a_chat_and_its_models(pair: list[str]) -> None:
    arguments = ["chat", *pair, "-p", "one two", "-n", "100000", "-dev", "none"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moeedge", *arguments, "--context-shift"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        mine: list[dict[str, Any]] = []
        while not (mine and len(mine[0]["models"]) == 2) and time.monotonic() < deadline:  # the draft comes last
            assert process.poll() is None
            mine = [row for row in run_json("ps") if row["pid"] == process.pid]
            time.sleep(0.2)
        [row] = mine
        assert row["command"] == "chat" and row["memory_bytes"] > 2**20
        assert set(row["models"]) == {str(Path(pair[1]).resolve()), str(Path(pair[3]).resolve())}
    finally:
        process.kill()
        process.wait()
    assert all(row["pid"] != process.pid for row in run_json("ps"))


def test_without_network_the_catalog_says_what_it_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    card = run_json("show", "granite-3.1-1b-a400m")
    assert card["from_catalog"] is True and "HF_HUB_OFFLINE" in card["reason"]
    assert card["variant"]["size_bytes"] == 821847360 and card["shape"]["experts"] == 32
    assert "784 MiB" in run("show", "granite-3.1-1b-a400m").stdout
    assert run("show", "granite-3.1-1b-a400m", "--template").exit_code == 1  # which only the file has
    assert run("show", "hf:me/mine-GGUF:mine.gguf").exit_code == 1
