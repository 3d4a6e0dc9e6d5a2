"""Plans of models that are not on this machine, against a local hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeedge.planning import headers
from moeedge.run import Run
from tests.conftest import TinyFactory
from tests.hub.conftest import BIG, SMALL, HubMachine
from tests.support.hub import local_hub


@pytest.fixture
def place(tiny: TinyFactory, tmp_path: Path) -> Iterator[HubMachine]:
    """A target of 12 MiB of experts, and its draft."""
    target = tiny("qwen3moe", expert_type="F32", experts=64, layers=8).read_bytes()
    with local_hub({BIG: target, SMALL: tiny("qwen3").read_bytes()}) as hub:
        here = HubMachine(hub, tmp_path)
        here.write_catalog()
        yield here


def test_a_catalog_name_is_planned_with_its_draft_before_pull(place: HubMachine, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = place.run("plan", "-m", "big", "-c", "1024", "-o", "json", TMPDIR=str(scratch))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    size = len(place.hub.files[BIG])
    assert found["model"]["file_bytes"] == size and found["model"]["missing_bytes"] >= size - 2**22
    assert found["model"]["is_here"] is False and found["draft"]["is_here"] is False
    assert found["command"] == "moeedge chat -m big -c 1024" and found["estimated"] is False
    assert any(note.startswith("moeedge pull big") for note in found["notes"]), found["notes"]
    assert "header" in done.stderr
    assert place.hub.ranges() == [None, None]  # one request each, ended early
    assert not list(scratch.iterdir()) and place.blobs(BIG[0]) == {}


@pytest.mark.slow
def test_a_file_of_the_hub_is_planned_before_pull(place: HubMachine) -> None:
    done = place.run("plan", "-m", f"hf:{BIG[0]}:{BIG[1]}", "-md", "none")
    assert done.returncode == 0, done.stderr
    assert f"moeedge pull hf:{BIG[0]}:{BIG[1]}" in " ".join(done.stdout.split())


def test_a_long_header_is_fetched_in_pieces(place: HubMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.environment().items():
        if name.startswith(("HF_", "MOEEDGE_")):
            monkeypatch.setenv(name, value)
    # huggingface_hub reads the variable when it is imported, which a test without network may have done
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(headers, "_FIRST_BYTES", 256)
    path, _ = headers.locate_or_fetch(f"hf:{BIG[0]}:{BIG[1]}", tmp_path, Run())
    assert path.read_bytes() == place.hub.files[BIG][: path.stat().st_size]
    assert place.hub.ranges()[:3] == [None, "bytes=256-", "bytes=1024-"]
    assert path.stat().st_size <= 2**16


@pytest.mark.slow
def test_hub_errors_are_one_sentence(place: HubMachine) -> None:
    place.hub.files[BIG] = b"no model" * 100
    done = place.run("plan", "-m", f"hf:{BIG[0]}:{BIG[1]}")
    assert done.returncode == 1 and "GGUF" in done.stderr and done.stdout == ""
    done = place.run("plan", "-m", "bigg")
    assert done.returncode == 2 and "'bigg'" in done.stderr
    name = f"hf:{BIG[0]}:{BIG[1]}"  # of which the catalog knows nothing
    done = place.run("plan", "-m", name, HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "HF_HUB_OFFLINE" in done.stderr
    place.hub.status = 503
    done = place.run("plan", "-m", name)
    assert done.returncode == 1 and "HTTP status 503" in done.stderr and "Traceback" not in done.stderr


def test_without_network_the_list_of_what_fits_is_named(place: HubMachine) -> None:
    done = place.run("plan", "-m", "big", HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "HF_HUB_OFFLINE" in done.stderr and "--fits" in done.stderr
    assert place.hub.ranges() == []


def test_a_draft_that_cannot_be_read_is_an_error(place: HubMachine) -> None:
    assert place.run("pull", "big", "--no-draft").returncode == 0
    done = place.run("plan", "-m", "big", "-md", f"hf:{SMALL[0]}:{SMALL[1]}", HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "HF_HUB_OFFLINE" in done.stderr
